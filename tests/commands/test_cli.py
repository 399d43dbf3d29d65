import json
import subprocess
import sys
from pathlib import Path

import pytest

import kernelwarehouse as kw
from kernelwarehouse.cli import main


def test_plan_prints_what_python_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "resnet18", "--budget", "1/2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    plan = kw.Plan.load(path)
    assert str(plan).strip() == printed.strip()
    assert plan.parameters_after == 7_431_044
    assert json.loads(path.read_text())["warehouses"][0]["n"] == 112


def test_plan_takes_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "resnet18", "--sharing", "layer", "--exclude", "layer1", "--exclude", "layer2"]) == 0
    printed = capsys.readouterr().out
    assert "excluded" in printed
    assert "Plan(10 warehouses, 10 layers" in printed


def test_plan_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kw4x_deit_tiny"]) == 0
    assert "20,435,968" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["resnet18", "kw1x_resnet18"])
def test_plan_takes_a_begin_for_presets_too(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", model, "--begin", "logits", "--json", str(path)]) == 0
    assert "begin at their logits" in capsys.readouterr().out
    plan = kw.Plan.load(path)
    assert plan.config.begin == "logits"
    assert {warehouse.begin for warehouse in plan.warehouses} == {"logits"}


def test_zoo_lists_counts_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo"]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "kw1x_resnet50" in line)
    assert "28,052,310" in row
    assert "28.05M" in row
    assert "advanced_published" in row
    assert "kw1d4x_resnet18: no setting gives the printed count" in printed.splitlines()
    note = next(line for line in printed.splitlines() if line.startswith("recipes: "))
    assert "no configuration of kw3d4x_convnext_tiny, of KW*, of DeiT, of the compared methods" in note
    assert "…" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "resnet18", "--budget", "nan"], "budget is 'nan'"),
        (["plan", "resnet18", "--exclude", "layer9"], "'layer9' matches no layer"),
        (["plan", "resnet1"], "resnet1"),
        (["plan", "resnet18", "--begin", "logits", "--attention", "softmax"], "attention is 'softmax', which is above"),
        (["plan", "kw1x_resnet18", "--begin", "logits", "--budget", "2"], "--budget goes with a timm model"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_module_runs() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "kernelwarehouse", "--help"], capture_output=True, text=True, check=True
    )
    assert "plan" in found.stdout

"""The command for a person with a GPU runs where there is none, and what it writes is what layers then do."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu
from benchmarks.cases import converted_network

from kernelwarehouse.assemble import STRATEGIES, grouped, route_table, routing
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.layers import WarehouseLayer

SMALL = ["--device", "cpu", "--preset", "kw1x_small_resnet", "--batch", "2", "--rounds", "1", "--dtype", "bfloat16"]


def test_the_table_is_what_the_route_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "routes.json"
    gpu.main([*SMALL, "--mode", "training", "--layout", "contiguous", "--out", str(out)])
    choices = route_table.read(out)
    monkeypatch.setenv(route_table.VARIABLE, str(out))
    monkeypatch.setattr(routing, "_answers", {})
    model = converted_network("kw1x_small_resnet").train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 3, 32, 32))
    layers = [layer for layer in model.modules() if isinstance(layer, WarehouseLayer)]
    assert len(choices) == len({(layer.geometry, layer.attention.shape) for layer in layers})
    for layer in layers:
        assert layer.route.reason == "as chosen before"
    assert {(layer.route.forward, layer.route.backward) for layer in layers} == {
        (choice.forward, choice.backward) for choice in choices.values()
    }


@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_a_strategy_that_is_wrong_is_found_and_nothing_is_timed(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: object) -> tuple[torch.Tensor | None, ...]:
        """For one layer out of many, whose errors come neither first nor last."""
        grads = list(grouped.backward(*arguments))
        if arguments[4] == gpu.LAYERS["3x3, stride 2"][0]:
            grads[2] = grads[2] * factor
        return tuple(grads)

    monkeypatch.setitem(STRATEGIES, "grouped", Strategy("grouped", grouped.forward, wrong))
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "routes.json"
    with pytest.raises(SystemExit, match="is wrong on this device"):
        gpu.main([*SMALL, "--out", str(out)])
    assert not out.exists()
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert failed
    assert all("grouped" in line and "3x3, stride 2" in line for line in failed)


def test_a_candidate_that_fails_is_passed_over_and_networks_are_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> tuple[torch.Tensor | None, ...]:
        raise torch.OutOfMemoryError("not enough of it")

    def broken_off(preset: str) -> torch.nn.Module:
        if preset != "kw1x_small_resnet":
            raise KeyboardInterrupt
        return converted_network(preset)

    monkeypatch.setitem(STRATEGIES, "grouped", Strategy("grouped", grouped.forward, fails))
    monkeypatch.setattr(gpu, "check_all", lambda *_: True)
    monkeypatch.setattr(gpu, "converted_network", broken_off)
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "routes.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*SMALL, "--preset", "kw1x_small_resnet", "kw1x_resnet18", "--mode", "training", "--out", str(out)])
    assert {choice.backward for choice in route_table.read(out).values()} <= STRATEGIES.keys() - {"grouped"}
    assert "grouped fails: not enough of it" in capsys.readouterr().out


ASKS_FOR_TF32 = """
import sys
import torch
from benchmarks import gpu
from kernelwarehouse.assemble import grouped, routing
from torch._subclasses.fake_tensor import FakeTensorMode

geometry, (x, _, cells) = gpu.LAYERS["3x3"][0], gpu._inputs(*gpu.LAYERS["3x3"], grouped.STRATEGY, torch.float32)
keys = []
for allow in sys.argv[1:]:
    exec(allow)
    with FakeTensorMode(allow_non_fake_inputs=True):
        question = routing.ask(torch.empty(x.shape, device="cuda"), cells, geometry)
    keys.append(question._replace(device=torch.device("cpu")).key())
print([" with tf32" in key for key in keys], len(set(keys)))
"""


@pytest.mark.parametrize(
    "allow",
    [
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
    ],
)
def test_choices_with_tf32_are_others(allow: str) -> None:
    """In a process of its own: torch refuses to answer in one way what was set in the other."""
    command = [sys.executable, "-c", ASKS_FOR_TF32, "pass", allow]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[False, True] 2", done.stderr


def test_counting_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    gpu.main(["--paper", "--preset", "kw1x_small_resnet", "--batch", "64", "--dtype", "bfloat16"])
    shown = capsys.readouterr().out
    assert shown.count("kw1x_small_resnet") == 2  # layouts


def test_a_try_on_the_cpu_does_not_choose_for_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(SMALL)
    assert "--device cpu is for a try" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_can_be_done() -> None:
    with pytest.raises(SystemExit, match=r"sees no GPU.*--paper"):
        gpu.main([])

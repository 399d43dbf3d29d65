"""The benchmark commands run and write what their readers expect; what they measure is not a test's business."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import breakdown, compiled, memory, mixing, speed

PRESET = ["--preset", "kw1x_small_resnet", "--batch", "2"]


def test_speed_writes_ratios_of_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    speed.main([*PRESET, "--mode", "inference", "training", "--seconds", "0", "--rounds", "1", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["machine"]["threads"] == 1
    assert [row["name"] for row in written["rows"]] == [
        "kw1x_small_resnet inference batch 2",
        "kw1x_small_resnet training batch 2",
    ]
    for row in written["rows"]:
        taken = row["milliseconds"]
        for way in ("plain", "ours"):
            assert row["ratio"][way] == pytest.approx(taken[way] / taken["static"], rel=0.02)


def test_memory_takes_each_way_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    memory.main([*PRESET, "--ways", "static", "ours", "--steps", "1", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["megabytes"]) == {"static", "ours"}
    assert all(size > 1 for size in row["megabytes"].values())


def test_mixing_compares_the_hidden_way_with_the_usual_one(tmp_path: Path) -> None:
    out = tmp_path / "mixing.json"
    mixing.main(
        ["--only", "kw4x_resnet18 layer3", "--batch", "2", "--seconds", "0", "--rounds", "1", "--out", str(out)]
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert row["usual"] == row["chosen"] != "hidden"  # two samples are too few
    taken = row["milliseconds"]
    assert set(taken) == {row["usual"], "hidden"}
    assert row["ratio"] == pytest.approx(taken["hidden"] / taken[row["usual"]], rel=0.02)
    assert row["units"] == 17


def test_breakdown_names_every_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    breakdown.main(["kw1x_small_resnet", "--batch", "2", "--rounds", "1", "--operators", "3"])
    shown = capsys.readouterr().out
    assert "stages.2.0.conv2_kxk.conv" in shown
    assert "all 8 layers" in shown
    assert "aten::" in shown  # the names of operators


def test_compiled_counts_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main(["--preset", "kw1x_small_resnet", "--batch", "32"])
    static, plain, ours = map(float, re.findall(r"(\d+\.\d) MB", capsys.readouterr().out))
    assert static < ours < 1.25 * static  # the attentions
    assert plain > 3 * static

"""Choices that were measured: the machine's own file, those of a run, and pinned ones."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelwarehouse.assemble import branch, build, depthwise, native, route_table, routing
from kernelwarehouse.assemble.measure import Times, measure
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.layers import Conv2d


def test_a_damaged_file_of_the_machine_is_replaced(measuring: Path) -> None:
    measuring.write_text("{")
    layer = Conv2d(16, 32, 3, config=WarehouseConfig(2))
    layer(torch.randn(2, 16, 6, 6))
    assert len(route_table.read(measuring)) == 1


def test_a_folder_that_cannot_be_written_stops_nothing(measuring: Path) -> None:
    measuring.parent.rmdir()
    measuring.parent.write_text("a file where the folder should be")
    layer = Conv2d(16, 32, 3, config=WarehouseConfig(2))
    layer(torch.randn(2, 16, 6, 6))
    assert layer.route is not None
    assert layer.route.reason.startswith("measured")


def test_what_other_processes_have_measured_meanwhile_stays(measuring: Path) -> None:
    route_table.remember("cpu, old", Choice("grouped"))
    theirs = {"cpu, old": Choice("matmul"), "cpu, new": Choice("native")}
    measuring.write_text(json.dumps(route_table.to_json(theirs)))
    route_table.remember("cpu, ours", Choice("windows"))
    assert route_table.read(measuring) == {**theirs, "cpu, ours": Choice("windows")}


def test_a_choice_that_does_not_last_is_one_of_the_process(measuring: Path) -> None:
    route_table.remember("cpu, quiet", Choice("native"))
    run: route_table.Choices = {}
    with route_table.keeping(run):
        route_table.remember("cpu, crowded", Choice("windows"), lasting=False)
    assert run == {"cpu, crowded": Choice("windows")}
    assert route_table.known("cpu, crowded") == Choice("windows")
    assert route_table.read(measuring) == {"cpu, quiet": Choice("native")}


def test_who_writes_keeps_others_from_it(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_table, "_PATIENCE", 0.0)
    with FileLock(measuring.with_suffix(".lock")):
        route_table.remember("cpu, ours", Choice("windows"))
    assert not measuring.exists()
    assert route_table.known("cpu, ours") == Choice("windows")


def test_everybody_s_umask_does_not_make_the_file_untrusted(measuring: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = os.umask(0)
    try:
        route_table.remember("cpu, ours", Choice("windows"))
    finally:
        os.umask(before)
    assert route_table._read_own(measuring) == {"cpu, ours": Choice("windows")}
    assert not caplog.messages


def test_a_place_is_found_where_kernels_find_theirs(
    measuring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual folder, or that of this user alone; without either, choices hold for the process."""
    own = tmp_path / f"kernelwarehouse-{os.geteuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda path, mode: False)
        assert route_table.machine_file.__wrapped__() == own / measuring.name
        measuring.write_text("")  # what is there is read
        assert route_table.machine_file.__wrapped__() == measuring
    with monkeypatch.context() as homeless:
        homeless.delenv("TORCH_EXTENSIONS_DIR")
        homeless.delenv("XDG_CACHE_HOME", raising=False)
        homeless.setattr(Path, "home", _no_home)
        assert route_table.machine_file.__wrapped__() == own / measuring.name
    measuring.parent.chmod(0o777)
    assert route_table.machine_file.__wrapped__() == own / measuring.name
    own.chmod(0o777)
    assert route_table.machine_file.__wrapped__() is None


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_place_choices_hold_for_the_process(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as nowhere:
        nowhere.setattr(route_table, "machine_file", lambda device: None)
        route_table.remember("cpu, ours", Choice("windows"))
        assert route_table.known("cpu, ours") == Choice("windows")
    assert not measuring.exists()


def test_other_devices_have_a_file_of_their_own_and_no_kernels_built(
    measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `benchmarks.gpu` writes; a process that computes on a GPU alone reads it."""
    route_table.remember("cpu, ours", Choice("native"))

    def built() -> bool:
        raise AssertionError("kernels for the CPU are built")

    for module in (build, branch, depthwise, native):
        monkeypatch.setattr(module, "load_native", built)
    assert route_table.known("cuda of a kind, float32: 3x3") is None
    route_table.remember("cuda of a kind, float32: 3x3", Choice("windows"))
    with FakeTensorMode(), torch.no_grad():
        Conv2d(16, 32, 3, device="cuda")(torch.empty(2, 16, 6, 6, device="cuda"))
    route_table._of_machine.cache_clear()  # as in another process
    assert route_table.known("cuda of a kind, float32: 3x3") == Choice("windows")
    path = route_table.machine_file("cuda")
    assert path is not None
    assert path.parent == measuring.parent
    assert route_table.read(path).keys() == {"cuda of a kind, float32: 3x3"}
    assert route_table.read(measuring).keys() == {"cpu, ours"}


def _key_of(layer: nn.Module, x: Tensor, measuring: Path) -> str:
    with torch.no_grad():
        layer(x)
    [key] = route_table.read(measuring)
    return key


def test_choices_of_a_run_come_before_those_of_the_machine(measuring: Path) -> None:
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    key = _key_of(layer, x, measuring)
    other = next(name for name in ("grouped", "matmul") if name != layer.route.forward)
    machine = layer.route.forward
    with route_table.keeping({key: Choice(other)}), torch.no_grad():
        layer(x)
        assert layer.route.forward == other
    with torch.no_grad():
        layer(x)
    assert layer.route.forward == machine


def test_runs_inside_each_other_end_one_by_one(measuring: Path) -> None:
    layer, x, outer, inner = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6), {}, {}
    with route_table.keeping(outer), torch.no_grad():
        with route_table.keeping(inner):
            pass  # both are empty, and alike
        layer(x)
    assert len(outer) == 1
    assert inner == {}


def test_an_answer_from_before_a_run_is_not_kept_for_it(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may begin a run while this one measures."""
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    monkeypatch.setattr(routing, "measure", lambda *asked: route_table.forget() or measure(*asked))
    with torch.no_grad():
        layer(x)
    assert not routing._answers


def test_a_run_keeps_what_it_took(measuring: Path) -> None:
    layer, x, choices = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6), {}
    key = _key_of(layer, x, measuring)
    with route_table.keeping(choices), torch.no_grad():
        layer(x)  # known to the machine
        layer(x[:1])  # new
    assert key in choices
    assert len(choices) == 2
    assert route_table.from_json(json.loads(json.dumps(route_table.to_json(choices))), "here") == choices


def test_pinned_choices_are_taken_and_nothing_else_is_measured(
    measuring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    key = _key_of(layer, x, measuring)
    path = tmp_path / "pinned.json"
    path.write_text(json.dumps(route_table.to_json({key: Choice("grouped")})))
    routing._answers.clear()
    monkeypatch.setenv(route_table.VARIABLE, str(path))
    with torch.no_grad():
        layer(x)
        assert layer.route.forward == "grouped"
        layer(x[:1])
        assert layer.route.reason.startswith("by rule")
    assert list(route_table.read(measuring)) == [key]


def test_a_run_goes_on_by_rule_where_it_has_begun_so(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not measured is not kept for the machine."""
    layer, x, choices = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6), {}
    with monkeypatch.context() as by_rule, route_table.keeping(choices), torch.no_grad():
        by_rule.setenv(route_table.VARIABLE, route_table.BY_RULE)
        layer(x)
        assert layer.route.reason.startswith("by rule")
    usual = layer.route.forward
    assert list(choices.values()) == [Choice(usual)]
    assert not measuring.exists()

    def the_usual_is_slow(candidates: list, *asked: object) -> Times:
        return Times({strategy.name: 1.0 if strategy.name == usual else 0.1 for strategy in candidates}, {})

    monkeypatch.setattr(routing, "measure", the_usual_is_slow)
    with torch.no_grad():
        layer(x)
        assert layer.route.forward != usual
        with route_table.keeping(choices):
            layer(x)
    assert layer.route.forward == usual
    assert layer.route.reason == "as before in this run"
    assert route_table.read(measuring).keys() == choices.keys()  # of the call outside


@pytest.mark.parametrize("way", ["plain", "windows"])
def test_what_nobody_would_measure_can_be_pinned(measuring: Path, way: str) -> None:
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    key = _key_of(layer, x, measuring)
    with route_table.keeping({key: Choice(way)}), torch.no_grad():
        layer(x)
    assert layer.route.forward == way


@pytest.mark.parametrize(
    ("choice", "taken"),
    [(Choice("plain", "plain"), True), (Choice("native", "plain"), False), (Choice("plain", "matmul"), False)],
    ids=str,
)
def test_the_definition_goes_with_itself_alone(measuring: Path, choice: Choice, taken: bool) -> None:
    """It has no backward of its own."""
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    layer(x)
    [key] = route_table.read(measuring)
    with route_table.keeping({key: choice}):
        layer(x).sum().backward()
    assert ((layer.route.forward, layer.route.backward) == (choice.forward, choice.backward)) == taken
    assert layer.warehouse.cells.grad.abs().sum() > 0


def test_a_run_goes_on_by_rule_that_nobody_would_measure(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule takes products of single rows where a kernel reads one channel; measured, they are no candidates."""
    layer, x, choices = Conv2d(1, 12, 3, config=WarehouseConfig(2)), torch.randn(2, 1, 6, 6), {}
    with monkeypatch.context() as by_rule, route_table.keeping(choices):
        by_rule.setenv(route_table.VARIABLE, route_table.BY_RULE)
        layer(x)
        [choice] = choices.values() or [None]
    assert layer.route.forward == "matmul"
    assert choice == Choice("matmul", "matmul")
    with route_table.keeping(choices):
        layer(x)
    assert (layer.route.forward, layer.route.reason) == ("matmul", "as before in this run")


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (Choice("pointwise"), "'pointwise' cannot be used, as"),
        (Choice("hidden"), "'hidden' would save nothing"),
        (Choice("basis"), "'basis' needs a layer that was prepared for inference"),
    ],
)
def test_what_cannot_be_taken_is_said(
    measuring: Path, choice: Choice, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(2, 16, 6, 6)
    key = _key_of(layer, x, measuring)
    routing._say_passed_over.cache_clear()
    with route_table.keeping({key: choice}), torch.no_grad():
        layer(x)
        layer(x[..., :-1])  # of the same kind
    assert layer.route.forward != choice.forward
    [said] = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert key in said
    assert why in said


def test_what_has_one_way_only_is_not_kept(measuring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, choices = Conv2d(6, 6, 5, groups=6, config=WarehouseConfig(2)), {}
    monkeypatch.setenv(route_table.VARIABLE, route_table.BY_RULE)
    with route_table.keeping(choices):
        layer(torch.randn(2, 6, 6, 6))
    assert layer.route.forward == "grouped"
    assert choices == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no routes of format 1"),
        ('{"format": 2, "routes": {}}', "no routes of format 1"),
        ('{"format": 1, "routes": {"a": {"forward": "fast"}}}', "no strategy 'fast'"),
        ('{"format": 1, "routes": {"a": {"ahead": "plain"}}}', "cannot be taken"),
        ('{"format": 1, "routes": {"a": {"forward": null, "backward": "native"}}}', "no strategy None"),
        ('{"format": 1, "routes": {"a": {"forward": "hidden", "backward": "matmul"}}}', "cannot have 'matmul'"),
        ('{"format": 1, "routes": {"a": {"forward": "native", "backward": "hidden"}}}', "cannot have 'hidden'"),
        ('{"format": 1, "routes": {"a": {"forward": "basis", "backward": "matmul"}}}', "basis is for inference alone"),
        ('{"format": 1, "routes": {"a": {"forward": "winograd basis", "backward": "matmul"}}}', "for inference alone"),
    ],
)
def test_bad_files_are_named(content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "routes.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(route_table.VARIABLE, str(path))
    monkeypatch.setattr(routing, "_answers", {})
    with pytest.raises(StrategyError, match=why) as caught:
        Conv2d(16, 32, 3, config=WarehouseConfig(2))(torch.zeros(2, 16, 8, 8))
    assert str(path) in str(caught.value)

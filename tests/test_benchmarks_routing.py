"""What is said of choices is said of the choice that was made, however noisy the runs are."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import routing
from benchmarks.cases import MODES
from torch import Tensor

import kernelwarehouse as kw
from kernelwarehouse.assemble import STRATEGIES, route_table
from kernelwarehouse.assemble import routing as ways
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d, WarehouseLayer


@pytest.mark.parametrize("mode", MODES)
def test_a_disturbed_run_of_the_choice_is_made_up_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, one_step = Conv2d(16, 32, 3, config=WarehouseConfig(2)), routing.one_step
    chosen = [(9.0, 9.0), (9.0, 9.0), (1.0, 1.0)]  # the call that chooses, the first that counts, and later ones
    runs: list[str | None] = []

    def faked(layer: WarehouseLayer, x: Tensor, mode: str, way: str | None, clock: str) -> tuple[float, float]:
        one_step(layer, x, mode, way, clock)
        runs.append(way)
        return (2.0, 2.0) if way else chosen.pop(0) if len(chosen) > 1 else chosen[0]

    monkeypatch.setattr(routing, "one_step", faked)
    row = routing.measure(routing.Place("conv", layer, (16, 6, 6)), 2, mode, 3, "wall")
    with torch.set_grad_enabled(mode == "training"):
        layer(torch.randn(2, 16, 6, 6, requires_grad=True))
    assert layer.route is not None
    assert row["chosen"] == (layer.route.forward, layer.route.backward)
    assert list(row["forward ms"])[-1] != layer.route.forward  # else it could be told for the choice by mistake
    assert row["forward ms"][layer.route.forward] == 1e3
    assert row["chosen ms"] == row["best ms"] == 2e3
    assert runs.count(None) == 1 + 1 + 3


def test_halves_in_common_take_the_least_that_was_seen() -> None:
    """`native`, `planes` and `rows` have the forward of the first two or the backward of the outer two in common."""
    noisy = {"native": (1.0, 3.0), "planes": (0.9, 1.0), "rows": (2.0, 2.5), "pointwise": (4.0, 5.0)}
    assert routing._with_common_halves(noisy) == {
        "native": (0.9, 2.5),
        "planes": (0.9, 1.0),
        "rows": (2.0, 2.5),
        "pointwise": (4.0, 5.0),
    }


def test_the_command_measures_every_layer_by_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    monkeypatch.setattr(route_table, "machine_file", lambda device: tmp_path / "routes.json")
    monkeypatch.setattr(ways, "_answers", {})
    out = tmp_path / "routing.json"
    threads = str(torch.get_num_threads())
    routing.main(
        ["--preset", "kw1x_small_resnet", "--batch", "2", "--rounds", "1", "--threads", threads, "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    model = kw.create_model("kw1x_small_resnet")
    layers = sum(isinstance(layer, WarehouseLayer) for layer in model.modules())
    measured = route_table.read(tmp_path / "routes.json").values()
    for mode in MODES:
        some = [row for row in rows if row["mode"] == mode]
        assert sum(row["count"] for row in some) == layers
        for row in some:
            assert set(row["forward ms"]) <= STRATEGIES.keys() - {"plain"}
            assert set(row["backward ms"]) == (set(row["forward ms"]) if mode == "training" else set())
            assert route_table.Choice(*row["chosen"]) in measured
            assert row["ratio"] >= 1

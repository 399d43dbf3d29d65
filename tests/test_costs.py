"""explain: what it prints is what runs, and it leaves no trace."""

import pytest
import torch
from torch import Tensor, nn

import kernelwarehouse as kw
from compiled_kernels import CAN_BE, COMPILED, pretend
from kernelwarehouse.assemble import force, route_table, routing
from kernelwarehouse.assemble.measure import Times
from kernelwarehouse.assemble.question import Question
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.costs import explain
from kernelwarehouse.inference import prepare_inference


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, groups=16, padding="same", padding_mode="reflect"),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 32, 1),
        nn.Flatten(2),
        nn.Linear(36, 5),
        nn.Linear(5, 3),
    )
    return kw.convert(model, kw.plan(model, WarehouseConfig(budget=2)))


@pytest.mark.parametrize("compiled", CAN_BE)
def test_layers_strategies_and_counts(
    compiled: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, compiled)
    costs = {cost.layer: cost for cost in explain(_model(), torch.randn(2, 3, 8, 8))}
    printed = capsys.readouterr().out
    assert list(costs) == ["1", "2", "4", "6"]
    assert all(name in printed for name in ("layer", "strategy", "why", "mixing", "product"))
    assert costs["2"].strategy == ("depthwise" if compiled else "grouped")
    # Two samples, 36 output positions, 9 kernel positions of 16 x 16 channels; mixed from all cells of the warehouse.
    assert costs["1"].product == 2 * 36 * 9 * 16 * 16
    cells = len(_model()[1].warehouse.cells)
    assert costs["1"].mixing == 2 * cells * 9 * 16 * 16
    assert costs["6"].product == 2 * 32 * 36 * 5


def test_forced_and_prepared_ways_are_seen() -> None:
    model, example = _model().eval(), torch.randn(64, 3, 8, 8)
    with force("grouped"):
        assert {cost.strategy for cost in explain(model, example)} == {"grouped"}
    kw.set_temperature(model, 0.0)
    prepared = prepare_inference(model, batch=64).layers
    assert prepared
    costs = explain(model, example)
    assert {cost.layer for cost in costs if cost.strategy == "basis"} == set(prepared)
    hidden = model[1].attention.shape.hidden
    assert next(cost for cost in costs if cost.layer == "1").mixing == 64 * (hidden + 1) * 9 * 16 * 16


@pytest.mark.skipif(not COMPILED, reason="there are no compiled kernels")
def test_winograd_is_counted_by_its_own_products() -> None:
    with force("winograd"):
        cost = explain(_model()[1], torch.randn(2, 16, 7, 6))[0]
    assert cost.strategy == "winograd"
    assert cost.product == 2 * (4 * 3) * 16 * 16 * 16  # 16 for every tile of 2x2


def test_mixing_through_the_hidden_vector_is_seen_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = _model()
    with force("hidden"):
        cost = explain(model[1], torch.randn(40, 16, 6, 6))[0]
    assert cost.strategy == "hidden"
    assert "hidden" in capsys.readouterr().out
    shape = model[1].attention.shape
    assert cost.mixing == (40 + shape.cells) * (shape.hidden + 1) * 9 * 16 * 16


def test_training_is_explained_by_its_own_ways(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on request only."""

    def measured(candidates: list[Strategy], x: Tensor, cells: Tensor, question: Question) -> Times:
        fast = "matmul" if question.training else "grouped"
        forward = {strategy.name: 0.1 if strategy.name == fast else 1.0 for strategy in candidates}
        backward = {strategy.name: 0.1 if strategy.name == "grouped" else 1.0 for strategy in candidates}
        return Times(forward, backward if question.training else {})

    model, example = _model(), torch.randn(2, 3, 8, 8)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    monkeypatch.setattr(route_table, "machine_file", lambda device: None)
    monkeypatch.setattr(routing, "measure", measured)
    monkeypatch.setattr(routing, "_answers", {})
    route_table.forget()
    usual = explain(model, example)[0]
    assert (usual.strategy, usual.backward) == ("grouped", None)
    assert "backward" not in capsys.readouterr().out
    with torch.no_grad():  # which is the caller's business
        trained = explain(model, example, training=True)[0]
    assert (trained.strategy, trained.backward) == ("matmul", "grouped")
    assert (trained.mixing, trained.product) == (usual.mixing, usual.product)
    assert "in backward" in capsys.readouterr().out
    model(example).sum().backward()
    assert (model[1].route.forward, model[1].route.backward) == ("matmul", "grouped")
    route_table.forget()


def test_what_autograd_differentiates_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(_model(), torch.randn(0, 3, 8, 8), training=True)[0].backward is None
    assert "by autograd" in capsys.readouterr().out


@pytest.mark.parametrize("training", [False, True])
def test_model_is_left_as_it_was(training: bool) -> None:
    model = _model().train()
    model[3].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    explain(model, torch.randn(2, 3, 8, 8), training)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_static_model_is_refused() -> None:
    with pytest.raises(kw.KernelWarehouseError, match="Linear has no layer with a warehouse"):
        explain(nn.Linear(2, 2), torch.randn(1, 2))

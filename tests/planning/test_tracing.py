"""What a forward pass shows: the order of layers, what feeds them, what they see, and whose weights are read."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.planning.tracing import Trace, UntraceableError, skeleton, trace, trace_by_running

X = torch.zeros(2, 8, 6, 6)


class Block(nn.Module):
    """Registered in another order than called, with a shortcut and a branch on pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(8, 8, 1)
        self.shortcut = nn.Conv2d(8, 8, 1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.unused = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x).relu()
        out = out * self.gate(F.adaptive_avg_pool2d(out, 1)).sigmoid()
        return self.last(out) + self.shortcut(x)


LAYERS = frozenset({"last", "shortcut", "gate", "first", "unused"})


class Reader(nn.Module):
    """Calls all three layers; `kept` is only called, of `read` the weight is read, of `shown` the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.read, self.shown = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kept(self.read(self.shown(x)))
        return F.linear(x, self.read.weight.t()) + self.shown.bias


def test_symbolic_tracing_sees_order_feeds_and_pooling() -> None:
    seen = trace(Block(), LAYERS)
    assert seen.order == ("first", "gate", "last", "shortcut")
    assert seen.feeds == {
        "first": frozenset(),
        "gate": frozenset({"first"}),
        "last": frozenset({"first", "gate"}),
        "shortcut": frozenset(),
    }
    assert seen.pooled == {"gate"}
    assert not seen.reads


def test_a_run_sees_the_order() -> None:
    assert trace_by_running(Block(), LAYERS, X).order == ("first", "gate", "last", "shortcut")
    assert trace_by_running(Block(), LAYERS, (X,)).order == ("first", "gate", "last", "shortcut")


@pytest.mark.parametrize(
    "see", [trace, lambda model, layers: trace_by_running(model, layers, torch.zeros(2, 4))], ids=["traced", "run"]
)
def test_reading_a_parameter_is_seen(see: Callable[[nn.Module, frozenset[str]], Trace]) -> None:
    seen = see(Reader(), frozenset({"kept", "read", "shown"}))
    assert seen.order == ("shown", "read", "kept")
    assert seen.reads == {("read", "weight"), ("shown", "bias")}


def test_a_weight_kept_in_a_list_is_seen() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.penalised = [self.one.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.two(self.one(x)), self.penalised[0])

    assert trace(Listed(), frozenset({"one", "two"})).reads == {("one", "weight")}


def test_a_layer_is_named_by_its_first_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.again = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.again(x), self.again.weight)

    seen = trace(Twice(), frozenset({"one"}))
    assert seen.order == ("one",)
    assert seen.reads == {("one", "weight")}


def test_a_single_layer_is_called() -> None:
    assert trace(nn.Linear(2, 2), frozenset({""})).order == ("",)


def test_what_cannot_be_traced_says_why() -> None:
    with pytest.raises(UntraceableError, match="float"):
        trace(DataDependent(), frozenset({"fc", "body", "stem"}))


def test_a_skeleton_has_no_memory_and_keeps_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    bones = skeleton(model)
    assert {tensor.device.type for tensor in bones.state_dict().values()} == {"meta"}
    assert bones[2].weight is bones[0].weight
    assert model[0].weight.device.type == "cpu"


def test_running_leaves_the_model_alone() -> None:
    model = Reader()
    trace_by_running(model, frozenset({"kept", "read"}), torch.zeros(2, 4))
    assert type(model.read) is nn.Linear
    assert not model.read._forward_pre_hooks
    assert model.training


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.body = nn.Conv2d(8, 8, 3)
        self.stem = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if float(x.mean()) < 1e9:
            x = self.body(x)
        return self.fc(x.mean((2, 3)))


def test_an_example_shows_the_order_where_tracing_fails() -> None:
    plan = kw.plan(DataDependent(), example=torch.randn(1, 3, 8, 8))
    assert [layer.spec.name for layer in plan.layers] == ["body"]
    assert {layer.name for layer in plan.static} == {"stem", "fc"}
    with pytest.raises(kw.PlanError, match="example"):
        kw.plan(DataDependent(), example=torch.randn(1, 4, 8, 8))


def test_a_plan_says_where_its_order_comes_from() -> None:
    assert kw.plan(Block()).order == "traced"
    assert kw.plan(Block(), example=X).order == "traced"
    assert kw.plan(DataDependent(), example=torch.randn(1, 3, 8, 8)).order == "run"
    with pytest.warns(kw.KernelWarehouseWarning, match=r"DataDependent cannot be traced \(.*float.*example"):
        plan = kw.plan(DataDependent())
    assert plan.order == "registration"

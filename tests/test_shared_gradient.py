"""The gradient of cells that layers share is added up in one place, and is what autograd's own sum would be."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import kernelwarehouse as kw
from devices import DEVICE
from kernelwarehouse import shared_gradient
from kernelwarehouse.assemble import STRATEGIES, blocks, evaluate, force
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.shared_gradient import place_of
from kernelwarehouse.warehouse import Warehouse


def network() -> nn.Module:
    """Four layers, 3x3 and 1x1, that share one warehouse."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 1),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 1),
    ]
    static = nn.Sequential(*layers)
    model = kw.convert(static, kw.plan(static))
    kw.set_temperature(model, 0.3)
    return model.to(DEVICE)


def cells_of(model: nn.Module) -> nn.Parameter:
    [cells] = {layer.warehouse.cells for layer in model.modules() if isinstance(layer, WarehouseLayer)}
    return cells


def images(seed: int = 1) -> Tensor:
    return torch.randn(3, 16, 6, 6, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(model: nn.Module, go: Callable[[nn.Module], None], strategy: str | None = None) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if strategy is None:
        go(model)
    else:
        with force(strategy):
            go(model)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def once(model: nn.Module) -> None:
    model(images()).square().mean().backward()


def after_a_run_for_the_input_alone(model: nn.Module) -> None:
    x = images().requires_grad_()
    out = model(x).square().mean()
    for _ in range(2):
        torch.autograd.grad(out, x, retain_graph=True)
    out.backward()


def twice_through_one_graph(model: nn.Module) -> None:
    out = model(images()).square().mean()
    out.backward(retain_graph=True)
    out.backward()


def two_passes_before_any_backward(model: nn.Module) -> None:
    first, second = model(images()).square().mean(), model(images(2)).square().mean()
    second.backward()
    first.backward()


def two_passes_in_one_backward(model: nn.Module) -> None:
    (model(images()).square().mean() + model(images(2)).square().mean()).backward()


def some_layers_in_each_pass(model: nn.Module) -> None:
    first, second = model[:2](images()).square().mean(), model[2:](images(2)).square().mean()
    first.backward()
    second.backward()


def a_layer_twice(model: nn.Module) -> None:
    model[0](model(model[0](images()))).square().mean().backward()


def computed_again_in_backward(model: nn.Module) -> None:
    middle = checkpoint(model[:3], images().requires_grad_(), use_reentrant=False)
    model[3](middle).square().mean().backward()


def asked_for_directly(model: nn.Module) -> None:
    cells = cells_of(model)
    [cells.grad] = torch.autograd.grad(model(images()).square().mean(), [cells])


WAYS = [
    once,
    after_a_run_for_the_input_alone,
    twice_through_one_graph,
    two_passes_before_any_backward,
    two_passes_in_one_backward,
    some_layers_in_each_pass,
    a_layer_twice,
    computed_again_in_backward,
    asked_for_directly,
]


@pytest.mark.parametrize("go", WAYS, ids=lambda go: go.__name__)
@pytest.mark.parametrize("strategy", [None, "native", "grouped", "matmul"])
def test_gradients_are_those_of_the_definition(go: Callable[[nn.Module], None], strategy: str | None) -> None:
    model = network()
    if strategy == "native" and STRATEGIES["native"].obstacle(images(), model[0].geometry) is not None:
        strategy = None  # no compiler here: the others are what there is
    expected, found = gradients(model, go, "plain"), gradients(model, go, strategy)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name, kernel", [("winograd", 3), ("planes", 1), ("pointwise", 1)])
def test_ways_for_some_kernels_add_to_what_others_have_made(name: str, kernel: int) -> None:
    """They take kernels of one size only, so they have networks of their own."""
    layers = (nn.Conv2d(16, 16, kernel, padding=kernel // 2) for _ in range(2))
    model = nn.Sequential(next(layers), nn.ReLU(), next(layers))
    model = kw.convert(model, kw.plan(model, kw.WarehouseConfig(budget=1)))
    assert model[0].warehouse is model[2].warehouse
    x = torch.randn(3, 16, 7, 6)
    way = name if STRATEGIES[name].obstacle(x, model[0].geometry) is None else "grouped"
    found = []
    for strategy in ("plain", way):
        model.zero_grad()
        with force(strategy):
            model(x).square().mean().backward()
        found.append(model[0].warehouse.cells.grad.clone())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_layers_of_a_pass_share_one_tensor_and_hand_autograd_nothing() -> None:
    model, handed = network(), []
    warehouse = model[0].warehouse
    out = model(images())
    shared = warehouse._shared.values()
    assert shared.untyped_storage().data_ptr() == warehouse.cells.untyped_storage().data_ptr()
    shared.grad_fn.register_prehook(lambda grads: handed.append(grads))
    out.square().mean().backward()
    assert handed == [(None,)]
    assert warehouse.cells.grad is not None


def test_layers_that_autograd_sees_through_are_added_to_it() -> None:
    """One layer by the definition, the others not."""
    model = network()

    def mixed(model: nn.Module) -> None:
        with force("grouped"):
            x = model[0](images())
        with force("plain"):
            x = model[1](x)
        with force("grouped"):
            x = model[3](model[2](x))
        x.square().mean().backward()

    expected, found = gradients(model, mixed, "plain"), gradients(model, mixed)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-4)


def test_two_threads_that_train_at_a_time_have_the_gradients_of_one() -> None:
    model = network()
    expected = gradients(model, two_passes_in_one_backward)
    model.zero_grad(set_to_none=True)
    losses = [model(images(seed)).square().mean() for seed in (1, 2)]
    threads = [Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_mixed_precision_adds_up_in_the_precision_of_the_cells() -> None:
    model = network()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = model(images()).float().square().mean()
    out.backward()
    assert len(model[0].warehouse._shared.users) == 4  # layers that have the same tensor
    found = cells_of(model).grad
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradients(model, once, "plain")["0.warehouse.cells"], atol=0.02, rtol=0.1)


@pytest.mark.parametrize("way", ["grouped", "pointwise"])
def test_no_sum_over_chunks_is_rounded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the first layer either, to which others are added."""
    monkeypatch.setattr(blocks, "block_size", lambda *_: 1)  # a sample at a time
    static = nn.Sequential(nn.Conv2d(16, 16, 1))
    model = kw.convert(static, kw.plan(static)).to(DEVICE)
    with force(way), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        model(images()).float().square().mean().backward()
    found = cells_of(model).grad
    assert (found != found.bfloat16()).float().mean() > 0.5


def test_cells_of_half_precision_lose_no_more_than_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over chunks of all layers in bfloat16 would."""
    monkeypatch.setattr(blocks, "block_size", lambda *_: 1)  # a sample at a time
    model, x = network(), torch.randn(48, 16, 6, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def found(model: nn.Module, x: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        with force("grouped"):
            model(x).square().sum().backward()
        return cells_of(model).grad.double()

    exact, half = found(copy.deepcopy(model).double(), x.double()), model.bfloat16()
    shared = (found(half, x.bfloat16()) - exact).norm()
    monkeypatch.setattr(Warehouse, "cells_to_share", lambda self, cells, user: cells)
    assert shared < 1.2 * (found(half, x.bfloat16()) - exact).norm()


def test_a_compiled_backward_gets_every_gradient() -> None:
    model = network()
    expected = gradients(model, once, "plain")

    def compiled(model: nn.Module) -> None:
        with force("grouped"):
            out = model(images()).square().mean()
        with compiled_autograd._enable(lambda graph: graph):
            out.backward()

    for name, grad in gradients(model, compiled).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4)


def test_warehouses_of_pickles_from_before_have_nothing_to_share_yet() -> None:
    model = network()
    for module in model.modules():
        if isinstance(module, Warehouse):
            module.__dict__.pop("_shared", None)
            module.__dict__.pop("_cast", None)
    once(model)
    assert cells_of(model).grad is not None


def test_frozen_cells_and_evaluation_share_nothing() -> None:
    model = network()
    with torch.no_grad():
        model(images())
    assert model[0].warehouse._shared is None
    cells_of(model).requires_grad_(False)
    once(model)
    assert model[0].warehouse._shared is None
    assert cells_of(model).grad is None


def test_copies_of_a_network_in_training_are_their_own() -> None:
    model = network()
    out = model(images())
    twin = copy.deepcopy(model)
    out.square().mean().backward()
    assert cells_of(twin).grad is None
    once(twin)
    torch.testing.assert_close(cells_of(twin).grad, cells_of(model).grad)


def test_hooks_of_the_cells_see_the_whole_gradient_once() -> None:
    model, seen = network(), []
    cells_of(model).register_hook(lambda grad: seen.append(grad.clone()))
    once(model)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], cells_of(model).grad)


class Reverse(torch.autograd.Function):
    """A view whose gradient is handed on with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def test_cells_that_are_computed_are_never_taken_for_others() -> None:
    """They are gone when the next are made, which then may lie at their address."""
    model = network()
    cells = cells_of(model)

    def loss(part: nn.Module, given: Tensor) -> Tensor:
        [name] = [name for name, parameter in part.named_parameters() if parameter is cells]
        out = torch.func.functional_call(part, {name: given}, (images(),), tie_weights=False)
        return out.square().mean()

    def go(model: nn.Module) -> None:
        kept = loss(model[:2], Reverse.apply(cells))  # its graph is alive
        loss(model[2:], cells.view_as(cells)).backward()
        del kept

    expected, found = (gradients(model, go, way)["0.warehouse.cells"] for way in ("plain", "grouped"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_compiler_that_comes_in_the_middle_of_backward_loses_nothing() -> None:
    model = network()
    expected = gradients(model, once, "plain")

    def interrupted(model: nn.Module) -> None:
        with contextlib.ExitStack() as stack:
            middle = model[:2](images())
            enable = compiled_autograd._enable(lambda graph: graph)
            # Its switch is the process's: whoever turns it on does so for backwards that are under way.
            middle.register_hook(lambda grad: stack.enter_context(_flag(enable)))
            model[2:](middle).square().mean().backward()

    for name, grad in gradients(model, interrupted, "grouped").items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4)


@contextlib.contextmanager
def _flag(enable: Any) -> Iterator[None]:
    """As another thread would turn it on."""
    entered, done = Event(), Event()

    def other() -> None:
        with enable:
            entered.set()
            done.wait()

    thread = Thread(target=other)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_runs_that_want_other_gradients_leave_nothing_behind() -> None:
    model, x = network(), images().requires_grad_()
    with force("grouped"):
        out = model(x).square().mean()
    place = place_of(model[0].warehouse._shared.values())
    torch.autograd.grad(out, x, retain_graph=True)
    assert place._total is None
    handed = []
    model[0].warehouse._shared.values().grad_fn.register_prehook(lambda grads: handed.append(grads))
    out.backward()
    assert handed == [(None,)]  # the sum is still used


def test_a_parametrization_is_asked_once_by_a_layer() -> None:
    class Counted(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return 1.0 * x

    model, counted = network(), Counted()
    parametrize.register_parametrization(model[0].warehouse, "cells", counted)
    counted.calls = 0
    with force("grouped"):
        model(images()).square().mean().backward()
    assert counted.calls == len(model)
    assert model[0].warehouse.parametrizations.cells.original.grad is not None


def test_what_is_kept_for_backward_is_the_parameter() -> None:
    """Who keeps activations elsewhere leaves parameters where they are."""
    model, packed = network(), []
    cells = cells_of(model)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() == cells.data_ptr():
            packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), force("grouped"):
        model(images())
    assert len(packed) == len(model)
    assert all(isinstance(tensor, nn.Parameter) for tensor in packed)


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_that_are_computed_again_share_as_well(autocast: bool) -> None:
    model = network()

    def seen(*args: object) -> None:
        users.append(len(model[0].warehouse._shared.users))

    users: list[int] = []
    model[3].register_forward_pre_hook(seen)  # what is computed again ends in the last layer
    with force("grouped"), torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
        out = checkpoint(model, images().requires_grad_(), use_reentrant=False)
    out.float().square().mean().backward()
    assert users == [3, 3]


def test_functions_of_others_may_have_a_gradient_of_their_own() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.gradient = 3.0
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    layer = network()[0]
    cells = layer.warehouse.cells
    weights = torch.rand(3, layer.geometry.partition.mixtures, len(cells)).to(DEVICE)
    with force("grouped"):
        evaluate(images(), weights, Doubled.apply(cells), layer.geometry).sum().backward()
    assert cells.grad is not None


@pytest.mark.parametrize("much, more, tidied", [(0.4, 0.4, 2), (0.9, 0.4, 1), (1.1, 0.4, 0), (0.4, 0.6, 1)])
def test_memory_is_handed_back_after_large_gradients(
    much: float, more: float, tidied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one run of backward, all warehouses count; another begins anew."""
    static = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3))
    model = kw.convert(static, kw.plan(static, kw.WarehouseConfig(sharing="layer"))).to(DEVICE)
    cells = [layer.warehouse.cells for layer in model.modules() if isinstance(layer, WarehouseLayer)]
    both = sum(each.nbytes for each in cells)
    assert cells[0].nbytes == cells[1].nbytes == both / 2
    calls: list[int] = []
    monkeypatch.setattr(shared_gradient, "give_back", lambda: calls.append(1))
    monkeypatch.setattr(shared_gradient, "_MUCH", int(much * both))
    monkeypatch.setattr(shared_gradient, "_MORE", int(more * both))
    for step in (1, 2):
        once(model)
        assert len(calls) == (step * tidied if DEVICE.type == "cpu" else 0)

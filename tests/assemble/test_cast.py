"""Under autocast the cells of a warehouse are cast once for all its layers, and gradients are what they were."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layer_cases import DEVICE
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kernelwarehouse as kw
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.warehouse import Warehouse


def _model() -> nn.Sequential:
    """Four layers that draw on one warehouse."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4)))
    converted = kw.convert(model, kw.plan(model, WarehouseConfig(1, norm="layer")))
    kw.set_temperature(converted, 0.5)
    return converted.to(DEVICE)


def _warehouse(model: nn.Module) -> Warehouse:
    [warehouse] = {layer.warehouse for layer in model.modules() if isinstance(layer, WarehouseLayer)}
    return warehouse


def _x() -> Tensor:
    return torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def _autocast() -> torch.autocast:
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16)


class _Casts(TorchDispatchMode):
    """Counts copies of tensors of one shape into bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += kwargs.get("dtype") == torch.bfloat16
        return func(*args, **kwargs)


@contextmanager
def _one_cast_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it would be without sharing."""
    with monkeypatch.context() as patched:
        patched.setattr(Warehouse, "cells_as", lambda self, dtype, user: self.cells.detach().to(dtype))
        yield


def _gradients(model: nn.Module, run: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    run(model)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _step(model: nn.Module) -> None:
    with _autocast():
        out = model(_x())
    out.float().pow(2).mean().backward()


def _accumulate(model: nn.Module) -> None:
    _step(model)
    _step(model)


def _two_graphs(model: nn.Module) -> None:
    with _autocast():
        first, second = model(_x()).float().pow(2).mean(), model(_x() + 1).float().pow(2).mean()
    second.backward()
    first.backward()


def _twice_through_one_graph(model: nn.Module) -> None:
    with _autocast():
        loss = model(_x()).float().pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _checkpointed(reentrant: bool) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        with _autocast():
            x = _x().requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
        x.float().pow(2).mean().backward()

    return run


def _stepped(model: nn.Module) -> None:
    """Two steps of an optimiser and the gradients after them."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimiser.zero_grad(set_to_none=True)
        _step(model)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    _step(model)


RUNS = {
    "one step": _step,
    "accumulated": _accumulate,
    "two graphs": _two_graphs,
    "twice through one graph": _twice_through_one_graph,
    "checkpointed": _checkpointed(False),
    "checkpointed, reentrant": _checkpointed(True),
    "after steps": _stepped,
}


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_a_cast_for_every_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _one_cast_for_every_layer(monkeypatch):
        expected = _gradients(_model(), RUNS[name])
    found = _gradients(_model(), RUNS[name])
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], grad, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("grad", [True, False])
def test_one_cast_in_a_pass(grad: bool) -> None:
    model = _model()
    with torch.set_grad_enabled(grad), _autocast(), _Casts(_warehouse(model).cells.shape) as casts:
        first = model(_x())
        assert casts.count == 1
        second = model(_x())
        assert casts.count == 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_cast_is_freed_after_backward() -> None:
    model = _model()
    warehouse = _warehouse(model)
    with _autocast():
        loss = model(_x()).float().mean()
    kept = weakref.ref(warehouse._cast.values())
    assert kept() is not None
    loss.backward()
    gc.collect()
    assert kept() is None


def _change_in_place(cells: Tensor) -> None:
    with torch.no_grad():
        cells.mul_(2)


def _change_unseen(cells: Tensor) -> None:
    cells.data.mul_(2)


def _replace_memory(cells: Tensor) -> None:
    cells.data = cells.data * 2


@pytest.mark.parametrize("change", [_change_in_place, _change_unseen, _replace_memory])
@pytest.mark.parametrize("grad", [True, False])
def test_changed_cells_are_cast_again(change: Callable[[Tensor], None], grad: bool) -> None:
    model, changed = _model(), _model()
    change(_warehouse(changed).cells)
    with torch.set_grad_enabled(grad), _autocast():
        kept_alive = model(_x())
        change(_warehouse(model).cells)
        torch.testing.assert_close(model(_x()), changed(_x()), rtol=0, atol=0)
    assert kept_alive.requires_grad == grad


def test_training_after_inference_mode() -> None:
    model = _model()
    with torch.inference_mode(), _autocast():
        model(_x())
    found, expected = _gradients(model, _step), _gradients(_model(), _step)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_copies_and_files_do_not_carry_it() -> None:
    model = _model()
    with torch.no_grad(), _autocast():
        expected = model(_x())
        assert _warehouse(model)._cast is not None
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert _warehouse(twin)._cast is None
            torch.testing.assert_close(twin(_x()), expected, rtol=0, atol=0)
        model.to(DEVICE)
        assert _warehouse(model)._cast is None


def test_other_cells_by_functional_call() -> None:
    model, twin = _model(), _model()
    before = dict(model.named_parameters())
    doubled = {name: (2 * value).detach().requires_grad_() for name, value in before.items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    with _autocast():
        usual = model(_x())
        out = functional_call(model, doubled, (_x(),))
        torch.testing.assert_close(out, twin(_x()), rtol=0, atol=0)
    assert not torch.equal(out, usual)
    out.float().pow(2).mean().backward()
    assert all(parameter.grad is None for parameter in before.values())
    assert all(value.grad is not None for value in doubled.values())


def test_the_definition_and_function_transforms_see_every_step() -> None:
    model = _model()
    with kw.force("plain"):
        expected = _gradients(model, _step)
    found = _gradients(model, _step)
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 0.05 * grad.norm(), name
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*given: Tensor) -> Tensor:
        with _autocast():
            return functional_call(model, dict(zip(names, given, strict=True)), (_x(),)).float().pow(2).mean()

    for name, grad in zip(names, torch.func.grad(loss, tuple(range(len(values))))(*values), strict=True):
        torch.testing.assert_close(grad, expected[name], rtol=1e-2, atol=1e-5, msg=name)

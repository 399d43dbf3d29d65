"""Converted models inside others, and converted models that lost parts: they load, or `save` refuses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import kernelwarehouse as kw
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.peers import kwod

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Repeat(nn.Module):
    """One channel becomes three."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(-1, 3, -1, -1)


def converted(model: nn.Module | None = None) -> Any:
    model = model or Net()
    return kw.convert(model, kw.plan(model, kw.WarehouseConfig(budget=2)))


def same_outputs(one: nn.Module, other: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(X), other.eval()(X))


WRAPPERS = {
    "sequential": lambda model: nn.Sequential(model, nn.Softmax(1)),
    "averaged": AveragedModel,
    "deep": lambda model: nn.Sequential(nn.Identity(), nn.Sequential(nn.Sequential(model), nn.Linear(4, 2))),
    "twice": lambda model: nn.Sequential(model, nn.Unflatten(1, (1, 2, 2)), nn.Upsample((12, 12)), Repeat(), model),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_load_with_a_wrapper(name: str, tmp_path: Path) -> None:
    wrap = WRAPPERS[name]
    model = wrap(converted())
    with pytest.warns(kw.KernelWarehouseWarning, match=rf"{type(model).__name__} holds.*model=\.\.\."):
        kw.save(model, tmp_path)
    loaded = kw.load(tmp_path, model=wrap(Net()))
    assert same_outputs(loaded, model)
    with pytest.warns(kw.KernelWarehouseWarning):
        kw.save(loaded, tmp_path / "again")
    assert same_outputs(kw.load(tmp_path / "again", model=wrap(Net())), model)
    with pytest.raises(kw.KernelWarehouseError):
        kw.load(tmp_path, model=nn.Sequential(nn.Conv2d(3, 8, 3)))


def test_a_converted_layer_in_a_wrapper(tmp_path: Path) -> None:
    model = nn.Sequential(converted(nn.Conv2d(3, 8, 3)), nn.ReLU())
    with pytest.warns(kw.KernelWarehouseWarning):
        kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path, model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())), model)


def test_models_that_lost_converted_layers_load(tmp_path: Path) -> None:
    model, static = converted(), Net()
    for changed in (model, static):
        changed.body[2] = nn.Identity()
        changed.head = nn.Linear(8, 2)
    kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path, model=static), model)
    with pytest.raises(kw.CheckpointError, match="does not fit"):
        kw.load(tmp_path, model=Net())


def test_parts_of_converted_models_load_into_such_parts(tmp_path: Path) -> None:
    body = converted().body
    kw.save(body, tmp_path)
    assert same_outputs(kw.load(tmp_path, model=converted().body), body)


def test_layers_of_ones_own_code_load_into_it(tmp_path: Path) -> None:
    model = nn.Sequential(Conv2d(3, 8, 3), nn.ReLU())
    kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path, model=nn.Sequential(Conv2d(3, 8, 3), nn.ReLU())), model)


def moved() -> nn.Module:
    model = converted()
    model.tail = model.body[2]
    del model.body[2]
    return model


def strange() -> nn.Module:
    model = converted()
    model.body[2] = Conv2d(8, 8, 3)
    return model


def unshared() -> nn.Module:
    model, other = converted(), converted()
    model.body[3] = other.body[3]
    return model


def added() -> nn.Module:
    return nn.Sequential(converted(), nn.Unflatten(1, (4, 1, 1)), Conv2d(4, 4, 1))


REFUSED = {
    "moved": (moved, "'tail' draws on a warehouse"),
    "strange": (strange, r"'body\.2'"),
    "unshared": (unshared, r"'body\.3' no longer shares"),
    "two": (lambda: nn.Sequential(converted(), converted()), "several converted models"),
    "another method on top": (lambda: kwod.convert(converted()), r"'body\.2\.conv'"),
    "layers beside": (added, "'2' draws on a warehouse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_loaded_is_refused(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(kw.CheckpointError, match=message):
        kw.save(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()

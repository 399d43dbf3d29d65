"""Models that are rebuilt by name come back as they were, or `save` says how to load them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import register_model
from torch import nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.saving.structure import difference, structure
from tiny_things import TINY_RESNET

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def tiny(**arguments: Any) -> Any:
    return kw.create_model("kw1x_resnet18", **{**TINY_RESNET, "num_classes": 10, **arguments}).eval()


def static() -> Any:
    return timm.create_model("resnet18", num_classes=10, **TINY_RESNET)


def same_outputs(one: nn.Module, other: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(X), other.eval()(X))


def no_pooling(model: Any) -> None:
    model.maxpool = nn.Identity()


def fine_stem(model: Any) -> None:
    model.conv1.stride = (1, 1)


def other_activation(model: Any) -> None:
    model.layer1[0].act1 = nn.LeakyReLU()


def other_slope(model: Any) -> None:
    model.layer1[0].act1 = nn.LeakyReLU(0.5)


def other_epsilon(model: Any) -> None:
    model.bn1.eps = 0.1


def own_forward(model: Any) -> None:
    model.maxpool.forward = lambda x: x


def removed_block(model: Any) -> None:
    model.layer4 = nn.Identity()
    model.fc = nn.Linear(16, 3)


CHANGES = (no_pooling, fine_stem, other_activation, other_slope, other_epsilon, own_forward, removed_block)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_networks_are_not_taken_for_what_they_were(change: Callable[[Any], None], tmp_path: Path) -> None:
    model, template = tiny(), static()
    change(model)
    change(template)
    with pytest.warns(kw.KernelWarehouseWarning, match=r"not timm's 'resnet18'.*model=\.\.\."):
        kw.save(model, tmp_path)
    with pytest.raises(kw.CheckpointError, match="model="):
        kw.load(tmp_path)
    if change is not own_forward:  # a function on a module is for the user to set again
        assert same_outputs(kw.load(tmp_path, model=template), model)


def test_the_order_inside_a_sequential_counts() -> None:
    one, other = (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)) for _ in range(2))
    assert difference(structure(one), structure(other)) is None
    other._modules["0"] = other._modules.pop("0")
    assert "another order" in str(difference(structure(one), structure(other)))


class Scaled(nn.Module):
    """Numbers and functions that no `repr` shows decide what comes out."""

    def __init__(self, num_classes: int = 2, factor: float = 1.0) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, num_classes)
        self.factor, self.activation, self.sizes = factor, F.relu, [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.activation(self.factor * self.conv(x)).mean((2, 3)))


@register_model
def scaled_for_tests(pretrained: bool = False, **arguments: Any) -> nn.Module:
    own = {key: value for key, value in arguments.items() if key in ("num_classes", "factor")}
    model = Scaled(**own)
    model.pretrained_cfg = {"architecture": "scaled_for_tests", "num_classes": 2}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "name, value",
    [("factor", 2.0), ("activation", F.gelu), ("activation", lambda x: x), ("sizes", [1, 3]), ("forward", F.relu)],
)
def test_attributes_that_are_not_printed_count(name: str, value: object, tmp_path: Path) -> None:
    model = scaled_for_tests()
    model.notes = "attributes that the class does not have cannot matter to it"  # type: ignore[assignment]
    kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path), model)
    setattr(model, name, value)
    with pytest.warns(kw.KernelWarehouseWarning, match=name):
        kw.save(model, tmp_path)


@pytest.mark.parametrize("name", ["kw1x_mobilenetv2_050", "kw1x_resnet18"])
def test_other_classifiers(name: str, tmp_path: Path) -> None:
    model = kw.create_model(name, num_classes=10, **(TINY_RESNET if "resnet" in name else {}))
    model.reset_classifier(5)
    kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path), model)
    head = "fc" if "resnet" in name else "classifier"
    setattr(model, head, nn.Linear(model.num_features if "resnet" in name else model.head_hidden_size, 7))
    kw.save(model, tmp_path)
    loaded = kw.load(tmp_path)
    assert same_outputs(loaded, model)
    kw.save(loaded, tmp_path / "again")
    assert same_outputs(kw.load(tmp_path / "again"), model)


@pytest.mark.parametrize("name", ["kw1x_small_resnet", "small_resnet"])
def test_small_networks(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name, num_classes=3)
    kw.save(model, tmp_path)
    assert same_outputs(kw.load(tmp_path), model)


def test_the_stored_plan_is_used_and_not_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    kw.save(model, tmp_path)

    def changed(*arguments: object, **keywords: object) -> None:
        raise AssertionError("the preset was planned again")

    monkeypatch.setattr("kernelwarehouse.zoo._registry.plan", changed)
    loaded = kw.load(tmp_path)
    assert kw.plan_of(loaded) == kw.plan_of(model)
    assert same_outputs(loaded, model)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    model = kw.convert(static(), kw.plan(static()))
    for network in (tiny(), timm.create_model("resnet18", num_classes=3), model):
        before, numbers = dict(vars(network)), torch.get_rng_state()
        if network is model:
            with pytest.warns(kw.KernelWarehouseWarning):  # nobody noted its channels
                kw.save(network, tmp_path)
        else:
            kw.save(network, tmp_path)
        assert dict(vars(network)) == before
        assert torch.equal(torch.get_rng_state(), numbers)


def test_prepared_networks_are_saved_as_any(tmp_path: Path) -> None:
    model = tiny()
    kw.set_temperature(model, 0.0)
    kw.prepare_inference(model)
    kw.save(model, tmp_path)
    assert torch.allclose(kw.load(tmp_path)(X), model(X), atol=1e-5)

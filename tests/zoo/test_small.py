"""Networks for small images: what they count, that they learn, and that they are saved and found again."""

from pathlib import Path

import pytest
import timm
import torch

import kernelwarehouse as kw
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.zoo import EVERY_PRESET

NAMES = [name for name, preset in EVERY_PRESET.items() if preset.backbone == "small_resnet"]


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_are_there() -> None:
    methods = [f"{method}_small_resnet" for method in ("kw1d2x", "kw1x", "kw4x", "dy4x", "od4x")]
    ablations = ("softmax", "sigmoid", "relu", "share_in_layer", "no_sharing", "no_partition")
    assert methods + [f"kw1x_small_resnet_{name}" for name in ablations] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_claimed_and_all_parts_learn(name: str) -> None:
    assert count(timm.create_model(name)) == EVERY_PRESET[name].parameters
    # timm would start the last norm of a block at 0, and nothing before it would move in a first step.
    model = timm.create_model(name, num_classes=4, zero_init_last=False)
    kw.set_temperature(model, 0.5)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert len(moved) > 0.9 * len(before)


def test_half_the_budget_is_fewer_parameters_than_the_static_network_has() -> None:
    assert count(timm.create_model("kw1d2x_small_resnet", num_classes=10)) < 0.6 * count(
        timm.create_model("small_resnet", num_classes=10)
    )


def test_widths_are_what_was_asked_for_and_are_saved(tmp_path: Path) -> None:
    model = timm.create_model("small_resnet", num_classes=10, widths=[16, 24, 40])
    widths = [module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert widths == [16, 16, 16, 24, 24, 24, 40, 40, 40]
    kw.save(model, tmp_path / "static")
    assert count(kw.load(tmp_path / "static")) == count(model)
    twin = kw.create_model("kw1x_small_resnet", num_classes=10, widths=[16, 24, 40])
    kw.save(twin, tmp_path / "twin")
    assert count(kw.load(tmp_path / "twin")) == count(twin)


@pytest.mark.parametrize("widths", [[32, 64], [32, 64, 100], [0, 8, 8], 32, "abc", [32.0, 64, 128]])
def test_other_widths_are_refused(widths: object) -> None:
    with pytest.raises(ConfigError, match=r"widths \(=.*must be 3 multiples of 8, such as \[32, 64, 128\]"):
        timm.create_model("small_resnet", widths=widths)

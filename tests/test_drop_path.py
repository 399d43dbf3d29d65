"""Branches that are dropped with one rate: set, recognised, saved and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.builder import builder_of, remember_builder
from kernelwarehouse.drop_path import drop_evenly, even_rate
from tiny_things import TINY_RESNET


def build(name: str, **arguments: Any) -> Any:
    model = timm.create_model(name, **arguments).eval()
    if builder_of(model) is None:
        remember_builder(model, name, arguments)
    return model


def rates(model: nn.Module) -> list[float]:
    return [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]


@pytest.mark.parametrize(
    ("name", "arguments", "branches"),
    [
        ("resnet18", TINY_RESNET, 4),
        ("kw1x_resnet18", TINY_RESNET, 4),
        ("dy4x_resnet18", TINY_RESNET, 4),
        ("condconv8x_resnet18", TINY_RESNET, 4),
        ("convnext_tiny", {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}, 4),
        ("deit_tiny_patch16_224", {"img_size": 32, "depth": 2}, 4),
    ],
)
def test_every_branch_gets_the_rate_and_keeps_it(
    name: str, arguments: dict[str, Any], branches: int, tmp_path: Path
) -> None:
    model = build(name, drop_path_rate=0.2, num_classes=4, **arguments)
    assert even_rate(model) is None  # timm's rises from 0
    drop_evenly(model, 0.2)
    assert rates(model) == [0.2] * branches
    assert even_rate(model) == 0.2
    kw.save(model, tmp_path)
    loaded = kw.load(tmp_path)
    assert rates(loaded) == [0.2] * branches
    kw.save(loaded, tmp_path / "again")
    assert rates(kw.load(tmp_path / "again")) == [0.2] * branches


def test_branches_are_dropped_in_training_only() -> None:
    sizes = TINY_RESNET | {"layers": [2, 1, 1, 1]}
    model = build("resnet18", drop_path_rate=0.5, zero_init_last=False, **sizes)
    drop_evenly(model, 0.5)
    plain = build("resnet18", **sizes)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        block = model.layer1[1].train()
        torch.manual_seed(0)
        features = torch.randn(512, 8, 4, 4).relu()
        kept = (block(features) - features).flatten(1).abs().amax(1) > 0  # relu(0 + x) is x
    assert 0.4 < kept.float().mean() < 0.6


def test_networks_without_branches_are_refused() -> None:
    with pytest.raises(kw.ConfigError, match="Sequential has no residual branch that could be dropped"):
        drop_evenly(nn.Sequential(nn.Linear(2, 2)), 0.1)
    assert even_rate(nn.Sequential(nn.Linear(2, 2))) is None


@pytest.mark.parametrize("rate", [True, 0.0, 1.0, "0.1", [0.1]])
def test_a_description_with_a_wrong_rate_is_refused(rate: object, tmp_path: Path) -> None:
    model = build("resnet18", drop_path_rate=0.2, **TINY_RESNET)
    drop_evenly(model, 0.2)
    kw.save(model, tmp_path)
    description = json.loads((tmp_path / "plan.json").read_text())
    assert description["architecture"]["even_drop_path"] == 0.2
    description["architecture"]["even_drop_path"] = rate
    (tmp_path / "plan.json").write_text(json.dumps(description))
    with pytest.raises(kw.CheckpointError, match=r"plan\.json: even_drop_path.*must be above 0 and below 1"):
        kw.load(tmp_path)


def test_a_rate_for_a_network_without_branches_is_refused(tmp_path: Path) -> None:
    kw.save(timm.create_model("vgg11", num_classes=2), tmp_path)
    description = json.loads((tmp_path / "plan.json").read_text())
    assert "even_drop_path" not in description["architecture"]
    description["architecture"]["even_drop_path"] = 0.1
    (tmp_path / "plan.json").write_text(json.dumps(description))
    with pytest.raises(kw.CheckpointError, match=r"plan\.json: even_drop_path \(=0\.1\): VGG has no residual branch"):
        kw.load(tmp_path)

"""Learning rates over time, and which parameters decay."""

import math

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.training.optimisation import make_mixing, make_optimizer, make_schedule
from kernelwarehouse.training.recipe import Recipe, load_recipe
from tiny_things import TINY_RESNET, layer_norm_network


def learning_rates(recipe: Recipe, steps_per_epoch: int) -> list[float]:
    """Of every step of a run."""
    optimizer = make_optimizer(nn.Linear(2, 2), recipe)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    rates = []
    for step in range(recipe.epochs * steps_per_epoch):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step + 1)
    return rates


def test_traditional_drops_tenfold_every_thirty_epochs() -> None:
    rates = learning_rates(load_recipe("traditional"), 3)
    expected = [0.1 * 0.1 ** (step // 90) for step in range(300)]
    assert rates == pytest.approx(expected)


def test_mobilenetv2_follows_half_a_cosine_from_the_first_step() -> None:
    rates = learning_rates(load_recipe("mobilenetv2"), 2)
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 300)) for step in range(300)])


def test_advanced_warms_up_linearly_then_joins_the_cosine() -> None:
    rates = learning_rates(load_recipe("advanced"), 2)
    assert rates[:40] == pytest.approx([0.004 * step / 40 for step in range(40)])
    assert rates[40:] == pytest.approx([0.002 * (1 + math.cos(math.pi * step / 600)) for step in range(40, 600)])


def decays(model: nn.Module) -> dict[str, float]:
    optimizer = make_optimizer(model, load_recipe("traditional"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {name: decay[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("network", ["resnet", "convnext", "low rank"])
def test_decay_only_where_scale_matters(network: str) -> None:
    if network == "convnext":
        model = layer_norm_network()
    else:
        static = timm.create_model("resnet18", **TINY_RESNET)
        config = kw.WarehouseConfig(low_rank=1 / 4 if network == "low rank" else None)
        model = kw.convert(static, kw.plan(static, config))
    for name, decay in decays(model).items():
        parts = name.split(".")
        if "attention" in parts:
            expected = 0.0001 if name.endswith("fc1.weight") else 0.0
        else:
            expected = 0.0001 if model.get_parameter(name).ndim > 1 else 0.0
        assert decay == expected, name


def test_every_parameter_is_optimised_once() -> None:
    model = timm.create_model("kw1x_resnet18", **TINY_RESNET)
    optimizer = make_optimizer(model, load_recipe("traditional"))
    optimised = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(optimised) == sorted(id(p) for p in model.parameters())


def test_mixing_only_if_asked_for() -> None:
    assert make_mixing(load_recipe("small"), 10) is None
    images, targets = torch.randn(8, 3, 4, 4), torch.arange(8)
    mixing = make_mixing(load_recipe("advanced"), 10)
    _, mixed = mixing(images, targets)
    assert mixed.sum(1).tolist() == pytest.approx([1.0] * 8)

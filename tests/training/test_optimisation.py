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


@pytest.mark.parametrize(("name", "end"), [("advanced", 0.0), ("advanced_published", 1e-6)])
def test_advanced_warms_up_linearly_and_then_begins_its_cosine(name: str, end: float) -> None:
    rates = learning_rates(load_recipe(name), 2)
    assert rates[:40] == pytest.approx([0.004 * step / 40 for step in range(40)])
    height = (0.004 - end) / 2
    assert rates[40:] == pytest.approx([end + height * (1 + math.cos(math.pi * step / 560)) for step in range(560)])


def test_a_cosine_that_is_counted_from_the_first_step_is_joined_by_the_warm_up() -> None:
    rates = learning_rates(load_recipe("advanced").with_overrides({"cosine_after_warmup": False}), 2)
    assert rates[:40] == pytest.approx([0.004 * step / 40 for step in range(40)])
    assert rates[40:] == pytest.approx([0.002 * (1 + math.cos(math.pi * step / 600)) for step in range(40, 600)])


def test_part_of_an_epoch_of_warm_up() -> None:
    changes = {"epochs": 3, "warmup_epochs": 0.5, "cosine_after_warmup": True}
    rates = learning_rates(load_recipe("small").with_overrides(changes), 4)
    assert rates[:2] == pytest.approx([0.01, 0.055])
    assert rates[2:] == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 10)) for step in range(10)])


def decays(model: nn.Module, recipe: Recipe) -> dict[str, float]:
    optimizer = make_optimizer(model, recipe)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {name: decay[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("network", ["resnet", "convnext", "low rank"])
@pytest.mark.parametrize("recipe", ["small", "traditional"])
def test_decay_is_for_all_but_norms_biases_and_in_small_the_logits(network: str, recipe: str) -> None:
    if network == "convnext":
        model = layer_norm_network()
    else:
        static = timm.create_model("resnet18", **TINY_RESNET)
        config = kw.WarehouseConfig(low_rank=1 / 4 if network == "low rank" else None)
        model = kw.convert(static, kw.plan(static, config))
    chosen = load_recipe(recipe).with_overrides({"matched_steps": False})  # which divide the decay (below)
    for name, decay in decays(model, chosen).items():
        expected = 0.0 if name.endswith(("bias", ".offset")) else chosen.weight_decay
        if model.get_parameter(name).ndim == 1:
            expected = 0.0
        if recipe == "small" and name.endswith((".fc2.weight", ".basis.weight")):
            expected = 0.0
        assert decay == expected, name


def test_layer_scale_decays_only_if_asked_for() -> None:
    model = layer_norm_network()
    recipe = load_recipe("small")
    plain, with_scale = (
        decays(model, recipe.with_overrides({"decay_layer_scale": scales})) for scales in (False, True)
    )
    changed = {name for name, decay in with_scale.items() if plain[name] != decay}
    assert changed == {f"stages.{stage}.blocks.0.gamma" for stage in range(4)}
    assert {with_scale[name] for name in changed} == {recipe.weight_decay}


def test_every_parameter_is_optimised_once() -> None:
    model = layer_norm_network()
    optimizer = make_optimizer(model, load_recipe("small").with_overrides({"decay_layer_scale": True}))
    optimised = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(optimised) == sorted(id(p) for p in model.parameters())


def test_mixing_only_if_asked_for() -> None:
    assert make_mixing(load_recipe("small"), 10) is None
    images, targets = torch.randn(8, 3, 4, 4), torch.arange(8)
    mixing = make_mixing(load_recipe("advanced"), 10)
    _, mixed = mixing(images, targets)
    assert mixed.sum(1).tolist() == pytest.approx([1.0] * 8)


def test_matched_steps_follow_the_schedule_and_outlive_a_checkpoint() -> None:
    """Every group has the recipe's rate at every step, warm-up included, times its factor."""
    recipe = load_recipe("small").with_overrides({"epochs": 3, "warmup_epochs": 1.0})
    torch.manual_seed(0)
    model = timm.create_model("kw1x_resnet18", num_classes=4, begin="logits", **TINY_RESNET)
    expected = learning_rates(recipe, 4)
    optimizer = make_optimizer(model, recipe)
    schedule = make_schedule(optimizer, recipe, 4)
    factors = [group["lr_scale"] for group in optimizer.param_groups]
    assert factors.count(1.0) == 2  # with decay and without
    assert 0 < min(factors) < 0.5
    for step in range(6):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected[step] * f for f in factors])
        schedule.step_update(step + 1)
    with torch.no_grad():  # weights that would give other factors
        for parameter in model.parameters():
            parameter.mul_(2)
    again = make_optimizer(model, recipe)
    assert [group["lr_scale"] for group in again.param_groups] != factors
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in again.param_groups] == factors
    plain = make_optimizer(model, recipe.with_overrides({"matched_steps": False}))
    assert not any("lr_scale" in group for group in plain.param_groups)


@pytest.mark.parametrize("begin", ["temperature", "logits"])
def test_no_step_decays_more_than_the_recipe_says(begin: str) -> None:
    """What a step takes away is rate times decay; logits that have a smaller rate lose less."""
    recipe = load_recipe("small").with_overrides({"decay_logits": True})
    model = timm.create_model("kw1x_resnet18", num_classes=4, begin=begin, **TINY_RESNET)
    decayed = [group for group in make_optimizer(model, recipe).param_groups if group["weight_decay"]]
    assert any(group["lr_scale"] != 1 for group in decayed)
    for group in decayed:
        factor, decay = group["lr_scale"], group["weight_decay"]
        assert factor * decay == pytest.approx(min(factor, 1) * recipe.weight_decay)


@pytest.mark.parametrize("begin", ["temperature", "logits"])
def test_factors_are_those_that_the_optimiser_needs(begin: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("kw1x_resnet18", num_classes=4, begin=begin, **TINY_RESNET)
    recipe = load_recipe("small")

    def factors(optimizer: str) -> set[float]:
        made = make_optimizer(model, recipe.with_overrides({"optimizer": optimizer}))
        return {group["lr_scale"] for group in made.param_groups}

    def expected(adaptive: bool) -> set[float]:
        return {group["lr"] for group in kw.parameter_groups(model, 1.0, adaptive=adaptive)}

    for name in ("sgd", "nesterov", "momentum", "sgdw", "csgdw"):  # warnings are errors in tests
        assert factors(name) == expected(adaptive=False)
    for name in ("adam", "adamw", "nadamw", "lion", "adamwlegacy", "cadamw", "adoptw"):
        assert factors(name) == expected(adaptive=True)


def test_factors_that_an_optimiser_may_not_suit_are_told() -> None:
    """And still used, since that is what was asked for."""
    model = timm.create_model("kw1x_resnet18", num_classes=4, **TINY_RESNET)
    recipe = load_recipe("small").with_overrides({"optimizer": "lamb"})
    with pytest.warns(
        kw.KernelWarehouseWarning, match=r"'lamb'.* factors for Adam.* set matched_steps=false"
    ) as caught:
        optimizer = make_optimizer(model, recipe)
    assert len(caught) == 1
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 1
    with pytest.warns(kw.KernelWarehouseWarning, match="'sgdc'.* factors for SGD"):
        make_optimizer(model, recipe.with_overrides({"optimizer": "sgdc"}))
    # Nothing to tell.
    make_optimizer(model, recipe.with_overrides({"matched_steps": False}))
    make_optimizer(nn.Linear(2, 2), recipe)
    kw.set_temperature(model, 0.0)  # as with `tau_epochs = 0`: all factors are 1
    make_optimizer(model, recipe)

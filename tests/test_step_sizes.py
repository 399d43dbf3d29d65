"""Learning rates of a converted network's parameters: which are smaller, by how much, and why by that."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.attention import Attention, AttentionShape
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.step_sizes import START_FACTOR, STEADY, logit_parameters, logits_factor


def network(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    static = nn.Sequential(
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)
    )
    return kw.convert(static, kw.plan(static, **settings))


def layers(model: nn.Module) -> list[WarehouseLayer]:
    return [module for module in model.modules() if isinstance(module, WarehouseLayer)]


def movement(layer: WarehouseLayer, hidden: Tensor, wanted: Tensor, part: str, adaptive: bool = False) -> Tensor:
    """How the kernels of all samples move when either part takes a step, in proportion to its rate, which is small.

    The gradient of each kernel is the wanted direction; parameters get the mean over the samples, as in training.
    """
    attention, cells = layer.attention, layer.warehouse.cells
    moved = [cells] if part == "cells" else [dict(attention.named_parameters())[n] for n in logit_parameters(attention)]

    def kernels() -> Tensor:
        weights = attention.weights(attention.logits(hidden))
        return torch.einsum("bmn,nd->bmd", weights, cells.flatten(1))

    before = kernels()
    gradients = torch.autograd.grad((before * wanted).sum() / len(hidden), moved)
    if adaptive:  # the first step of Adam
        gradients = tuple(gradient.sign() for gradient in gradients)
    with torch.no_grad():
        for parameter, gradient in zip(moved, gradients, strict=True):
            parameter += 1e-7 * gradient
        after = kernels()
        for parameter, gradient in zip(moved, gradients, strict=True):
            parameter -= 1e-7 * gradient
    return (after - before.detach()) / 1e-7


@pytest.mark.parametrize("begin", ["temperature", "logits"])
@pytest.mark.parametrize(
    ("low_rank", "budget", "most"),
    [(None, "1/2", 3), (None, 1, 2), (None, 4, 2), (0.5, "1/2", 4), (0.5, 1, 3), (0.5, 4, 2)],
)  # at 1/2, half start from nothing
def test_with_its_factor_a_step_of_the_logits_moves_kernels_as_far_as_one_of_the_cells(
    begin: Any, low_rank: float | None, budget: Any, most: int
) -> None:
    """Kernels that lie in the span of the cells; one sample, so that nothing averages out."""
    model = network(config=kw.WarehouseConfig(budget=budget, begin=begin, low_rank=low_rank)).double()
    kw.set_temperature(model, 0.0)
    generator = torch.Generator().manual_seed(1)
    for layer in layers(model):
        cells = layer.warehouse.cells.detach().flatten(1)
        factor = logits_factor(layer.attention, layer.warehouse.cells)
        through = {"cells": 0.0, "logits": 0.0}
        for _, part in itertools.product(range(40), through):
            hidden = torch.randn(1, layer.attention.shape.hidden, generator=generator, dtype=torch.float64).relu()
            mixtures = layer.attention.shape.mixtures
            coefficients = torch.randn(1, mixtures, len(cells), generator=generator, dtype=torch.float64)
            wanted = coefficients @ cells
            through[part] += float((movement(layer, hidden, wanted, part) * wanted).sum())
        # Cells are taken for orthogonal, which many small ones are not.
        assert 1 / most < factor * through["logits"] / through["cells"] < most, (factor, through)


@pytest.mark.parametrize(
    ("low_rank", "budget", "most"),
    [(None, "1/2", 3), (None, 1, 1.5), (None, 4, 1.5), (0.5, "1/2", 3), (0.5, 1, 2.5), (0.5, 4, 1.5)],
)
def test_the_same_for_steps_that_do_not_grow_with_the_gradient(
    low_rank: float | None, budget: Any, most: float
) -> None:
    """One step from a start at the logits; by the length of the way, as signs of gradients are no kernel's direction.

    Moves along the kernel itself, which grows or shrinks by them, are left out: a norm follows.
    """
    config = kw.WarehouseConfig(budget=budget, begin="logits", low_rank=low_rank)
    generator = torch.Generator().manual_seed(1)
    for layer in layers(network(config=config).double()):
        factor = STEADY * logits_factor(layer.attention, layer.warehouse.cells, adaptive=True)
        through = {"cells": 0.0, "logits": 0.0}
        for _, part in itertools.product(range(40), through):
            hidden = torch.randn(1, layer.attention.shape.hidden, generator=generator, dtype=torch.float64).relu()
            sizes = layer.attention.shape.mixtures, layer.warehouse.cells[0].numel()
            wanted = torch.randn(1, *sizes, generator=generator, dtype=torch.float64)
            moved = movement(layer, hidden, wanted, part, adaptive=True)
            weights = layer.attention.weights(layer.attention.logits(hidden))
            along = F.normalize(torch.einsum("bmn,nd->bmd", weights, layer.warehouse.cells.flatten(1)), dim=-1)
            across = moved - (moved * along).sum(-1, keepdim=True) * along
            through[part] += float(across.norm(dim=-1).mean().detach())
        assert 1 / most < factor * through["logits"] / through["cells"] < most, (factor, through)


def named(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter; each has to be in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(names.values())
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }


def test_a_static_network_keeps_its_rate_and_decays_kernels_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    found = named(model, kw.parameter_groups(model, 0.1, 0.01))
    assert found == {"0.weight": (0.1, 0.01)} | dict.fromkeys(("0.bias", "1.weight", "1.bias"), (0.1, 0.0))


@pytest.mark.parametrize("kind", [list, set, iter])
def test_further_names_do_not_decay_whatever_they_come_in(kind: Callable[[list[str]], Iterable[str]]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    found = named(model, kw.parameter_groups(model, 0.1, 0.01, no_decay=kind(["0.weight"])))
    assert (found["0.weight"], found["1.weight"]) == ((0.1, 0.0), (0.1, 0.01))


def test_by_temperature_all_that_makes_kernels_has_a_larger_rate_until_the_start_is_over() -> None:
    model = network()
    found = named(model, kw.parameter_groups(model, 0.1, 0.01))
    for name, (rate, decay) in found.items():
        in_layers = "attention" in name or "cells" in name
        assert rate == pytest.approx(0.1 * START_FACTOR if in_layers else 0.1), name
        decayed = name.endswith(("cells", "fc1.weight"))
        assert rate * decay == pytest.approx(0.1 * 0.01 if decayed else 0.0), name
    kw.set_temperature(model, 0.0)
    assert {rate for rate, _ in named(model, kw.parameter_groups(model, 0.1, 0.01)).values()} == {0.1}


def test_a_step_without_gradients_shrinks_all_that_decays_as_in_the_static_network() -> None:
    model = network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(kw.parameter_groups(model, 0.1, 0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        share = 1 - 0.1 * 0.5 if name.endswith(("cells", "fc1.weight")) else 1.0
        torch.testing.assert_close(parameter.detach(), share * before[name])


def test_at_the_logits_only_what_makes_them_has_a_smaller_rate() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits"))
    found = named(model, kw.parameter_groups(model, 0.1, 0.01))
    for path, layer in model.named_modules():
        if isinstance(layer, WarehouseLayer):
            factor = logits_factor(layer.attention, layer.warehouse.cells)
            assert 0 < factor < 0.3
            for name in logit_parameters(layer.attention):
                assert found.pop(f"{path}.attention.{name}") == (pytest.approx(0.1 * factor), 0.0)
    assert {rate for rate, _ in found.values()} == {0.1}


@pytest.mark.parametrize("begin", ["temperature", "logits"])
def test_groups_for_adaptive_optimisers_differ_in_their_factors_alone(begin: Any) -> None:
    model = network(config=kw.WarehouseConfig(begin=begin))
    growing, adaptive = (kw.parameter_groups(model, 0.1, 0.01, adaptive=each) for each in (False, True))
    assert [group["params"] for group in growing] == [group["params"] for group in adaptive]
    for first, second in zip(growing, adaptive, strict=True):
        assert (first["lr"] != second["lr"]) == (first["lr"] < 0.1)
        assert 0 < second["lr"] <= max(0.1, first["lr"])


def test_groups_of_a_network_on_its_way_take_the_state_of_those_at_its_start() -> None:
    for begin in ("temperature", "logits"):
        model = network(config=kw.WarehouseConfig(begin=begin))
        first = torch.optim.SGD(kw.parameter_groups(model, 0.1, 0.01), momentum=0.9)
        model(torch.randn(2, 16, 9, 9)).square().sum().backward()
        first.step()
        kw.set_temperature(model, 0.0)
        second = torch.optim.SGD(kw.parameter_groups(model, 0.1, 0.01), momentum=0.9)
        second.load_state_dict(first.state_dict())
        rates = [[(group["lr"], group["weight_decay"]) for group in each.param_groups] for each in (first, second)]
        assert rates[0] == rates[1]
        assert len({rate for rate, _ in rates[0]}) > 1


def test_wrapped_networks_have_the_groups_of_what_is_wrapped() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits"))
    model.no_weight_decay = lambda: {"0.warehouse.cells"}  # type: ignore[assignment]
    expected = [
        (group["lr"], group["weight_decay"], group["params"]) for group in kw.parameter_groups(model, 0.1, 0.01)
    ]
    assert model.get_parameter("0.warehouse.cells") is not None
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        found = kw.parameter_groups(wrapped, 0.1, 0.01)
        assert [(group["lr"], group["weight_decay"], group["params"]) for group in found] == expected


def test_shared_cells_are_known_by_each_of_their_names() -> None:
    model = network()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("cells")]
    shared = [name for name in names if name not in dict(model.named_parameters())]
    for name in shared or names:
        found = named(model, kw.parameter_groups(model, 0.1, 0.01, no_decay=[name]))
        assert any(decay == 0 for key, (_, decay) in found.items() if key.endswith("cells"))


def test_factors_do_not_depend_on_precision_or_default_device() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits"))
    rates = [group["lr"] for group in kw.parameter_groups(model, 0.1)]
    with torch.device("meta"):
        assert [group["lr"] for group in kw.parameter_groups(model, 0.1)] == rates
    half = [group["lr"] for group in kw.parameter_groups(model.bfloat16(), 0.1)]
    assert half == pytest.approx(rates, rel=0.02)
    with pytest.raises(ConfigError, match="on the meta device; its rates depend on its weights"):
        kw.parameter_groups(model.to("meta"), 0.1)


def test_layer_norm_attentions_have_factors_too() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits", norm="layer"))
    assert len({group["lr"] for group in kw.parameter_groups(model, 0.1)}) > 1


def test_factors_are_the_same_every_time_and_draw_no_random_numbers() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits"))
    torch.manual_seed(3)
    first = kw.parameter_groups(model, 0.1)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert [group["lr"] for group in first] == [group["lr"] for group in kw.parameter_groups(model, 0.1)]


def test_frozen_parameters_are_left_out() -> None:
    model = network(config=kw.WarehouseConfig(begin="logits"))
    frozen = layers(model)[0].attention.fc2.weight.requires_grad_(False)
    members = [parameter for group in kw.parameter_groups(model, 0.1) for parameter in group["params"]]
    assert not any(parameter is frozen for parameter in members)
    assert len(members) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "relu"])
def test_every_attention_function_and_the_low_rank_form_have_a_factor(function: Any) -> None:
    for settings in ({"attention": function}, {"low_rank": 0.5}):
        for layer in layers(network(config=kw.WarehouseConfig(**settings))):
            for adaptive in (False, True):
                assert 0 < logits_factor(layer.attention, layer.warehouse.cells, adaptive) <= 1


def test_mixtures_of_the_zero_cell_alone_can_still_be_learnt() -> None:
    shape = AttentionShape(in_channels=16, mixtures=4, cells=3, hidden=16, begin="logits")
    attention = Attention(shape, torch.zeros(4, 3, dtype=torch.bool))
    assert not attention(torch.randn(2, 16)).any()
    for adaptive in (False, True):
        assert 0 < logits_factor(attention, torch.randn(3, 8, 8), adaptive) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -0.1}, r"learning_rate \(=-0.1\) must be a number from 0 on"),
        ({"learning_rate": float("nan")}, r"learning_rate \(=nan\) must be"),
        ({"learning_rate": "0.1"}, r"learning_rate \(='0.1'\) must be"),
        ({"learning_rate": True}, r"learning_rate \(=True\) must be"),
        ({"learning_rate": 0.1, "no_decay": "0.bias"}, r"no_decay \(='0.bias'\) must be a list of names"),
        ({"learning_rate": 0.1, "weight_decay": -1}, r"weight_decay \(=-1\) must be"),
        ({"learning_rate": 0.1, "no_decay": ["0.wieght"]}, "no_decay names '0.wieght', which is no parameter"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kw.parameter_groups(nn.Sequential(nn.Conv2d(3, 4, 3)), **arguments)

"""Learning rates with which the static network's own recipe fits its twin: `parameter_groups`.

A kernel w = sum of a_j e_j is moved by two kinds of parameters. A step of the rate r along its gradient g moves it by
r |a|^2 g through the cells e, as a static kernel moves by r g, and |a|^2 cancels: a norm follows nearly every layer,
so only the change in proportion to the kernel counts, and |w|^2 has the factor |a|^2 too. Through the logits z, the
same step moves it within the span of the cells, by r |e|^2 (|h|^2 + 1) |da/dz|^2 times that part of g, h being the
hidden vector. That is often a hundred times as much.

- Where training begins at the logits, the attentions would stray from a start that is good faster than the cells can
  follow. What makes the logits takes steps that are smaller by the ratio of the two.
- By the temperature, the attentions begin at random and differently for every image: a start that is to be left as soon
  as possible. Everything that makes kernels takes larger steps. How much larger is measured, not derived.

An optimiser such as Adam gives every number a step of about the rate, whatever its gradient. A step through the cells
then moves a kernel of D numbers by r |a|_1 sqrt(D), and one through the logits by r |e| (|h|_1 + 1) |J s|, s being the
signs of the logits' gradients and J = da/dz: the two are much nearer to each other, and the factor is another. But the
gradient of a logit is a sum over a whole cell and keeps its sign from step to step, while those of a cell's numbers
change theirs and their steps cancel. How much that is worth is measured, not derived.

A step of SGD or AdamW shrinks a parameter by rate times decay. Where the rate is larger, the decay is smaller by the
same factor, or larger steps would also forget sooner. Where it is smaller, decay stays: it is meant to change less.
"""

import copy
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from kernelwarehouse.attention import Attention
from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.layers import WarehouseLayer

SAMPLES = 16
"""Hidden vectors that a factor is averaged over."""
START_FACTOR = 3.0
"""For cells and attentions that begin by the temperature; chosen on a small ResNet and CIFAR-10 (docs/training.md)."""
STEADY = 10.0
"""How many times farther steps of logits get in the end than steps of cells, where each is as large as the rate; chosen
likewise."""


def parameter_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    *,
    no_decay: Iterable[str] = (),
    adaptive: bool = False,
) -> list[dict[str, Any]]:
    """Groups for an optimiser with which the recipe of the static network is right for the converted one.

    Parameters have the given rate, with two exceptions. In layers that begin at their logits, what makes these has a
    smaller one. Where layers begin by the temperature, and it is above 0, cells and attentions have a larger one. So
    call it when the network is about to be trained: after conversion or loading, and before the temperature is set to
    0. To go on from a checkpoint, load the optimiser's state into the same groups: it has their rates. Processes that
    train together must begin with the same weights, or make the groups after `DistributedDataParallel` has seen to
    that.

    Weight decay leaves out biases, norms, what `model.no_weight_decay()` names, and the layers that make logits: the
    paper's function uses only their proportions, which decay does not change. Where the rate is larger than the given
    one, the decay is smaller by the same factor: a step of SGD shrinks cells as much as it shrinks static kernels.

    Arguments:
        model: converted or not. Without warehouses, all groups have the same rate.
        learning_rate: of the static network's recipe.
        weight_decay: likewise.
        no_decay: names of further parameters without decay.
        adaptive: whether the optimiser's steps do not grow with the gradient, as Adam's and Lion's do not. By default
            they do, as those of SGD with momentum.

    Returns:
        Groups with `params`, `lr` and `weight_decay`, for any optimiser of torch's or timm's. Schedules that multiply
        rates keep the factors. Those that set them do not: give `OneCycleLR` the list of the groups' rates as
        `max_lr`; smallest and warm-up rates are the same for all groups.

    Raises:
        ConfigError: if a number is negative or not finite, a name is not one of a parameter, or the network has no
            weights yet (it is on the meta device).
    """
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ConfigError(f"{name} (={value!r}) must be a number from 0 on")
    if isinstance(no_decay, str):
        raise ConfigError(f"no_decay (={no_decay!r}) must be a list of names")
    left_out = list(no_decay)  # what can be gone through once only would be used up by the check
    inner = _unwrapped(model)
    known = dict(inner.named_parameters(remove_duplicate=False))
    for name in left_out:
        if name not in known:
            raise ConfigError(f"no_decay names {name!r}, which is no parameter of the network")
    wishes = getattr(inner, "no_weight_decay", None)
    names = {*left_out, *(wishes() if callable(wishes) else ())}
    undecayed = {id(parameter) for name, parameter in known.items() if name in names or parameter.ndim < 2}
    for module in inner.modules():
        if isinstance(module, Attention):
            makers = dict(module.named_parameters())
            undecayed |= {id(makers[name]) for name in logit_parameters(module)}
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if id(parameter) not in undecayed]
    others = [parameter for parameter in trained if id(parameter) in undecayed]
    return [
        {"params": members, "lr": float(learning_rate) * factor, "weight_decay": matched_decay(decay, factor)}
        for decay, group in ((float(weight_decay), decayed), (0.0, others))
        for factor, members in divided(group, inner, adaptive)
    ]


def matched_decay(decay: float, factor: float) -> float:
    """The decay that goes with a rate that is multiplied by the factor."""
    return decay / max(1.0, factor)


def _unwrapped(model: nn.Module) -> nn.Module:
    """What `torch.compile` and data parallelism wrap: the names of its parameters are those that people know."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def divided(
    parameters: Iterable[nn.Parameter], model: nn.Module, adaptive: bool = False
) -> list[tuple[float, list[nn.Parameter]]]:
    """The parameters of a group, by what to multiply its rate by: first those that keep it, then those with factors.

    How they are divided depends on the layers alone, not on the factors: what goes on from a checkpoint finds the same
    groups.
    """
    rated = factors(model, adaptive)
    number = {id(parameter): place for place, (_, members) in enumerate(rated) for parameter in members}
    parts: list[list[nn.Parameter]] = [[] for _ in range(len(rated) + 1)]
    for parameter in parameters:
        parts[number.get(id(parameter), -1) + 1].append(parameter)
    numbers = [1.0, *(factor for factor, _ in rated)]
    return [(factor, part) for factor, part in zip(numbers, parts, strict=True) if part]


def factors(model: nn.Module, adaptive: bool = False) -> list[tuple[float, list[nn.Parameter]]]:
    """What to multiply the rates of which parameters by; others keep theirs."""
    layers = [module for module in model.modules() if isinstance(module, WarehouseLayer)]
    if any(parameter.is_meta for layer in layers for parameter in layer.parameters()):
        raise ConfigError("the network is on the meta device; its rates depend on its weights, so load these first")
    by_temperature = [layer for layer in layers if layer.attention.follows_temperature]
    starts = any(layer.attention.get_temperature() > 0 for layer in by_temperature)
    rated = [
        (
            START_FACTOR if starts else 1.0,
            [each for layer in by_temperature for each in (layer.warehouse.cells, *layer.attention.parameters())],
        )
    ]
    for layer in layers:
        attention = layer.attention
        if attention.shape.begin == "logits":
            makers = dict(attention.named_parameters())
            members = [makers[name] for name in logit_parameters(attention)]
            rated.append((logits_factor(attention, layer.warehouse.cells, adaptive), members))
    return rated


def logit_parameters(attention: Attention) -> list[str]:
    """Names of what makes the logits of a hidden vector."""
    return [name for name, _ in attention.named_parameters() if not name.startswith(("fc1", "norm"))]


@torch.no_grad()
def logits_factor(attention: Attention, cells: Tensor, adaptive: bool = False) -> float:
    """How much farther a step through the cells moves a kernel than one through the logits; at most 1.

    In the mean over hidden vectors as the branch's norm makes them of normal features, and over mixtures. Computed on
    the CPU, so that it is the same wherever the network is.
    """
    here = copy.deepcopy(attention).to("cpu", torch.float64)
    hidden = _hidden_vectors(here)
    function = ATTENTION_FUNCTIONS[attention.shape.function]
    logits = here.logits(hidden)
    # |J v|^2 / n for random signs v is in the mean the squared slope of an attention by its logits.
    signs = torch.randint(0, 2, logits.shape, generator=_generator(), device="cpu").to(logits) * 2 - 1
    attentions, slopes = torch.func.jvp(function, (logits,), (signs,))[:2]
    size = cells.detach().to("cpu", torch.float64).flatten(1).square().sum(1).mean()
    order = 1 if adaptive else 2
    # Where all mixtures are of the zero cell: as if each had one, or a rate of 0 would keep them so.
    weight = float(attentions.abs().pow(order).sum(-1).mean()) or 1.0
    if adaptive:
        through_cells = weight * math.sqrt(cells[0].numel())
        through_logits = STEADY * size.sqrt() * (hidden.sum(1).mean() + 1) * slopes.square().sum(-1).sqrt().mean()
    else:
        through_cells = weight
        through_logits = size * (hidden.square().sum(1).mean() + 1) * slopes.square().mean()
    return min(1.0, through_cells / float(through_logits)) if through_logits > 0 else 1.0


def _hidden_vectors(attention: Attention) -> Tensor:
    features = torch.randn(SAMPLES, attention.shape.hidden, generator=_generator(), dtype=torch.float64, device="cpu")
    scale, shift = (getattr(attention.norm, name, None) for name in ("weight", "bias"))
    if scale is not None and shift is not None:  # what stands in for the norm may have neither
        features = features * scale + shift
    return F.relu(features)


def _generator() -> torch.Generator:
    """Always the same numbers: what goes on from a checkpoint must have the same rates."""
    return torch.Generator("cpu").manual_seed(0)

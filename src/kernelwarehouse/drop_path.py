"""Stochastic depth (Huang et al., ECCV 2016) with one rate for all residual branches; timm lets it rise with depth."""

from collections.abc import Iterator

from timm.layers import DropPath
from torch import nn

from kernelwarehouse.errors import ConfigError

_PLACES = ("drop_path", "drop_path1", "drop_path2")
"""The attributes of timm's residual blocks that drop a branch."""


def drop_evenly(model: nn.Module, rate: float) -> None:
    """Let every residual branch of a network of timm's, converted or not, be dropped with the same chance."""
    places = list(_places(model))
    if not places:
        raise ConfigError(f"{type(model).__name__} has no residual branch that could be dropped; use a drop path of 0")
    for block, place in places:
        setattr(block, place, DropPath(rate).train(block.training))


def even_rate(model: nn.Module) -> float | None:
    """The chance that all residual branches share; `None` where they differ or none is ever dropped."""
    found = [getattr(block, place) for block, place in _places(model)]
    rates = {part.drop_prob if isinstance(part, DropPath) else 0.0 for part in found}
    return rates.pop() or None if len(rates) == 1 else None


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for block in model.modules():
        for place in _PLACES:
            # A branch that is never dropped has nothing there in ResNets, and an Identity elsewhere.
            if hasattr(block, place) and isinstance(getattr(block, place), (DropPath, nn.Identity, type(None))):
                yield block, place

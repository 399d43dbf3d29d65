"""The functions that turn logits into attentions: one entry in one table for each.

A function is given the logits of the cells that a mixture sees and, last, of the zero cell, `[..., cells + 1]`, in
float32 or float64. It returns the attentions of the cells, `[..., cells]`; the zero cell is dropped.
"""

from collections.abc import Callable

from torch import Tensor

NORMALISER_EPS = 1e-3


def normaliser(logits: Tensor) -> Tensor:
    """What the paper's function divides by, `[..., 1]`."""
    return logits.abs().sum(-1, keepdim=True) + NORMALISER_EPS


def _contrasting(logits: Tensor) -> Tensor:
    """The paper's: shares of the sum of absolute values, which may be negative."""
    return logits[..., :-1] / normaliser(logits)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)[..., :-1]


def _sigmoid(logits: Tensor) -> Tensor:
    return logits[..., :-1].sigmoid()


def _relu(logits: Tensor) -> Tensor:
    """The paper's without its negative half."""
    return logits[..., :-1].relu() / normaliser(logits)


ATTENTION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "caf": _contrasting,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "relu": _relu,
}
"""Name, as in `WarehouseConfig.attention`, -> function. The first is the default."""

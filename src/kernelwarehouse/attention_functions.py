"""The functions that turn logits into attentions: one entry in one table for each.

A function is given the logits of the cells that a mixture sees and, last, of the zero cell, `[..., cells + 1]`, in
float32 or float64. It returns the attentions of the cells, `[..., cells]`; the zero cell is dropped.

Training can begin at logits that are 1 at the cells a mixture starts from and 0 at the others, if the function turns
that into exactly those cells and lets the others learn. `START_OBSTACLES` says which functions do not.
"""

from collections.abc import Callable

from torch import Tensor

NORMALISER_EPS = 1e-3
ZERO_CELL_START = 2**-13
"""The zero cell's first logit where a mixture starts from cells. It counts only by its absolute value, whose slope at 0
is 0: from there it could never move. Exact in every floating-point type, and so small that bfloat16 takes the attention
of a single cell for 1."""


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

START_OBSTACLES: dict[str, str | None] = {
    "caf": None,
    "softmax": "is above 0 for every cell",
    "sigmoid": "is above 0 for every cell",
    "relu": "has no slope at 0, so that no cell beside those it starts from would ever be learnt",
}
"""Name -> why training cannot begin at its logits."""


def start_divisor(cells: int) -> float:
    """What the paper's function divides by where training begins at the logits of so many cells, 1 each."""
    return cells + ZERO_CELL_START + NORMALISER_EPS

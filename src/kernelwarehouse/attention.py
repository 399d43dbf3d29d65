"""The attention branch of a layer: from its input to the weights of its mixtures."""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS, ZERO_CELL_START, normaliser
from kernelwarehouse.config import AttentionFunction, Begin, Norm, check_begin, check_choice, check_positive
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.temperature import HasTemperature

SMALLEST_HIDDEN = 16


def hidden_width(in_channels: int, reduction: float) -> int:
    return max(int(in_channels * reduction), SMALLEST_HIDDEN)


@dataclass(frozen=True)
class LowRank:
    """The low-rank form: cells that start in this layer keep logits of their own, the others share a basis.

    `first` and `local` place the layer's own cells in the warehouse, `basis` is the width of the rest.
    """

    first: int
    local: int
    basis: int

    @staticmethod
    def of(ratio: float, cells: int, first: int, local: int) -> "LowRank":
        return LowRank(first, local, max(int((cells - local) * ratio), SMALLEST_HIDDEN))


@dataclass(frozen=True)
class AttentionShape:
    """All that decides what an attention branch is, and where it begins.

    `cells` is the n of the warehouse. With `own_cells_only` a mixture sees only its `cells / mixtures` own ones.
    """

    in_channels: int
    mixtures: int
    cells: int
    hidden: int
    norm: Norm = "batch"
    function: AttentionFunction = "caf"
    low_rank: LowRank | None = None
    own_cells_only: bool = False
    begin: Begin = "temperature"

    def __post_init__(self) -> None:
        for name in ("in_channels", "mixtures", "cells", "hidden"):
            check_positive(getattr(self, name), f"attention: {name}")
        check_choice(self.norm, "attention: norm", get_args(Norm))
        check_choice(self.function, "attention: function", ATTENTION_FUNCTIONS)
        check_choice(self.begin, "attention: begin", get_args(Begin))
        check_begin(self.begin, self.function, None, "attention: ")
        if self.own_cells_only and (self.cells % self.mixtures or self.low_rank):
            raise ConfigError(
                f"attention over own cells only: {self.cells} cells do not divide among {self.mixtures} mixtures, "
                "or a low-rank form is asked for; use an integer budget of 1 or more and the full-rank form"
            )

    @property
    def visible(self) -> int:
        """Cells that one mixture sees."""
        return self.cells // self.mixtures if self.own_cells_only else self.cells

    @property
    def units(self) -> int:
        """Kernels that a mixture is a sum of where cells are mixed through the hidden vector."""
        return self.hidden + 1

    def parameters(self) -> int:
        """Parameters of the branch, counted without building it."""
        first = self.in_channels * self.hidden + (self.hidden if self.norm == "layer" else 0)
        norm = 2 * self.hidden
        logits = self.mixtures * (self.visible + 1)
        if self.low_rank is None:
            return first + norm + (self.hidden + 1) * logits
        local, basis = self.low_rank.local, self.low_rank.basis
        head = self.hidden * self.mixtures * (local + basis + 1)
        return first + norm + head + basis * (self.cells - local) + logits


class Attention(HasTemperature):
    """Mean over positions -> Linear -> norm -> ReLU -> Linear -> attention function.

    Every mixture has one logit per visible cell and one more for the zero cell, which takes part in the
    normalisation and is then dropped. `starts` says which cells a mixture starts from. By temperature, this is the
    paper's `beta`; without it (`None`) the temperature has no effect and stays 0. At the logits, there is no `beta`
    either: what makes them starts with weights of 0 and biases of 1 at these cells, or at the zero cell for a mixture
    that starts from none.

    In training, batch statistics of fewer than two samples say nothing: such a batch is normalised with the running
    statistics and leaves them alone.
    """

    beta: Tensor | None

    def __init__(
        self,
        shape: AttentionShape,
        starts: Tensor | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        beta = starts if shape.begin == "temperature" else None
        super().__init__(1.0 if beta is not None else 0.0, device)
        if starts is not None and tuple(starts.shape) != (shape.mixtures, shape.cells):
            raise ConfigError(f"the starts have shape {tuple(starts.shape)}; {(shape.mixtures, shape.cells)} is wanted")
        self.shape = shape
        self._first_cells = None if shape.begin == "temperature" else _seen_starts(shape, starts)
        here = self.temperature.device
        self.register_buffer("beta", None if beta is None else beta.to(device=here, dtype=torch.bool).contiguous())
        batch_norm = shape.norm == "batch"
        self.fc1 = nn.Linear(shape.in_channels, shape.hidden, bias=not batch_norm, device=device, dtype=dtype)
        norm = nn.BatchNorm1d if batch_norm else nn.LayerNorm
        self.norm: nn.Module = norm(shape.hidden, device=device, dtype=dtype)
        low_rank = shape.low_rank
        if low_rank is None:
            logits = shape.mixtures * (shape.visible + 1)
            self.fc2 = nn.Linear(shape.hidden, logits, device=device, dtype=dtype)
        else:
            width = shape.mixtures * (low_rank.local + low_rank.basis + 1)
            self.fc2 = nn.Linear(shape.hidden, width, bias=False, device=device, dtype=dtype)
            others = shape.cells - low_rank.local
            self.basis = nn.Linear(low_rank.basis, others, bias=False, device=device, dtype=dtype)
            offsets = torch.empty(shape.mixtures, shape.cells + 1, device=device, dtype=dtype)
            self.offset = nn.Parameter(offsets)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Linear weights kaiming-normal (fan_out), biases 0, the norm as new; the logits where training begins."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=math.sqrt(2 / max(layer.out_features, 1)))
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, (nn.BatchNorm1d, nn.LayerNorm)):
                layer.reset_parameters()
        if self.shape.low_rank is not None:
            nn.init.zeros_(self.offset)
        if self._first_cells is not None:
            # The basis of the low-rank form stays as it is: if both factors were 0, neither would have a gradient.
            nn.init.zeros_(self.fc2.weight)
            offsets = self.fc2.bias if self.shape.low_rank is None else self.offset
            zero_cell = torch.where(self._first_cells.any(1, keepdim=True), ZERO_CELL_START, 1.0)
            with torch.no_grad():
                offsets.copy_(torch.cat([self._first_cells, zero_cell], dim=1).view(offsets.shape))

    @property
    def follows_temperature(self) -> bool:
        return self.beta is not None

    def set_temperature(self, tau: float) -> None:
        super().set_temperature(tau if self.follows_temperature else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, in_channels, *space]`, or means `[batch, in_channels]`, -> `[batch, mixtures, cells]`."""
        return self.weights(self.logits(self.hidden(x)))

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden vector, `[batch, hidden]`, for an input as above."""
        features = self.fc1(_mean_over_positions(x))
        norm = self.norm
        if type(norm) is nn.BatchNorm1d and norm.training and features.shape[0] < 2:
            features = F.batch_norm(
                features, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=False, eps=norm.eps
            )
        else:
            features = norm(features)
        return F.relu(features)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[batch, mixtures, visible + 1]`; the last is the zero cell's."""
        shape = self.shape
        raw = self.fc2(hidden).unflatten(1, (shape.mixtures, -1))
        low_rank = shape.low_rank
        if low_rank is None:
            return raw
        local, basis, zero = raw.split([low_rank.local, low_rank.basis, 1], dim=2)
        others = self.basis(basis)
        before, after = others.split([low_rank.first, others.shape[2] - low_rank.first], dim=2)
        return torch.cat([before, local, after, zero], dim=2) + self.offset

    def weights(self, logits: Tensor) -> Tensor:
        """The attention function: `[batch, mixtures, cells]`, in float32 at least."""
        shape = self.shape
        logits = logits if logits.dtype == torch.float64 else logits.float()
        learned = ATTENTION_FUNCTIONS[shape.function](logits)
        if shape.own_cells_only:
            # Mixture i sees the cells of block i: lay the blocks on the diagonal of [mixtures, mixtures, visible].
            blocks = torch.diag_embed(learned.transpose(1, 2)).permute(0, 2, 3, 1)
            learned = blocks.reshape(-1, shape.mixtures, shape.cells)
        if self.beta is None:
            return learned
        tau = self.tau(learned.dtype)
        return tau * self.beta + (1 - tau) * learned

    def factored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives, as products: coefficients `[batch, mixtures, r]` and factors `[mixtures, r, cells]`.

        Only for the function "caf" over all cells: before normalisation, it is affine in the hidden vector.
        """
        hidden = self.hidden(x)
        logits = self.logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        units = F.pad(hidden.to(logits.dtype), (0, 1), value=1.0)
        coefficients = units[:, None] / normaliser(logits)
        weight, offset = self.affine()
        factors = torch.cat([weight, offset[..., None]], dim=2).transpose(1, 2)
        # Asking for a temperature on another device would wait for all that it still computes.
        if self.beta is None or (self.temperature.device.type == "cpu" and self.get_temperature() == 0):
            return coefficients, factors
        tau = self.tau(logits.dtype)
        start = tau.expand(*coefficients.shape[:2], 1)
        factors = torch.cat([factors, self.beta[:, None].to(factors.dtype)], dim=1)
        return torch.cat([(1 - tau) * coefficients, start], dim=2), factors

    def affine(self) -> tuple[Tensor, Tensor]:
        """What the logits of cells are made of: `[mixtures, cells, hidden]` times the hidden vector, plus offsets."""
        shape, low_rank = self.shape, self.shape.low_rank
        weight = self.fc2.weight.unflatten(0, (shape.mixtures, -1))
        if low_rank is None:
            return weight[:, : shape.cells], self.fc2.bias.unflatten(0, (shape.mixtures, -1))[:, : shape.cells]
        local, basis, _ = weight.split([low_rank.local, low_rank.basis, 1], dim=1)
        others = torch.matmul(self.basis.weight, basis).to(local.dtype)
        before, after = others.split([low_rank.first, others.shape[1] - low_rank.first], dim=1)
        return torch.cat([before, local, after], dim=1), self.offset[:, : shape.cells]

    def extra_repr(self) -> str:
        shape = self.shape
        begin = "" if shape.begin == "temperature" else f", begin={shape.begin!r}"
        return f"mixtures={shape.mixtures}, cells={shape.cells}, function={shape.function!r}{begin}"


def _seen_starts(shape: AttentionShape, starts: Tensor | None) -> Tensor:
    """`[mixtures, visible]`: which of the cells that a mixture sees it starts from."""
    if starts is None:
        raise ConfigError("an attention that begins at its logits was not told which cells its mixtures start from")
    starts = starts.bool()
    if shape.own_cells_only:
        starts = starts.unflatten(1, (shape.mixtures, shape.visible)).diagonal(dim1=0, dim2=1).T.contiguous()
    return starts


def _mean_over_positions(x: Tensor) -> Tensor:
    """`[batch, channels, *space]` -> `[batch, channels]`."""
    if x.dim() == 2:
        return x
    x = x.flatten(2)
    if x.dtype not in (torch.float32, torch.float64):
        return x.mean(2)  # a sum could overflow
    return x.sum(2) / x.shape[2]  # in backward a mean divides every number of a large tensor, this only the sums

"""The warehouse: cells that several layers share, and the values they start with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from kernelwarehouse.attention_functions import start_divisor
from kernelwarehouse.partition import Partition
from kernelwarehouse.shared_gradient import Shared

Initializer = Callable[[Tensor], object]
"""Fills a kernel in place, such as `torch.nn.init.kaiming_normal_`."""

kaiming_normal: Initializer = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
"""How static convolutions start, fan_out of the whole kernel."""


@dataclass(frozen=True)
class _Lent:
    """What the layers of a forward pass get instead of the cells, and what tells whether it is still made of these."""

    values: TensorWeakRef
    held: Tensor | None  # the same, where nothing else keeps it alive
    dtype: torch.dtype
    source: tuple[int, int, int]
    users: set[int]

    def usable(self, dtype: torch.dtype, source: tuple[int, int, int], user: int) -> Tensor | None:
        """The values, where they are what is asked for and this user has not had them before."""
        if self.dtype != dtype or self.source != source or user in self.users:
            return None
        self.users.add(user)
        return self.values()


def _identity(cells: Tensor) -> tuple[int, int, int]:
    """The tensor, its memory, and how often it has been changed in place (-1: that is not counted)."""
    return id(cells), cells.untyped_storage()._cdata, -1 if cells.is_inference() else cells._version


class Warehouse(nn.Module):
    """`n` kernel cells of one shape, `[n, cell_out, cell_in, *cell_k]`.

    Every layer that draws on a warehouse holds it as a submodule, so that a layer, a stage or a backbone cut out of a
    model is whole: it moves, trains and copies with its cells. `nn.Module` would then write the cells into the state
    dict once for every layer. This class writes them under the first path only, and when loading asks for them there
    only.
    """

    cells: nn.Parameter
    _cast: _Lent | None = None
    _shared: _Lent | None = None  # here, since pickles from before have none

    def __init__(
        self,
        name: str,
        cells: int,
        cell_shape: tuple[int, ...],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.cells = nn.Parameter(torch.empty(cells, *cell_shape, device=device, dtype=dtype))
        self._saved_as = ""
        self._loaded_by: list[str] | None = None

    def cells_as(self, dtype: torch.dtype, user: object) -> Tensor:
        """The values of the cells in another type, without their history: cast once for all layers of a forward pass.

        They are kept as long as a graph needs them for backward; without gradients, until the next pass. Each user is
        given them once: who asks again is in another pass, before which the cells may have been changed in ways that
        torch does not count (fused optimisers, `parameter.data`), and gets new ones.
        """
        cells = self.cells
        if cells.dtype == dtype:
            return cells.detach()
        source, known = _identity(cells), self._cast
        values = None if known is None else known.usable(dtype, source, id(user))
        if values is not None:
            return values
        with torch.inference_mode(False), torch.no_grad():
            values = cells.to(dtype)
        held = None if torch.is_grad_enabled() else values
        self.__dict__["_cast"] = _Lent(TensorWeakRef(values), held, dtype, source, {id(user)})
        return values

    def cells_to_share(self, cells: Tensor, user: object) -> Tensor:
        """The cells for a layer that is differentiated: the same tensor for all layers of a forward pass, so that their
        gradients can be added up in one place. Each user is given it once, as with `cells_as`. Cells that are computed,
        as by a parametrization, are another tensor in every call."""
        if not torch.is_grad_enabled() or not cells.requires_grad or not cells.is_leaf:
            return cells
        source, known = _identity(cells), self._shared
        shared = None if known is None else known.usable(cells.dtype, source, id(user))
        if shared is not None:
            return shared
        shared = cast(Tensor, Shared.apply(cells))
        self.__dict__["_shared"] = _Lent(TensorWeakRef(shared), None, cells.dtype, source, {id(user)})
        return shared

    def extra_repr(self) -> str:
        count, *shape = self.cells.shape
        return f"{self.name!r}, cells={count}, cell_shape={tuple(shape)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(memory_format=torch.channels_last)` means images; it must not take the cells for any.
        self._cast = self._shared = None
        return super()._apply(lambda tensor: fn(tensor.flatten(1)).view(tensor.shape), recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        saved = destination.get(self._saved_as)
        if saved is None or not _same_memory(saved, self.cells):
            self._saved_as = prefix + "cells"
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # One call of load_state_dict hands the same list of missing keys to all modules: it tells calls apart.
        loaded_before = self._loaded_by is missing_keys
        self._loaded_by = missing_keys
        if not (loaded_before and prefix + "cells" not in state_dict):
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_loaded_by": None, "_cast": None, "_shared": None}


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def seed_cells(cells: Tensor, pieces: Tensor, ranges: list[range]) -> None:
    """Set the cells so that, at temperature 1, the mixtures come as near to `pieces` as they can.

    `ranges[i]` are the cells that mixture i sums up; `pieces[i]` is what it should give. The ranges of one strategy
    are equal or apart, which makes the least-squares solution nearest to the present cells a mean: mixtures with the
    same range want the mean of their pieces, and each cell of the range takes an equal share of what is missing. A
    cell with one mixture of its own becomes that mixture's piece, exactly.
    """
    wanted: dict[range, list[int]] = {}
    for mixture, run in enumerate(ranges):
        if run:
            wanted.setdefault(run, []).append(mixture)
    singles = [(run.start, mixtures[0]) for run, mixtures in wanted.items() if len(run) == 1 and len(mixtures) == 1]
    if singles:
        targets, sources = zip(*singles, strict=True)
        cells[list(targets)] = pieces[list(sources)].to(cells.dtype)
    for run, mixtures in wanted.items():
        if len(run) == 1 and len(mixtures) == 1:
            continue
        chosen = slice(run.start, run.stop)
        target = pieces[mixtures].double().mean(0)
        present = cells[chosen].double()
        cells[chosen] = (present + (target - present.sum(0)) / len(run)).to(cells.dtype)


@torch.no_grad()
def seed_from_kernels(
    cells: Tensor,
    partitions: Sequence[Partition],
    claims: Sequence[range],
    starts: Sequence[Sequence[range]],
    kernels: Sequence[Tensor | None],
) -> None:
    """Give the cells the values under which the layers, at temperature 1, come nearest to their static kernels.

    One entry a layer: how its kernel is cut, the cells it claims, the cells that each of its mixtures starts from, and
    the kernel. With a whole budget of 1 or more and a cell for every mixture the kernels are met exactly. Cells that no
    mixture starts from are drawn anew, as wide as the kernel of the layer that claims them. With fewer cells than
    mixtures, a cell becomes the piece of the mixture that starts from it: the other mixtures are zero at temperature 1
    whatever the cells are, so no other choice is nearer to the static kernel. The cells of a layer without a kernel
    are as new.
    """
    pieces: list[Tensor] = []
    ranges: list[range] = []
    for partition, claim, layer_starts, kernel in zip(partitions, claims, starts, kernels, strict=True):
        alike = kaiming_normal if kernel is None else partial(nn.init.normal_, std=float(kernel.std(correction=0)))
        draw_cells(cells, partition, claim, alike)
        if kernel is not None:
            pieces.append(partition.split(kernel))
            ranges += layer_starts
    seed_cells(cells, torch.cat(pieces), ranges)


@torch.no_grad()
def draw_cells(cells: Tensor, partition: Partition, claim: range, initializer: Initializer) -> None:
    """Fill the cells that a layer claims with the pieces of whole kernels.

    With b cells a mixture, b kernels are drawn, and piece i of the j-th becomes cell `i * b + j` of the layer.
    """
    if not claim:
        return
    kernels = math.ceil(len(claim) / partition.mixtures)
    drawn = []
    for _ in range(kernels):
        kernel = torch.empty(partition.kernel_shape, device=cells.device, dtype=cells.dtype)
        initializer(kernel)
        drawn.append(partition.split(kernel))
    pieces = torch.stack(drawn, 1).flatten(0, 1)
    chosen = torch.arange(len(claim), device=cells.device) * len(pieces) // len(claim)
    cells[claim.start : claim.stop] = pieces[chosen]


@torch.no_grad()
def scale_for_logits(cells: Tensor, starts: Sequence[Sequence[range]]) -> None:
    """Make the cells larger by what the attention function divides by where training begins at the logits.

    A mixture that starts from k cells then gives their sum, as at temperature 1. Mixtures that start from the same
    cell start from the same cells; a cell that none starts from is taken for one with a mixture of its own.
    """
    scale = torch.full((len(cells),), start_divisor(1), dtype=torch.float64, device="cpu")
    for run in {run for layer_starts in starts for run in layer_starts if run}:
        scale[run.start : run.stop] = start_divisor(len(run))
    wide = torch.promote_types(cells.dtype, torch.float32)  # the scale itself would be 1 in bfloat16
    cells.copy_(cells * scale.to(wide).to(cells.device).view(-1, *[1] * (cells.dim() - 1)))

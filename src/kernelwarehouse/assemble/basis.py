"""Mixing through the hidden vector of the attention, exactly.

Before normalisation the logits are affine in the hidden vector v: `z[i, j] = sum_k F[i, j, k] v_k + c[i, j]`. A mixture
is then `1 / (sum_j |z_ij| + eps)` times a sum over k of `v_k * P[i, k]`, where the kernels
`P[i, k] = sum_j F[i, j, k] e_j` do not depend on the input. Where the weights are frozen, P is made once: mixing costs
h + 1 kernels instead of n. At a temperature above 0, outputs are `1 - tau` of that plus tau times those of the kernels
that the layer starts from, which are static.

P is large; `stored.py` says how it is kept.
"""

import copy
import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from kernelwarehouse.assemble import hidden, native, winograd
from kernelwarehouse.assemble.blocks import kernel_chunks
from kernelwarehouse.assemble.branch import coefficients
from kernelwarehouse.assemble.build import panel_width
from kernelwarehouse.assemble.context import recorded
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.mixtures import grid
from kernelwarehouse.assemble.plain import apply_kernels, apply_static
from kernelwarehouse.assemble.rates import Rates
from kernelwarehouse.assemble.registry import BASES, BASIS, WINOGRAD_BASIS
from kernelwarehouse.assemble.stored import Stored, stored_bytes
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.attention import Attention

# Assembled numbers alive at once in the pure-PyTorch way, on a CPU.
_BLOCK = 2 << 20

# Samples from which on bases are kept in panels. Fewer leave more units unread, and gain less from the order.
_SEVERAL = 8


def suits_panels(cells: Tensor, geometry: Geometry, batch: float) -> bool:
    """Whether a basis is better kept in panels for batches of this size."""
    partition = geometry.partition
    if batch < _SEVERAL or partition.positions == 1 or native.obstacle(cells.detach(), geometry) is not None:
        return False
    return partition.cell_shape[0] % panel_width() == 0


def whole_bits(cells: Tensor, geometry: Geometry, compact: bool, panels: bool) -> int | None:
    """How many bits the numbers of a basis are kept in; none where they stay as they are.

    Compiled kernels alone put them together again on the way.
    """
    if native.obstacle(cells.detach(), geometry) is not None:
        return None
    return 16 if compact else None if panels else 24


@torch.no_grad()
def make_basis(attention: Attention, cells: Tensor, geometry: Geometry) -> Tensor:
    """P as `[out groups, positions * in groups, h + 1, *cell]`, the kernel of the constant last."""
    partition = geometry.partition
    weight, offset = copy.deepcopy(attention).double().affine()
    affine = torch.cat([weight, offset[..., None]], dim=2).permute(2, 0, 1)  # [h + 1, m, n], without the zero cell
    pairs = grid(affine, partition).permute(2, 1, 3, 0, 4)
    mixed = torch.matmul(pairs.to(cells.dtype), cells.flatten(1))  # [out groups, positions, in groups, h + 1, cell]
    return mixed.flatten(1, 2).unflatten(-1, partition.cell_shape)


@dataclass(eq=False)
class Prepared:
    """The basis of one layer, and what it was made from."""

    stored: Stored
    tau: float
    start_kernel: Tensor | None  # tau times the kernel that the layer starts from
    attention: Attention
    sources: tuple[Tensor | None, ...]
    versions: tuple[tuple[int, int], ...]
    # Kept alive: memory that `parameter.data = ...` frees could be given to its next values, under the same address.
    memory: tuple[Tensor | None, ...]
    stepped: bool = False  # an optimiser has changed a source since

    @staticmethod
    def of(
        attention: Attention, cells: Tensor, geometry: Geometry, bits: int | None = None, panels: bool = False
    ) -> "Prepared":
        tau, beta, start_kernel = attention.get_temperature(), attention.beta, None
        if tau > 0 and beta is not None:
            with torch.no_grad():
                pieces = torch.matmul(tau * beta.to(cells.dtype), cells.flatten(1))
                start_kernel = geometry.partition.join(pieces.unflatten(1, geometry.partition.cell_shape))
        stored = Stored.of(make_basis(attention, cells, geometry), bits, panels)
        sources = _sources(attention, cells)
        memory = tuple(None if source is None else source.detach() for source in sources)
        versions = tuple(map(_version, sources))
        prepared = Prepared(stored, tau, start_kernel, attention, sources, versions, memory)
        _watch_optimisers()
        _all_prepared.add(prepared)
        return prepared

    def fresh(self, attention: Attention, cells: Tensor) -> bool:
        """Whether the layer still holds the very tensors that the basis was made from, unchanged."""
        if self.stepped or attention is not self.attention:
            return False
        for tensor, source, (version, address) in zip(
            _sources(attention, cells), self.sources, self.versions, strict=True
        ):
            if tensor is not source:
                return False
            if tensor is not None and (tensor.data_ptr() != address or (version >= 0 and tensor._version != version)):
                return False
        return True

    def usable(self, x: Tensor, attention: Attention, cells: Tensor) -> bool:
        """Whether the basis gives what the layer computes for this input."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return False
        if recorded():
            return False  # a trace would keep the basis, and the size of this batch
        if x.dtype != cells.dtype or x.device != self.stored.numbers.device or x.numel() == 0:
            return False
        return self.fresh(attention, cells) and hidden.obstacle(attention) is None  # hooks may have come since

    def evaluate(self, x: Tensor, seen: Tensor, geometry: Geometry, way: str) -> Tensor:
        """The output of a layer without its bias, by one of `BASES`."""
        units, scale = coefficients(self.attention, seen)
        return self._mix(x, units, scale, geometry, way)

    def strategies(self, x: Tensor, geometry: Geometry) -> list[Strategy]:
        """Mixing from this basis as ways to evaluate a layer, to be timed beside the others."""

        def mixing(name: str) -> Strategy:
            return Strategy(
                name,
                lambda x, units, scale, _, geometry: self._mix(x, units, scale, geometry, name),
                None,
                mixing="basis",
            )

        return [mixing(name) for name in (BASES if winograd.obstacle(x, geometry) is None else [BASIS])]

    def _mix(self, x: Tensor, units: Tensor, scale: Tensor, geometry: Geometry, way: str) -> Tensor:
        scale = scale * (1 - self.tau)
        if way == WINOGRAD_BASIS and winograd.obstacle(x, geometry) is None:
            out = winograd.forward_basis(x, units, scale, self.stored, geometry)
        elif native.obstacle(x, geometry) is None:
            out = native.forward_basis(x, units, scale, self.stored, geometry)
        else:
            out = forward(x, units, scale, self.stored.basis(geometry), geometry)
        return out if self.start_kernel is None else out + apply_static(x, self.start_kernel, geometry)


def _sources(attention: Attention, cells: Tensor) -> tuple[Tensor | None, ...]:
    """What a basis is made from (a module's own look-up takes longer than what it finds)."""
    buffers, modules = attention._buffers, attention._modules
    logits = _own_parameters(modules["fc2"])
    common = cells, logits.get("weight"), logits.get("bias"), buffers["temperature"], buffers["beta"]
    if attention.shape.low_rank is None:
        return common
    return *common, _own_parameters(modules["basis"]).get("weight"), attention._parameters["offset"]


def _own_parameters(layer: nn.Module | None) -> Mapping[str, Tensor | None]:
    """Those of a plain linear layer; any other may compute its weights."""
    return layer._parameters if type(layer) is nn.Linear else {}


def _version(tensor: Tensor | None) -> tuple[int, int]:
    """How often a tensor has been changed in place (-1: made under inference_mode, not counted), and its memory."""
    if tensor is None:
        return 0, 0
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


_all_prepared: "weakref.WeakSet[Prepared]" = weakref.WeakSet()


@functools.cache
def _watch_optimisers() -> None:
    """Have every step of an optimiser looked at: fused ones change weights without counting a version."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimiser: Optimizer, args: object, kwargs: object) -> None:
    changed = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    for prepared in _all_prepared:
        prepared.stepped = prepared.stepped or any(id(source) in changed for source in prepared.sources)


def forward(x: Tensor, units: Tensor, scale: Tensor, basis: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias and without what it starts from; mixed and applied in pure PyTorch."""
    partition = geometry.partition
    # [out groups, positions, in groups, h + 1, cell]
    flat = basis.flatten(3).unflatten(1, (partition.positions, partition.in_groups))
    pieces = []
    for chunk in kernel_chunks(x, partition, _BLOCK):
        mixed = torch.matmul(units[chunk], flat).permute(3, 1, 0, 2, 4).flatten(1, 3) * scale[chunk].unsqueeze(-1)
        pieces.append(apply_kernels(x[chunk], partition.join(mixed.unflatten(2, partition.cell_shape)), geometry))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


# Mixtures up to which a product counts as one of few rows.
_FEW_MIXTURES = 64


def saved_seconds(batch: int, attention: Attention, geometry: Geometry, rates: Rates, bits: int | None) -> float:
    """Estimate of the time that mixing through the hidden vector saves for one batch."""
    partition = geometry.partition
    kernel, cells, units = partition.mixtures * partition.cell_size, attention.shape.cells, attention.shape.units
    speed = rates.products if batch * partition.mixtures > _FEW_MIXTURES else rates.few_products
    plain = max(batch * cells * kernel / speed, cells * partition.cell_size / rates.reads)
    # A ReLU leaves about half of the units at 0; those are skipped where no sample of the batch has them.
    read = (1 - 0.5 ** min(batch, 16)) * (bits or 32) / 32
    mixed = max(batch * units * kernel / rates.products, read * units * kernel / rates.reads)
    return plain - mixed


def pays_back(
    batch: int, attention: Attention, cells: Tensor, geometry: Geometry, rates: Rates, bits: int | None
) -> float:
    """Seconds saved for every byte kept; not positive where a basis does not pay or cannot be made."""
    small = math.prod(geometry.partition.kernel_shape) < 1024
    heads = [attention.fc2] if attention.shape.low_rank is None else [attention.fc2, attention.basis]
    # The weights of any other kind of layer may be computed, and then no tensor tells when they change.
    computed = any(type(head) is not nn.Linear for head in heads)
    if small or computed or hidden.obstacle(attention) is not None:
        return 0.0
    saved = saved_seconds(batch, attention, geometry, rates, bits)
    return saved / stored_bytes(cells, geometry, attention.shape.units, bits)

"""What the kernel sees at every place, laid out as a matrix, and one batched product with it.

Mixing gives the kernels in the order of that product, `[samples, positions * in, out]`, because rows of attentions and
numbers of cells are put in order before: they are small, the kernels of a batch are not, and are read and written once.
Sums over kernel positions are sums of one product, which libraries take in float32. This is a handful of launches,
whatever the kernel, and pays where windows are small beside kernels: on small maps, on a GPU.

Layers of several groups of output channels take a product for each. The gradient of the input is the same computation
the other way round: windows of the output's gradient, and kernels turned around. With a stride, where most numbers of
such windows would be zeros, gradients of windows are added up position by position instead.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelwarehouse.assemble.blocks import block_size, chunks
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last, matrices, new_images, with_padding, write_product
from kernelwarehouse.assemble.mixtures import grid
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.sums import add_product, new_sum
from kernelwarehouse.partition import Partition
from kernelwarehouse.shared_gradient import sum_dtype


@lru_cache(maxsize=1024)
def geometry_obstacle(geometry: Geometry) -> str | None:
    """Why a layer is not a product with windows, or nothing."""
    return None if geometry.groups == 1 else f"it has {geometry.groups} groups"


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """The same for any input."""
    return geometry_obstacle(geometry)


@dataclass(frozen=True)
class _Sliding:
    """How windows move over an image that is padded already."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def _windows(padded: Tensor, sliding: _Sliding, partition: Partition, channels: int, last: bool) -> Tensor:
    """`[batch, channels, *space]` -> `[batch, kernel positions * channels, places]`, in the order of mixed kernels.

    That is: positions that are pieces of their own, groups of `channels` channels, positions inside a cell, channels.
    """
    seen, axes = padded, len(sliding.kernel)
    for axis, (size, stride, dilation) in enumerate(zip(sliding.kernel, sliding.stride, sliding.dilation, strict=True)):
        seen = seen.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    seen = seen.unflatten(1, (-1, channels))  # [batch, groups, channels, *places, *kernel]
    places, kernel = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
    apart = [axis for axis, count in zip(kernel, partition.counts[2:], strict=True) if count > 1]
    inside = [axis for axis in kernel if axis not in apart]
    inner = [*apart, 1, *inside, 2]
    if last:
        return seen.permute(0, *places, *inner).flatten(1, axes).flatten(2).transpose(1, 2)
    return seen.permute(0, *inner, *places).flatten(1, axes + 2).flatten(2)


@dataclass(frozen=True)
class _Mixing:
    """Rows of attentions and cells, such that their product is kernels in order.

    `rows[group]` is `[batch, rows of a sample, n]` and `cells` is `[n, numbers]`, the last `width` of which go along
    the channels that the product gives.
    """

    rows: Tensor
    cells: Tensor
    width: int

    @property
    def numbers(self) -> int:
        """Of a sample's kernels, of one group."""
        return self.rows.shape[2] * self.cells.shape[1]

    def kernels(self, chunk: slice) -> Tensor:
        """`[groups, samples, what is summed over, width]`."""
        rows = self.rows[:, chunk]
        return torch.mm(rows.flatten(0, 2), self.cells).view(*rows.shape[:2], -1, self.width)


def _forward_mixing(attention: Tensor, cells: Tensor, partition: Partition) -> _Mixing:
    """Kernels `[samples, positions * in, cell out]` for every group of outputs."""
    rows = grid(attention, partition).permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()
    numbers = cells.reshape(*cells.shape[:3], -1).permute(0, 3, 2, 1).reshape(len(cells), -1)
    return _Mixing(rows, numbers, partition.cell_shape[0])


def _turned_mixing(attention: Tensor, cells: Tensor, partition: Partition) -> _Mixing:
    """Kernels `[samples, positions * out, cell in]` for every group of inputs, their positions from last to first."""
    rows = grid(attention, partition).flip(1).permute(3, 0, 1, 2, 4).flatten(2, 3).contiguous()
    numbers = cells.reshape(*cells.shape[:3], -1)
    if numbers.shape[3] > 1:
        numbers = numbers.flip(3).permute(0, 3, 1, 2)
    return _Mixing(rows, numbers.reshape(len(cells), -1), partition.cell_shape[1])


def _chunks(batch: int, mixing: _Mixing, places: int, device: torch.device) -> list[slice]:
    """Slices of the batch whose kernels fit a block, and whose windows do."""
    windows = mixing.numbers // mixing.width * places
    return chunks(batch, max(len(mixing.rows) * mixing.numbers, windows), block_size(device))


def _product(padded: Tensor, sliding: _Sliding, mixing: _Mixing, out: Tensor, partition: Partition) -> Tensor:
    """`out` (a stack of matrices), computed from an image that is padded already."""
    last, channels = out.stride(2) != 1, mixing.cells.shape[1] // mixing.width // _inside(partition)
    for chunk in _chunks(len(out), mixing, out.shape[2], out.device):
        seen = _windows(padded[chunk], sliding, partition, channels, last)
        for part, kernels in zip(out[chunk].split(mixing.width, dim=1), mixing.kernels(chunk), strict=True):
            write_product(part, kernels.transpose(1, 2), seen)
    return out


def _inside(partition: Partition) -> int:
    """Positions inside a cell."""
    return math.prod(partition.cell_shape[2:])


class _Layer:
    """The input of a layer as an image (the tokens of a linear layer are one with channels last), and its output."""

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        self.geometry, self.linear = geometry, geometry.spatial_axes == 0
        self.x = x.transpose(1, 2) if self.linear else x
        self.last = self.linear or channels_last(x)
        space = tuple(self.x.shape[2:])
        self.out_size = space if self.linear else geometry.output_size(space)
        # Tokens are places that a kernel of one position slides over.
        self.sliding = (
            _Sliding((1,), (1,), (1,))
            if self.linear
            else _Sliding(geometry.kernel_size, geometry.stride, geometry.dilation)
        )
        shape = geometry.partition.kernel_shape, geometry.partition.cell_shape
        self.partition = Partition((*shape[0], 1), (*shape[1], 1)) if self.linear else geometry.partition

    @property
    def flat(self) -> bool:
        """Whether the only kernel position visits every place of the input, and none around it."""
        return math.prod(self.sliding.kernel) == max(self.sliding.stride) == 1 and not any(self.geometry.padding)

    def spread(self, grad: Tensor) -> Tensor:
        """The gradient of the output so padded that windows of it at every place of the input are what flows there."""
        geometry, edges = self.geometry, []
        if self.linear:
            return grad
        reach = [step * (size - 1) for step, size in zip(geometry.dilation, geometry.kernel_size, strict=True)]
        for axis in range(geometry.spatial_axes - 1, -1, -1):
            before = reach[axis] - geometry.padding[axis]
            edges += [before, self.x.shape[2 + axis] + reach[axis] - before - grad.shape[2 + axis]]
        return F.pad(grad, edges) if any(edges) else grad

    def image(self, grad: Tensor) -> Tensor:
        """The gradient of the output, lying as the input does."""
        grad = grad.transpose(1, 2) if self.linear else grad
        return matrices(grad, self.last).unflatten(2, self.out_size)


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, channels last where the input is."""
    layer = _Layer(x, geometry)
    mixing = _forward_mixing(attention, cells, layer.partition)
    out = new_images(layer.x, geometry.out_channels, layer.out_size, layer.last)
    _product(with_padding(layer.x, layer.geometry), layer.sliding, mixing, out.flatten(2), layer.partition)
    return out.transpose(1, 2) if layer.linear else out


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; each chunk's kernels are mixed again."""
    layer = _Layer(x, geometry)
    grad = layer.image(grad)
    mixing = _forward_mixing(attention, cells, layer.partition)
    grad_mixing = _mixing_gradient(grad, attention, cells, mixing, layer)
    if not wants_input:
        return None, *grad_mixing
    if max(layer.sliding.stride) > 1:
        return _folded(grad, mixing, layer), *grad_mixing
    grad_x = new_images(layer.x, layer.x.shape[1], tuple(layer.x.shape[2:]), layer.last)
    if layer.flat and len(mixing.rows) == 1:  # the kernels of forward are in order for this product too
        for chunk in _chunks(len(grad), mixing, 0, grad.device):
            write_product(grad_x.flatten(2)[chunk], mixing.kernels(chunk)[0], grad.flatten(2)[chunk])
    else:
        turned = _turned_mixing(attention, cells, layer.partition)
        _product(layer.spread(grad), layer.sliding, turned, grad_x.flatten(2), layer.partition)
    return grad_x.transpose(1, 2) if layer.linear else grad_x, *grad_mixing


def _folded(grad: Tensor, mixing: _Mixing, layer: _Layer) -> Tensor:
    """The gradient of the input as a sum over the kernel's positions."""
    geometry, partition, stack = layer.geometry, layer.partition, grad.flatten(2)
    wide, several = sum_dtype(grad.dtype), partition.out_groups > 1
    like = grad.new_empty(len(grad), 0, dtype=wide if several else grad.dtype)
    grad_windows = new_images(like, mixing.numbers // mixing.width, layer.out_size, layer.last)
    for chunk in _chunks(len(grad), mixing, 0, grad.device):
        flowing, parts = grad_windows.flatten(2)[chunk], stack[chunk].split(mixing.width, dim=1)
        for group, (kernels, part) in enumerate(zip(mixing.kernels(chunk), parts, strict=True)):
            if layer.last:
                add_product(flowing.transpose(1, 2), part.transpose(1, 2), kernels.transpose(1, 2), first=group == 0)
            else:
                add_product(flowing, kernels, part, first=group == 0)
    seen = grad_windows.unflatten(
        1, (partition.positions, partition.in_groups, _inside(partition), partition.cell_shape[1])
    )
    space = tuple(size + 2 * pad for size, pad in zip(layer.x.shape[2:], geometry.padding, strict=True))
    total = new_images(like.to(wide), layer.x.shape[1], space, layer.last).zero_()
    groups = total.unflatten(1, (partition.in_groups, -1))
    for tap in geometry.taps:
        place = (slice(None), slice(None), slice(None), *geometry.window(tap, layer.out_size))
        groups[place].add_(seen[:, tap.position, :, tap.inner])
    inside = F.pad(total, [-edge for edge in geometry.edges]).to(grad.dtype)
    return matrices(inside, layer.last).unflatten(2, layer.x.shape[2:])


def _mixing_gradient(
    grad: Tensor, attention: Tensor, cells: Tensor, mixing: _Mixing, layer: _Layer
) -> tuple[Tensor, Tensor]:
    """Of attentions and cells, for the gradient of the output."""
    partition, padded, stack = layer.partition, with_padding(layer.x, layer.geometry), grad.flatten(2)
    grad_rows, grad_cells = torch.empty_like(mixing.rows), new_sum(mixing.cells)
    for chunk in _chunks(len(grad), mixing, stack.shape[2], grad.device):
        seen = _windows(padded[chunk], layer.sliding, partition, partition.cell_shape[1], layer.last)
        grad_kernels = seen.new_empty(partition.out_groups, *seen.shape[:2], mixing.width)
        for place, part in zip(grad_kernels, stack[chunk].split(mixing.width, dim=1), strict=True):
            torch.bmm(seen, part.transpose(1, 2), out=place)
        flat, rows = grad_kernels.view(-1, mixing.cells.shape[1]), mixing.rows[:, chunk]
        grad_rows[:, chunk] = (flat @ mixing.cells.t()).view(rows.shape)
        add_product(grad_cells, rows.flatten(0, 2).t(), flat)
    shape = partition.out_groups, len(grad), partition.positions, partition.in_groups, -1
    grad_attention = grad_rows.view(shape).permute(1, 2, 0, 3, 4).reshape(attention.shape)
    numbers = grad_cells.to(cells.dtype).view(len(cells), -1, partition.cell_shape[1], partition.cell_shape[0])
    return grad_attention, numbers.permute(0, 3, 2, 1).reshape(cells.shape)


STRATEGY = Strategy("windows", forward, backward, obstacle)

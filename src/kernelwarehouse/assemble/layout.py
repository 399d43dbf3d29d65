"""Images as stacks of matrices `[batch, channels, positions]` that lie in memory as the input does.

Where channels come last in memory, they do so in everything that is made of it: a transposed matrix is as good to a
product, and nobody copies an image into another order and back.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelwarehouse.assemble.geometry import Geometry


def channels_last(x: Tensor) -> bool:
    """Whether the channels of `[batch, channels, *space]` come last in memory, or are the neighbouring ones of more."""
    if x.dim() <= 2 or x.is_contiguous():
        return False
    if x.movedim(1, -1).is_contiguous():
        return True
    reach = 1  # of all axes that come later in memory, which a step of the next one must not fall short of
    for axis in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(axis) < reach:
            return False
        reach = x.stride(axis) * x.shape[axis]
    return x.shape[1] > 1 and x.stride(1) == 1


def laid_out(images: Tensor, last: bool) -> Tensor:
    """The same images, in memory as told."""
    return images.movedim(1, -1).contiguous().movedim(-1, 1) if last else images.contiguous()


def matrices(x: Tensor, last: bool) -> Tensor:
    """`[batch, channels, *space]` as a stack of matrices; copied where it does not lie so."""
    if last:
        return x.movedim(1, -1).contiguous().flatten(1, -2).transpose(1, 2)
    return x.contiguous().flatten(2)


def with_padding(x: Tensor, geometry: Geometry) -> Tensor:
    """The input with the zeros around it that the kernel slides over."""
    return F.pad(x, geometry.edges) if any(geometry.edges) else x


def visited(x: Tensor, geometry: Geometry) -> Tensor:
    """The places that a kernel of one position visits."""
    if max(geometry.stride) == 1:
        return x
    return x[(slice(None), slice(None), *(slice(None, None, stride) for stride in geometry.stride))]


def new_images(like: Tensor, channels: int, space: tuple[int, ...], last: bool) -> Tensor:
    """Memory for `[batch, channels, *space]`."""
    if last:
        return like.new_empty(like.shape[0], *space, channels).movedim(-1, 1)
    return like.new_empty(like.shape[0], channels, *space)


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """`out = left @ right` for stacks of matrices, in whichever order `out` has memory."""
    if out.stride(2) == 1:
        torch.bmm(left, right, out=out)
    else:
        torch.bmm(right.transpose(1, 2), left.transpose(1, 2), out=out.transpose(1, 2))

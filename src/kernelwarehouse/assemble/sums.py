"""Sums of products over chunks and kernel positions, in a type that does not lose what is small."""

import torch
from torch import Tensor

from kernelwarehouse.shared_gradient import sum_dtype


def new_sum(like: Tensor) -> Tensor:
    """Zeros to add up in."""
    return torch.zeros_like(like, dtype=sum_dtype(like.dtype))


def sum_from(total: Tensor | None, like: Tensor) -> Tensor:
    """What there is already, to add to in its place, or zeros."""
    return new_sum(like) if total is None else total.view(like.shape)


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool = False) -> None:
    """`total += left @ right` of matrices or of stacks of them; the first is put there, whatever there was."""
    if total.dtype == left.dtype:
        add = total.addmm_ if total.dim() == 2 else total.baddbmm_
        add(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right

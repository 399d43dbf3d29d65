"""Sums of products over chunks and kernel positions, in a type that does not lose what is small."""

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers are added up in: float32 where they have half its precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def new_sum(like: Tensor) -> Tensor:
    """Zeros to add up in."""
    return torch.zeros_like(like, dtype=sum_dtype(like.dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool = False) -> None:
    """`total += left @ right` of matrices or of stacks of them; the first is put there, whatever there was."""
    if total.dtype == left.dtype:
        add = total.addmm_ if total.dim() == 2 else total.baddbmm_
        add(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right

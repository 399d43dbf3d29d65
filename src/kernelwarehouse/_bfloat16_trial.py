"""Products in bfloat16 of the kinds that networks need, forward and backward: a script that ends well, raises or dies.

It has a process to itself (see `_bfloat16.py`) and so imports torch only. Gradients are asked for without autograd,
which does not work in a fork of a process that has used it.
"""

import contextlib

import torch
from torch.nn import functional as F


def leave_no_core() -> None:
    """Files with the memory of processes that die are a thing of Unix, and so is this module."""
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def convolve(images: torch.Tensor, kernels: torch.Tensor, groups: int) -> None:
    out = F.conv2d(images, kernels, padding=1, groups=groups)
    pair = [1, 1]
    torch.ops.aten.convolution_backward(
        out, images, kernels, None, pair, pair, pair, False, [0, 0], groups, [True, True, False]
    )


@torch.no_grad()
def main() -> None:
    leave_no_core()
    for size in (16, 64, 128):  # libraries take small and large products different ways
        F.linear(draw(size, size), draw(size, size), draw(size))
        torch.mm(draw(size, size), draw(size, size))
        torch.bmm(draw(4, size, size), draw(4, size, size))
    for channels, groups in ((3, 1), (64, 1), (64, 4), (64, 64)):
        convolve(draw(2, channels, 14, 14), draw(64, channels // groups, 3, 3), groups)


if __name__ == "__main__":
    main()

"""Places of a kernel that meet nothing but padding: their gradient is 0, whatever a library leaves there."""

import pytest
import torch
from layer_cases import DEVICE, Case, errors, exact_gradients, gradients

from kernelwarehouse.assemble import Geometry
from kernelwarehouse.assemble.geometry import looks_at_padding_alone
from kernelwarehouse.partition import Partition


def _sliding(stride: int, padding: int, dilation: int = 1) -> Geometry:
    return Geometry(Partition((16, 16, 3, 3), (16, 16, 1, 1)), (stride,) * 2, (padding,) * 2, (dilation,) * 2)


@pytest.mark.parametrize(
    ("geometry", "space", "places"),
    [
        (_sliding(1, 1), (5, 5), ()),
        (_sliding(2, 1), (1, 1), ((0, 0), (0, 2), (1, 0), (1, 2))),
        (_sliding(2, 1), (2, 5), ((0, 0),)),
        (_sliding(1, 2, 2), (2, 2), ((0, 0), (0, 2), (1, 0), (1, 2))),
        (_sliding(1, 2, 2), (3, 3), ()),
        (_sliding(1, 0), (3, 3), ()),
    ],
)
def test_places_that_meet_padding_alone(
    geometry: Geometry, space: tuple[int, int], places: tuple[tuple[int, int], ...]
) -> None:
    assert looks_at_padding_alone(geometry, space) == places
    # The definition: a kernel of these places alone gives 0.
    kernel = torch.zeros(1, 1, 3, 3)
    for axis, place in places:
        kernel.select(2 + axis, place).fill_(1.0)
    out = torch.conv2d(torch.ones(1, 1, *space), kernel, None, geometry.stride, geometry.padding, geometry.dilation)
    assert out.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["grouped", "matmul", "windows"])
def test_nothing_that_lay_in_memory_becomes_a_gradient(way: str, dtype: torch.dtype) -> None:
    geometry = _sliding(2, 1)
    tensors = Case(geometry, 16, 28, (1, 1), seed=0).tensors(dtype)
    exact = exact_gradients(*tensors, geometry)
    for _ in range(3):
        lay = [torch.full((size,), torch.nan, dtype=dtype, device=DEVICE) for size in (256, 4096, 36_864, 65_536)]
        del lay
        out, grads = gradients(way, *tensors, geometry)
        assert all(error <= 2e-2 for error in errors((out, *grads), (exact[0], *exact[1])))

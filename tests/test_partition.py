import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernelwarehouse as kw
from kernelwarehouse.partition import Partition


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    axes = draw(st.integers(0, 3))
    cell = [draw(st.integers(1, 4)) for _ in range(2)]
    kernel = [size * draw(st.integers(1, 4)) for size in cell]
    for _ in range(axes):
        size = draw(st.integers(1, 3))
        kernel.append(size)
        cell.append(draw(st.sampled_from([1, size])))
    return Partition(tuple(kernel), tuple(cell))


@given(partitions())
def test_join_undoes_split(partition: Partition) -> None:
    kernel = torch.randn(partition.kernel_shape)
    pieces = partition.split(kernel)
    assert pieces.shape == (partition.mixtures, *partition.cell_shape)
    assert torch.equal(partition.join(pieces), kernel)
    batch = torch.stack([pieces, 2 * pieces])
    assert torch.equal(partition.join(batch), torch.stack([kernel, 2 * kernel]))


def test_pieces_run_over_space_then_output_then_input() -> None:
    partition = Partition((6, 8, 3, 2), (2, 4, 1, 1))
    kernel = torch.randn(partition.kernel_shape)
    pieces = partition.split(kernel)
    positions, out_groups, in_groups = partition.positions, partition.out_groups, partition.in_groups
    assert (positions, out_groups, in_groups) == (6, 3, 2)
    for index in range(partition.mixtures):
        s, o, g = index // (out_groups * in_groups), index // in_groups % out_groups, index % in_groups
        expected = kernel[2 * o : 2 * o + 2, 4 * g : 4 * g + 4, s // 2, s % 2]
        assert torch.equal(pieces[index, :, :, 0, 0], expected)


@pytest.mark.parametrize(
    ("kernel", "cell"),
    [((6, 4), (4, 4)), ((6, 4), (6, 0)), ((6, 4, 4), (6, 4, 2)), ((6, 4, 3), (6, 4)), ((6,), (6,))],
)
def test_impossible_cuts_are_refused(kernel: tuple[int, ...], cell: tuple[int, ...]) -> None:
    with pytest.raises(kw.PlanError):
        Partition(kernel, cell)


def test_split_refuses_another_kernel() -> None:
    with pytest.raises(kw.PlanError, match=r"\(4, 6\)"):
        Partition((6, 4), (3, 2)).split(torch.zeros(4, 6))

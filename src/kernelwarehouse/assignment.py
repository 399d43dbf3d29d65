"""Which cells a mixture starts from: the paper's beta.

A warehouse has `n` cells for the mixtures of all its layers, numbered through in layer order. Every strategy gives
each mixture a run of consecutive cells (possibly none, which is the zero cell), so an assignment is a list of ranges.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernelwarehouse.config import Start

CellRanges = list[range]
"""For every mixture of a layer, the cells it starts from."""


def claimed_cells(mixtures: Sequence[int], cells: int) -> list[range]:
    """The cells that each layer claims: consecutive, every cell once, spread evenly by the layers' mixtures."""
    total = sum(mixtures)
    ends = [0]
    covered = 0
    for count in mixtures:
        covered += count
        ends.append(covered * cells // total)
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def start_cells(start: Start, mixtures: Sequence[int], cells: int) -> list[CellRanges]:
    """Per layer and mixture, the cells with beta = 1."""
    total = sum(mixtures)
    if start == "one_to_one" and cells < total:
        claims = claimed_cells(mixtures, cells)
        return [_diagonal(count, claim) for count, claim in zip(mixtures, claims, strict=True)]
    ranges: list[CellRanges] = []
    first = 0
    for count in mixtures:
        ranges.append([_numbered(start, first + index, cells, total) for index in range(count)])
        first += count
    return ranges


def _numbered(start: Start, mixture: int, cells: int, total: int) -> range:
    """The range of one mixture where it depends on its number in the warehouse alone."""
    first = mixture * cells // total
    match start:
        case "one_to_one" | "one_to_many":
            return range(first, first + 1)
        case "many_to_one":
            return range(first, max((mixture + 1) * cells // total, first + 1))
        case "all_to_one":
            return range(cells)
        case "none":
            return range(0)


def _diagonal(mixtures: int, claim: range) -> CellRanges:
    """Fewer cells than mixtures: cut the mixtures into as many runs as there are cells; run q gives its cell to its
    (q mod length)-th mixture, the others start from the zero cell.

    With equal runs of length r this is the rule `i % r == (i // r) % r`, a convolution with r groups.
    """
    ranges = [range(0)] * mixtures
    for run, cell in enumerate(claim):
        first = run * mixtures // len(claim)
        length = (run + 1) * mixtures // len(claim) - first
        ranges[first + run % length] = range(cell, cell + 1)
    return ranges


def beta(ranges: CellRanges, cells: int) -> Tensor:
    """The binary matrix `[mixtures, cells]` of a layer."""
    # With memory, whatever torch's default device is: an attention on the device meta can still be given its start.
    matrix = torch.zeros(len(ranges), cells, dtype=torch.bool, device="cpu")
    for mixture, run in enumerate(ranges):
        matrix[mixture, run.start : run.stop] = True
    return matrix

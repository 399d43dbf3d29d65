"""The compiled operators, called as they are, compute what the plain definition computes; at every width of vectors.

Cells of 8, 16, 24 and 40 channels end in tiles of every kind: full ones, one vector of each width, a few rows.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compiled_kernels import COMPILED, LEVEL2
from kernelwarehouse.assemble.build import panel_width
from kernelwarehouse.assemble.stored import Stored, make_panels

pytestmark = pytest.mark.skipif(not COMPILED, reason="there are no compiled kernels")

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shape:
    """A layer of `groups` out x in cells of `cell` channels, of which there are n."""

    cell: tuple[int, int]
    n: int
    batch: int = 2
    groups: tuple[int, int] = (1, 1)
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    padding: int = 1
    space: tuple[int, int] = (5, 6)

    @property
    def segments(self) -> int:
        return self.kernel**2 * self.groups[1]

    @property
    def tolerance(self) -> float:
        """Of the largest number. Long sums, which shapes made for large caches have, are rounded more often."""
        return 1e-5 * max(1.0, math.sqrt(self.segments * self.cell[1] / 2**14))

    def mixing(self) -> tuple[Tensor, Tensor]:
        """Attentions and cells, as the operators want them."""
        return _random(self.batch, self.groups[0], self.segments, self.n), _random(self.n, *self.cell)

    def x(self) -> Tensor:
        return _random(self.batch, self.groups[1] * self.cell[1], *self.space)

    def tables(self) -> tuple[Tensor, int, Tensor, Tensor]:
        """Targets, padded places, places and shifts (see csrc/ops.cpp)."""
        height, width = (size + 2 * self.padding for size in self.space)
        grid = torch.arange(height * width).view(height, width)
        reach = self.dilation * (self.kernel - 1)
        inside = grid[self.padding : height - self.padding, self.padding : width - self.padding]
        starts = grid[: height - reach : self.stride, : width - reach : self.stride]
        shifts = grid[: reach + 1 : self.dilation, : reach + 1 : self.dilation]
        return inside.flatten(), grid.numel(), starts.flatten(), shifts.flatten()

    def plain(self, x: Tensor, kernels: Tensor) -> Tensor:
        """Outputs for kernels `[batch, out groups, segments, cell out, cell in]`."""
        (out_groups, in_groups), (cell_out, cell_in) = self.groups, self.cell
        parts = kernels.view(self.batch, out_groups, self.kernel, self.kernel, in_groups, cell_out, cell_in)
        whole = parts.permute(0, 1, 5, 4, 6, 2, 3).reshape(
            self.batch, out_groups * cell_out, in_groups * cell_in, self.kernel, self.kernel
        )
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return torch.stack([F.conv2d(sample, kernel, **options) for sample, kernel in zip(x, whole, strict=True)])


SHAPES = [
    Shape((8, 8), 1),
    Shape((16, 8), 3, batch=1),
    Shape((24, 16), 7, groups=(2, 1), stride=2),
    Shape((40, 24), 20, groups=(1, 2), dilation=2, padding=2),
    Shape((8, 40), 33, batch=5, groups=(2, 2), padding=0),
    Shape((64, 32), 18, batch=17, space=(7, 7)),
    Shape((16, 16), 9, batch=3, stride=3, padding=2, space=(9, 4)),
    Shape((32, 48), 5, batch=4, kernel=2, padding=0),
    # Cells that are mixed for some of the input channels at a time, as 16 channels of all of them overflow the cache.
    Shape((48, 256), LEVEL2 // (16 * 256) + 1, batch=4, space=(4, 4)),
    Shape((24, 24), 11, batch=1, kernel=1, padding=0, space=(7, 7)),
    Shape((40, 8), 4, batch=9, kernel=1, padding=0, groups=(2, 3), space=(4, 4)),
    Shape((16, 40), 25, batch=19, kernel=1, padding=0, groups=(1, 2), space=(1, 1)),
    Shape((128, 64), 30, batch=2, kernel=1, padding=0, space=(9, 9)),
    Shape((16, 24), 12, batch=34, space=(5, 5)),  # so many samples that bases are packed
    Shape((440, 8), 6, batch=2, kernel=1, padding=0, space=(3, 3)),  # several blocks of output channels
    # Lines that are read in several pieces, first some of them and then the rest.
    Shape((96, 512), 8, batch=1, kernel=1, padding=0, space=(3, 3)),
    # Kernels that are small beside their images: tiles across cells, pieces of the image, of which the last is shorter.
    Shape((8, 16), 34, batch=3, kernel=1, padding=0, groups=(3, 2), space=(30, 37)),
    Shape((8, 8), 5, batch=1, kernel=1, padding=0, groups=(6, 6), space=(20, 21)),
    Shape((16, 8), 9, batch=34, kernel=1, padding=0, groups=(1, 2), space=(8, 4)),
    Shape((8, 8), 4, kernel=1, padding=0, space=(3, 5)),  # a wide panel that is not full, at either width
    Shape((16, 8), 4, kernel=1, padding=0, space=(1, 59)),
]
POINTWISE = [shape for shape in SHAPES if shape.kernel == 1]
# Images in several parts, of which the last ends within a vector; parts of a batch; kernels in several blocks.
PLANES = [
    *(shape for shape in POINTWISE if shape.stride == 1),
    Shape((8, 8), 3, kernel=1, padding=0, groups=(2, 1), space=(1, LEVEL2 // 32 + 37)),
    Shape((24, 16), 3, kernel=1, padding=0, groups=(1, 2), space=(LEVEL2 // 2560, 45)),
    Shape((8, 8), 5, batch=13, kernel=1, padding=0, groups=(6, 6), space=(5, 7)),
    Shape((128, 64), 30, batch=200, kernel=1, padding=0, space=(2, 2)),
    Shape((16, LEVEL2 // 1024 + 72), 3, batch=200, kernel=1, padding=0, space=(1, 11)),
    Shape((16, LEVEL2 // 1024 + 72), 3, batch=50, kernel=1, padding=0, groups=(2, 2), space=(3, 7)),
]
# For Winograd's transform, with sizes that follow the cache which work is cut to: images in strips, of which the last
# may be shorter; kernels of which some input channels are transformed at a time, and the sums of several strips wait
# for the others; blocks of channels of which the last is narrower; several runs of pairs; several parts of a batch.
SQUARE = [
    *(shape for shape in SHAPES if (shape.kernel, shape.stride, shape.dilation) == (3, 1, 1)),
    Shape((64, 64), 6, space=(57, 40)),
    Shape((64, 64), 6, batch=5, space=(57, 40)),  # samples of which a cache holds few: in parts, of each thread's own
    Shape((160, 16), 5, batch=13, groups=(2, 2), space=(4, 4)),
    Shape((16, 16), 3, space=(LEVEL2 // 4096 - 3, 28)),
    Shape((80, 256), 40, groups=(2, 1), space=(7, 9)),
    Shape((64, LEVEL2 // 1024), 3, space=(LEVEL2 // 4096 - 3, 14)),
    Shape((64, LEVEL2 // 2048 + 72), 3, batch=1, space=(4, 3)),
    Shape((72, 512), 4, batch=17, groups=(1, 4), space=(3, 3)),
    Shape((8, LEVEL2 // 64), 3, space=(40, 40)),
    Shape((24, 64), 40, batch=36, space=(3, 2)),  # bases are packed, for some input channels at a time
    Shape((16, 8), 6, batch=34, groups=(3, 2), space=(2, 2)),
    Shape((40, 24), 7, groups=(1, 2), padding=2, space=(1, 3)),
    Shape((8, LEVEL2 // 32), 3, batch=1, padding=0, space=(3, 4)),
]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape)


def _ops() -> Any:
    return torch.ops.kernelwarehouse


def _assert_close(got: Tensor, exact: Tensor, tolerance: float) -> None:
    assert got.shape == exact.shape
    assert (got.double() - exact).abs().max().item() <= tolerance * exact.abs().max().item()


def _doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def _mixed(attention: Tensor, cells: Tensor) -> Tensor:
    return torch.einsum("bgsn,noc->bgsoc", attention, cells)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs(shape: Shape, channels_last: bool) -> None:
    x, (attention, cells) = shape.x(), shape.mixing()
    exact = shape.plain(x.double(), _mixed(attention.double(), cells.double())).flatten(2)
    given = x.flatten(2).transpose(1, 2).contiguous() if channels_last else x.flatten(2)
    got = _ops().forward_taps(given, attention, cells, *shape.tables(), channels_last)
    _assert_close(got.transpose(1, 2) if channels_last else got, exact, shape.tolerance)


@pytest.mark.parametrize("wants_input", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: Shape, wants_input: bool) -> None:
    x, (attention, cells) = shape.x(), shape.mixing()
    leaves = _doubles(x, attention, cells)
    out = shape.plain(leaves[0], _mixed(*leaves[1:]))
    grad = _random(*out.shape)
    exact = torch.autograd.grad(out, leaves, grad.double())
    given = grad.flatten(2), x.flatten(2), attention, cells, *shape.tables(), shape.stride == 1, wants_input
    got = _ops().backward_taps(*given)
    if wants_input:
        _assert_close(got[0].view(x.shape), exact[0], shape.tolerance)
    _assert_close(got[1], exact[1], shape.tolerance)
    _assert_close(got[2], exact[2], shape.tolerance)
    total = torch.ones_like(cells)
    assert _ops().backward_taps(*given, total)[2] is None  # what is added to is not handed back
    _assert_close(total, exact[2] + 1, shape.tolerance)


@pytest.mark.parametrize("shape", SQUARE, ids=str)
def test_outputs_by_winograd(shape: Shape) -> None:
    x, (attention, cells), padding = shape.x(), shape.mixing(), (shape.padding, shape.padding)
    exact = shape.plain(x.double(), _mixed(attention.double(), cells.double()))
    _assert_close(_ops().forward_winograd(x, attention, cells, padding, False), exact, shape.tolerance)
    last = _ops().forward_winograd(x.permute(0, 2, 3, 1).contiguous(), attention, cells, padding, True)
    _assert_close(last.permute(0, 3, 1, 2), exact, shape.tolerance)


@pytest.mark.parametrize("shape", SQUARE, ids=str)
def test_gradients_by_winograd(shape: Shape) -> None:
    x, (attention, cells), padding = shape.x(), shape.mixing(), (shape.padding, shape.padding)
    leaves = _doubles(x, attention, cells)
    out = shape.plain(leaves[0], _mixed(*leaves[1:]))
    grad = _random(*out.shape)
    exact = torch.autograd.grad(out, leaves, grad.double())
    for wants_input in (False, True):  # one after the other: the exact gradients take the longest, and are the same
        got = _ops().backward_winograd(grad, x, attention, cells, padding, wants_input)
        if wants_input:
            _assert_close(got[0], exact[0], shape.tolerance)
        _assert_close(got[1], exact[1], shape.tolerance)
        _assert_close(got[2], exact[2], shape.tolerance)
        total = torch.ones_like(cells)
        assert _ops().backward_winograd(grad, x, attention, cells, padding, wants_input, total)[2] is None
        _assert_close(total, exact[2] + 1, shape.tolerance)


@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_gradients_by_planes(shape: Shape) -> None:
    x, (attention, cells) = shape.x(), shape.mixing()
    leaves = _doubles(x, attention, cells)
    out = shape.plain(leaves[0], _mixed(*leaves[1:]))
    grad = _random(*out.shape)
    exact = torch.autograd.grad(out, leaves, grad.double())
    for wants_input in (False, True):
        got = _ops().backward_planes(grad, x, attention, cells, wants_input)
        if wants_input:
            _assert_close(got[0], exact[0], shape.tolerance)
        _assert_close(got[1], exact[1], shape.tolerance)
        _assert_close(got[2], exact[2], shape.tolerance)
        total = torch.ones_like(cells)
        assert _ops().backward_planes(grad, x, attention, cells, wants_input, total)[2] is None
        _assert_close(total, exact[2] + 1, shape.tolerance)


@pytest.mark.parametrize("shape", POINTWISE, ids=str)
def test_outputs_of_one_kernel_position(shape: Shape) -> None:
    x, (attention, cells) = shape.x(), shape.mixing()
    exact = shape.plain(x.double(), _mixed(attention.double(), cells.double()))
    _assert_close(_ops().forward_pointwise(x, attention, cells), exact, shape.tolerance)


@pytest.mark.parametrize("bits", [None, 24, 16])
@pytest.mark.parametrize("active", [0, 1, 0.5])
@pytest.mark.parametrize("shape", dict.fromkeys([*SHAPES, *SQUARE]), ids=str)
def test_outputs_from_bases(shape: Shape, active: float, bits: int | None) -> None:
    """Of the hidden vector all, some or no units are other than 0. Whole numbers count as what they stand for.

    In both orders: as they are made, and in panels.
    """
    x, n = shape.x(), min(shape.n, 12)
    stored = Stored.of(_random(shape.groups[0], shape.segments, n, *shape.cell), bits)
    basis, low, steps = stored.parts
    whole = basis.double()
    if steps is not None:
        whole = (whole if low is None else 256 * whole + low) * steps[..., None, None]
    hidden = _random(shape.batch, n) * (torch.rand(n) < active)
    scale = _random(shape.batch, shape.groups[0], shape.segments)
    kernels = torch.einsum("bn,bgs,gsnoc->bgsoc", hidden.double(), scale.double(), whole.double())
    exact = shape.plain(x.double(), kernels)
    if shape.kernel == 1:
        _assert_close(_ops().forward_pointwise_basis(x, hidden, scale, basis, low, steps), exact, shape.tolerance)
    for kept in [basis, make_panels(basis.clone())] if shape.cell[0] % panel_width() == 0 and low is None else [basis]:
        for channels_last in (False, True):
            given = x.flatten(2).transpose(1, 2).contiguous() if channels_last else x.flatten(2)
            got = _ops().forward_taps_basis(given, hidden, scale, kept, low, steps, *shape.tables(), channels_last)
            _assert_close(got.transpose(1, 2) if channels_last else got, exact.flatten(2), shape.tolerance)
        if shape in SQUARE:
            padding = shape.padding, shape.padding
            got = _ops().forward_winograd_basis(x, hidden, scale, kept, low, steps, padding, False)
            _assert_close(got, exact, shape.tolerance)
            last = x.permute(0, 2, 3, 1).contiguous()
            got = _ops().forward_winograd_basis(last, hidden, scale, kept, low, steps, padding, True)
            _assert_close(got.permute(0, 3, 1, 2), exact, shape.tolerance)


def _all_results(shape: Shape) -> list[Tensor]:
    """Of every operator that takes the shape, on the same numbers each time."""
    torch.manual_seed(0)
    x, (attention, cells), n = shape.x(), shape.mixing(), min(shape.n, 12)
    flat, tables, padding = x.flatten(2), shape.tables(), (shape.padding, shape.padding)
    basis = Stored.of(_random(shape.groups[0], shape.segments, n, *shape.cell), 24).parts
    prepared = _random(shape.batch, n), _random(shape.batch, shape.groups[0], shape.segments), *basis
    out = _ops().forward_taps(flat, attention, cells, *tables, False)
    found = [out, _ops().forward_taps_basis(flat, *prepared, *tables, False)]
    grad = torch.randn_like(out)
    found += _ops().backward_taps(grad, flat, attention, cells, *tables, shape.stride == 1, True)
    if shape.kernel == 1:
        found += [_ops().forward_pointwise(x, attention, cells), _ops().forward_pointwise_basis(x, *prepared)]
    if shape in PLANES:
        found += _ops().backward_planes(grad.view(shape.batch, -1, *shape.space), x, attention, cells, True)
    if shape in SQUARE:
        square = _ops().forward_winograd(x, attention, cells, padding, False)
        found += [square, _ops().forward_winograd_basis(x, *prepared, padding, False)]
        found += _ops().backward_winograd(grad.view_as(square), x, attention, cells, padding, True)
    return found


@pytest.mark.parametrize("shape", dict.fromkeys([*SHAPES, *SQUARE, *PLANES]), ids=str)
def test_threads_share_the_work(shape: Shape) -> None:
    """However many there are, and however that goes into blocks and samples."""
    torch.set_num_threads(1)
    alone = _all_results(shape)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for one, many in zip(alone, _all_results(shape), strict=True):
            _assert_close(many, one.double(), 2 * shape.tolerance)


@pytest.fixture
def mix_by() -> Iterator[Callable[[int], object]]:
    """Sets the way in which few mixtures are made; afterwards it is as it was."""
    found = _ops().ways_of_mixing()
    yield lambda way: _ops().ways_of_mixing(way, way)
    _ops().ways_of_mixing(*found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_how_cells_are_read_changes_no_bit(shape: Shape, mix_by: Callable[[int], object]) -> None:
    """Every process finds out anew which way is faster, and a run that goes on must not notice."""
    x, (attention, cells), n = shape.x(), shape.mixing(), min(shape.n, 12)
    basis, hidden = _random(shape.groups[0], shape.segments, n, *shape.cell), _random(shape.batch, n)
    scale = _random(shape.batch, shape.groups[0], shape.segments)
    found = []
    for way in range(3):
        mix_by(way)
        assert _ops().ways_of_mixing() == (way, way)
        outputs = [_ops().forward_taps(x.flatten(2), attention, cells, *shape.tables(), False)]
        for bits in (None, 16, 24):
            parts = Stored.of(basis.clone(), bits).parts
            outputs.append(_ops().forward_taps_basis(x.flatten(2), hidden, scale, *parts, *shape.tables(), False))
        if shape.kernel == 1:
            outputs.append(_ops().forward_pointwise(x, attention, cells))
        if shape in SQUARE:
            outputs.append(_ops().forward_winograd(x, attention, cells, (shape.padding, shape.padding), False))
        found.append(outputs)
    for along, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(along, other)
    exact = shape.plain(x.double(), _mixed(attention.double(), cells.double())).flatten(2)
    _assert_close(found[0][0], exact, shape.tolerance)


@pytest.mark.parametrize("way", [-1, 3])
def test_unknown_ways_to_mix_are_refused(way: int) -> None:
    found = _ops().ways_of_mixing()
    with pytest.raises(ValueError, match=f"a way to mix is {way}; 0 to 2 are wanted"):
        _ops().ways_of_mixing(None, way)
    assert _ops().ways_of_mixing() == found


def test_width_is_what_the_environment_asks_for() -> None:
    facts = Path("/proc/cpuinfo")
    usual = "16" if facts.exists() and "avx512f" in facts.read_text().split() else "8"
    assert str(_ops().lanes()) == (os.environ.get("KERNELWAREHOUSE_LANES") or usual)


def _run_as(width: str, *command: str) -> str:
    environment = {**os.environ, "KERNELWAREHOUSE_LANES": width}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif("KERNELWAREHOUSE_LANES" in os.environ, reason="the other width is what is tested")
def test_other_width() -> None:
    """What this machine would not choose is compiled and tested as well: everything here, and random layers."""
    other = {8: "16", 16: "8"}[_ops().lanes()]
    files = [str(HERE / f"test_{name}.py") for name in ("kernels", "kernel_arguments", "strategies", "branch")]
    tests = [*files, "-k", "kernel or branch or native or depthwise or rows or planes or winograd"]
    said = _run_as(other, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rp", *tests)
    # Where there are no kernels, tests are skipped: this one has to have found those of the other width.
    assert f"::{test_width_is_what_the_environment_asks_for.__name__}\n" in said.partition("short test summary")[2]

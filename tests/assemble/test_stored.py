"""How a basis is stored: what its numbers stand for, and what they take."""

import pytest
import torch

from compiled_kernels import COMPILED
from devices import DEVICE
from kernelwarehouse.assemble import native
from kernelwarehouse.assemble.basis import forward
from kernelwarehouse.assemble.stored import Stored, from_panels, make_panels, stored_bytes
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d


@pytest.mark.skipif(not COMPILED, reason="there are no panels without compiled kernels")
def test_panels_hold_the_same_numbers() -> None:
    layer = Conv2d(32, 64, (3, 1))
    basis = torch.randn(1, 3, 5, *layer.geometry.partition.cell_shape)
    panels = make_panels(basis.clone())
    assert panels.shape[-1] * panels.shape[2] == 64
    assert panels.is_contiguous()
    assert panels[0, 2, 1, 7, 4, 3] == basis[0, 2, 4, panels.shape[-1] + 3, 7]
    assert torch.equal(from_panels(panels, layer.geometry), basis)


@pytest.mark.parametrize("bits, worst", [(16, 0.501), (24, 1.01)])
def test_whole_numbers_are_within_a_step_of_what_they_stand_for(bits: int, worst: float) -> None:
    """Half a step; of 24 bits a float32 cannot tell half a step."""
    layer = Conv2d(8 * 3, 8 * 2, (2, 1), config=WarehouseConfig(in_ratio=1 / 3, out_ratio=1 / 2)).to(DEVICE)
    whole = torch.randn(2, 6, 4, 8, 8, 1, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    whole[1, 2, 3] = 0  # whose step is 0
    whole[0, :, :, 5] = 0  # whose scale is 1
    whole[1, :, :, 6] *= 1e-5
    stored = Stored.of(whole, bits)
    assert (stored.numbers.dtype, stored.low is None) == (torch.int16, bits == 16)
    assert stored.steps is not None
    assert stored.scales is not None
    assert stored.scales[0, 5] == 1
    steps = stored.steps[..., None, None, None, None] * stored.scales[:, None, None, :, None, None, None]
    assert ((stored.basis(layer.geometry).double() - whole.double()).abs() <= steps.double() * worst).all()
    largest = whole.abs().amax((1, 2, 4), keepdim=True)
    largest[0, :, :, 5] = 1
    assert (steps <= largest * 2.1 / 2 ** (bits - 1)).all()  # of their own channels, whatever others are like


@pytest.mark.parametrize("bits", [None, 16, 24])
@torch.no_grad()
def test_output_groups_have_scales_of_their_own(bits: int | None) -> None:
    """And what compiled kernels make of them is what whole numbers stand for."""
    layer = Conv2d(16, 24, 1, config=WarehouseConfig(2, in_ratio=0.5, out_ratio=1 / 3)).to(DEVICE)
    cells, geometry = layer.warehouse.cells, layer.geometry
    whole = torch.randn(3, 2, 4, 8, 8, 1, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    whole *= torch.tensor([1.0, 1e-4, 100.0]).to(DEVICE).view(3, 1, 1, 1, 1, 1, 1)
    stored = Stored.of(whole.clone(), bits)
    assert stored.nbytes == stored_bytes(cells, geometry, 4, bits)
    x, units, scale = (torch.rand(2, *shape).to(DEVICE) for shape in ((16, 5, 5), (4,), (6,)))
    expected = forward(x.double(), units.double(), scale.double(), whole.double(), geometry)
    ways = [forward(x, units, scale, stored.basis(geometry), geometry)]
    if COMPILED and DEVICE.type == "cpu":
        ways.append(native.forward_basis(x, units, scale, stored, geometry))
    for out in ways:
        error = (out - expected).abs().amax((0, 2, 3))
        assert (error <= (1e-4 if bits == 16 else 1e-6) * expected.abs().amax((0, 2, 3))).all()


@torch.no_grad()
def test_24_bits_are_as_many_as_the_largest_number_of_a_channel_has() -> None:
    """Weights that are far smaller than that lose what float32 would keep, and their inputs make up for it."""
    layer = Conv2d(16, 16, 1, config=WarehouseConfig(2)).to(DEVICE)
    whole, spread = torch.randn(1, 1, 4, 16, 16, 1, 1), torch.logspace(0, -4, 16)
    whole = (whole * spread.view(16, 1, 1)).to(DEVICE)
    kept = Stored.of(whole.clone(), 24).basis(layer.geometry)
    assert ((kept - whole).abs().amax(4) <= 2.0**-23 * whole.abs().amax((2, 4), keepdim=True).amax(4)).all()


def test_channels_of_the_largest_and_smallest_numbers_there_are() -> None:
    layer = Conv2d(8, 8, 1)
    whole = torch.full((1, 1, 2, 8, 8, 1, 1), 3e38)
    whole[:, :, :, 1] = 1e-38
    kept = Stored.of(whole.clone(), 24).basis(layer.geometry)
    torch.testing.assert_close(kept, whole, rtol=1e-6, atol=0)


def test_bits_that_cannot_be_are_refused() -> None:
    for bits, panels in ((8, False), (24, True)):
        with pytest.raises(ValueError, match=f"bits is {bits}; 16, None or, without panels, 24 is wanted"):
            Stored.of(torch.randn(1, 1, 2, 64, 8), bits, panels)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_what_they_are(value: float) -> None:
    whole = torch.randn(2, 3, 4, 8, 8)
    whole[1, 2, 3, 4, 5] = value
    stored = Stored.of(whole.clone(), 24)
    assert stored.kind == "basis"
    assert torch.equal(stored.numbers.nan_to_num(), whole.nan_to_num())

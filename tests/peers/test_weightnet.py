import pytest
import torch
from per_sample import convolve_each, linear, shake
from torch import nn

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers.weightnet import WeightNetConv2d


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(6, 5, 3, stride=2, padding=1, bias=False), nn.Conv2d(256, 4, 3)], ids=["small", "wide"]
)
def test_halves_of_each_output_kernel_are_scaled(conv):
    layer = shake(WeightNetConv2d(conv).double())
    x = torch.randn(3, conv.in_channels, 6, 5, dtype=torch.float64)
    kernels = []
    for sample in x:
        scales = torch.sigmoid(linear(layer.scales, linear(layer.reduce, sample.mean((1, 2)))))
        kernel = layer.weight.detach().flatten(1).clone()
        half = kernel.shape[1] // 2
        for o in range(conv.out_channels):
            kernel[o, :half] *= scales[2 * o]
            kernel[o, half:] *= scales[2 * o + 1]
        kernels.append(kernel.view_as(layer.weight))
    expected = convolve_each(x, kernels, conv)
    if conv.bias is not None:
        expected = expected + layer.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(layer(x), expected)
    assert layer.reduce.out_features == max(8, conv.in_channels // 16)


def test_odd_kernels_are_refused():
    with pytest.raises(ConvertError, match="27 weights"):
        WeightNetConv2d(nn.Conv2d(3, 8, 3))


def test_an_empty_batch():
    assert WeightNetConv2d(nn.Conv2d(16, 8, 3))(torch.randn(0, 16, 5, 5)).shape == (0, 8, 3, 3)


def test_gradients_reach_everything():
    layer = WeightNetConv2d(nn.Conv2d(16, 16, 3, bias=False))
    layer(torch.randn(2, 16, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())

import pytest
import timm
import torch
from per_sample import convolve_each, linear, normalise, shake
from torch import nn
from torch.nn import functional as F

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers.cgc import CGConv2d, convert


def kernel_of(layer, sample, group):
    outputs, channels, height, width = layer.weight.shape
    pooled = F.adaptive_avg_pool2d(sample, (height, width)).flatten(1)
    code = torch.stack([linear(layer.encode, channel) for channel in pooled])
    in_gate = [linear(layer.in_gate, row) for row in normalise(layer.in_norm, code).relu()]
    groups = normalise(layer.mix_norm, code).relu().view(channels // group, group, -1)
    mixed = torch.cat([layer.mix.weight @ members for members in groups])
    out_gate = [linear(layer.out_gate, row) for row in normalise(layer.out_norm, mixed).relu()]
    kernel = torch.empty_like(layer.weight)
    for o in range(outputs):
        for i in range(channels):
            kernel[o, i] = layer.weight[o, i] * torch.sigmoid(in_gate[i] + out_gate[o]).view(height, width)
    return kernel


@pytest.mark.parametrize(
    "conv, group",
    [
        (nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False), 16),
        (nn.Conv2d(6, 9, 3, padding=1), 6),
        (nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), 3),
    ],
    ids=str,
)
def test_kernels_are_gated_by_position(conv, group):
    layer = shake(CGConv2d(conv).double()).eval()
    x = torch.randn(2, conv.in_channels, 7, 6, dtype=torch.float64)
    expected = convolve_each(x, [kernel_of(layer, sample, group) for sample in x], conv)
    if conv.bias is not None:
        expected = expected + layer.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(layer(x), expected)


def test_the_stem_is_gated_if_asked_for():
    """The count with it is that of the authors' own ResNet18."""
    static = timm.create_model("resnet18")
    for stem, parameters in ((False, 11_717_784), (True, 11_721_791)):
        model = convert(static, stem=stem)
        assert isinstance(model.conv1, CGConv2d) == stem
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_code_is_half_the_positions_and_one():
    assert CGConv2d(nn.Conv2d(16, 16, 3)).encode.out_features == 5


@pytest.mark.parametrize(
    "conv, message",
    [(nn.Conv2d(8, 8, 3, groups=2), "2 groups"), (nn.Conv2d(24, 16, 3), "24 -> 16"), (nn.Conv2d(32, 3, 3), "32 -> 3")],
    ids=str,
)
def test_what_cannot_be_gated_is_refused(conv, message):
    with pytest.raises(ConvertError, match=message):
        CGConv2d(conv)


def test_gradients_reach_everything():
    layer = CGConv2d(nn.Conv2d(16, 16, 3, bias=False))
    layer(torch.randn(4, 16, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())

import pytest
import torch
from per_sample import convolve_each, linear, shake
from torch import nn

from kernelwarehouse.assemble import route
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.peers.dyconv import DYConv2d
from kernelwarehouse.temperature import set_temperature

CONVOLUTIONS = [
    nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(12, 8, 1),
    nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False),
]


def reference(layer, conv, x, weights_of):
    kernels = []
    for sample in x:
        logits = linear(layer.excite, linear(layer.squeeze, sample.mean((1, 2))).relu())
        weights = weights_of(logits)
        kernels.append(sum(weight * kernel for weight, kernel in zip(weights, layer.weight, strict=True)))
    out = convolve_each(x, kernels, conv)
    return out if conv.bias is None else out + layer.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_softmax_mixture_of_experts(conv, training):
    layer = shake(DYConv2d(conv.double())).train(training)
    set_temperature(layer, 0.25)
    softening = 1 + 29 * 0.25 if training else 1.0
    x = torch.randn(3, conv.in_channels, 7, 6, dtype=torch.float64)
    expected = reference(layer, conv, x, lambda z: torch.softmax(z / softening, 0))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_contrasting_driven_attention_adds_no_parameter(tau):
    conv = CONVOLUTIONS[0].double()
    layer = shake(DYConv2d(conv, attention="caf"))
    set_temperature(layer, tau)
    start = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    x = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    expected = reference(layer, conv, x, lambda z: tau * start + (1 - tau) * z / (z.abs().sum() + 1e-3))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)
    assert sum(p.numel() for p in layer.parameters()) == sum(p.numel() for p in DYConv2d(conv).parameters())


def test_experts_start_apart_each_like_a_static_kernel():
    layer = DYConv2d(nn.Conv2d(64, 64, 3))
    wanted = (2 / (64 * 9)) ** 0.5
    assert layer.weight.std((1, 2, 3, 4)).tolist() == pytest.approx([wanted] * 4, rel=0.05)
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_whole_kernels_are_not_taken_apart_by_position():
    # A product per position would first copy all experts into another order: at batch 1, ten times the convolution.
    layer = DYConv2d(nn.Conv2d(8, 8, 3))
    assert route(torch.randn(1, 8, 7, 7), layer.weight, layer.geometry).forward == "grouped"


def test_gradients_reach_everything():
    layer = DYConv2d(CONVOLUTIONS[0].float())
    layer(torch.randn(2, 8, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_unknown_attention_is_named():
    with pytest.raises(ConfigError, match=r"'sparsemax'.*softmax, caf"):
        DYConv2d(nn.Conv2d(4, 4, 1), attention="sparsemax")

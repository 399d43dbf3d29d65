import pytest
import torch
from per_sample import convolve_each, linear, normalise, shake
from torch import nn

from kernelwarehouse.peers.odconv import ODConv2d
from kernelwarehouse.temperature import set_temperature

DENSE = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
POINTWISE = nn.Conv2d(12, 8, 1)
DEPTHWISE = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)


def reference(layer, conv, x, softening, experts_of):
    kernels, inputs, scales = [], [], []
    for sample in x:
        v = normalise(layer.norm, linear(layer.squeeze, sample.mean((1, 2)))).relu()
        experts = experts_of(linear(layer.kernel, v))
        kernel = sum(weight * kernel for weight, kernel in zip(experts, layer.weight, strict=True))
        if layer.position is not None:
            kernel = kernel * torch.sigmoid(linear(layer.position, v) / softening).view(conv.kernel_size)
        kernels.append(kernel)
        inputs.append(sample * torch.sigmoid(linear(layer.channel, v) / softening).view(-1, 1, 1))
        filters = None if layer.filter is None else torch.sigmoid(linear(layer.filter, v) / softening)
        scales.append(torch.ones(conv.out_channels, dtype=x.dtype) if filters is None else filters)
    out = convolve_each(torch.stack(inputs), kernels, conv) * torch.stack(scales)[:, :, None, None]
    return out if conv.bias is None else out + layer.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("conv", [DENSE, POINTWISE, DEPTHWISE], ids=str)
def test_four_attentions(conv):
    layer = shake(ODConv2d(conv.double())).eval()
    x = torch.randn(3, conv.in_channels, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), reference(layer, conv, x, 1.0, lambda z: torch.softmax(z, 0)))


def test_training_divides_the_logits_of_all_heads():
    layer = shake(ODConv2d(DENSE.double())).train()
    layer.norm.eval()  # the reference uses running statistics
    set_temperature(layer, 0.5)
    x = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    expected = reference(layer, DENSE, x, 15.5, lambda z: torch.softmax(z / 15.5, 0))
    torch.testing.assert_close(layer(x), expected)


def test_contrasting_driven_attention_replaces_the_softmax_only():
    layer = shake(ODConv2d(DENSE.double(), attention="caf")).train()
    layer.norm.eval()
    set_temperature(layer, 0.25)
    start = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    x = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    expected = reference(layer, DENSE, x, 8.25, lambda z: 0.25 * start + 0.75 * z / (z.abs().sum() + 1e-3))
    torch.testing.assert_close(layer(x), expected)


def test_heads_that_would_repeat_others_are_left_out():
    assert ODConv2d(DEPTHWISE).filter is None
    assert ODConv2d(POINTWISE).position is None
    assert ODConv2d(DENSE).filter is not None
    assert ODConv2d(DENSE).position is not None


def test_gradients_reach_everything():
    layer = ODConv2d(DENSE.float())
    layer(torch.randn(4, 8, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())

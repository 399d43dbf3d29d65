import pytest
import torch
from per_sample import linear, normalise, shake
from torch import nn
from torch.nn import functional as F

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers.dcd import DCDConv2d, DCDLinear


def hard_gate(y):
    return torch.clamp(y + 3, 0, 6) / 3


def phi_and_scale(mixing, pooled):
    y = linear(mixing.squeeze, pooled)
    y = y * hard_gate(linear(mixing.gate, y))
    return linear(mixing.phi, y).view(mixing.latent, mixing.latent), hard_gate(linear(mixing.scale, y))


@pytest.mark.parametrize("pool", [1, 2])
def test_static_kernel_plus_dynamic_latent_mixing(pool):
    conv = nn.Conv2d(16, 10, 3, stride=2, padding=1, bias=False)
    layer = shake(DCDConv2d(conv, pool).double()).eval()
    x = torch.randn(3, 16, 8, 6, dtype=torch.float64)
    expected = []
    for sample in x:
        phi, scale = phi_and_scale(layer.mixing, F.adaptive_avg_pool2d(sample, pool).flatten())
        u = normalise(layer.q_norm, torch.einsum("lc,chw->lhw", layer.q.weight[:, :, 0, 0], sample[:, ::2, ::2]))
        v = normalise(layer.phi_norm, torch.einsum("ml,lhw->mhw", phi, u)) + u
        static = F.conv2d(sample[None], layer.conv.weight, None, conv.stride, conv.padding)[0]
        expected.append(torch.einsum("ol,lhw->ohw", layer.p.weight[:, :, 0, 0], v) + scale.view(-1, 1, 1) * static)
    torch.testing.assert_close(layer(x), torch.stack(expected))
    assert layer.mixing.latent == {1: 4, 2: 8}[pool]
    assert layer.mixing.squeeze.out_features == {1: 1, 2: 4}[pool]


def test_classifier_is_the_same_with_vectors():
    layer = shake(DCDLinear(nn.Linear(12, 7)).double()).eval()
    x = torch.randn(3, 12, dtype=torch.float64)
    expected = []
    for sample in x:
        phi, scale = phi_and_scale(layer.mixing, sample)
        u = normalise(layer.q_norm, linear(layer.q, sample))
        v = normalise(layer.phi_norm, phi @ u) + u
        expected.append(linear(layer.p, v) + scale * linear(layer.linear, sample))
    torch.testing.assert_close(layer(x), torch.stack(expected))
    assert (layer.mixing.latent, layer.mixing.squeeze.out_features) == (32, 32)


def test_grouped_convolutions_are_refused():
    with pytest.raises(ConvertError, match="4 groups"):
        DCDConv2d(nn.Conv2d(8, 8, 3, groups=4))


def test_gradients_reach_everything():
    layer = DCDConv2d(nn.Conv2d(16, 16, 3, padding=1, bias=False))
    layer(torch.randn(4, 16, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())

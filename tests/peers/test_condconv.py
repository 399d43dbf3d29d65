import pytest
import torch
from per_sample import convolve_each, linear, shake
from torch import nn

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers.condconv import CondConv2d, CondLinear, RoutedBlock

FIRST = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False)
SECOND = nn.Conv2d(8, 8, 3, padding=1)


def mixed(weights, kernels):
    return sum(weight * kernel for weight, kernel in zip(weights, kernels, strict=True))


def test_both_convolutions_of_a_block_use_the_routing_of_its_input():
    first, second = CondConv2d(FIRST, experts=3), CondConv2d(SECOND, experts=3)
    routed = shake(RoutedBlock(nn.Sequential(first, nn.ReLU(), second), 6, experts=3).double())
    x = torch.randn(4, 6, 7, 7, dtype=torch.float64)
    routing = [torch.sigmoid(linear(routed.route, sample.mean((1, 2)))) for sample in x]
    middle = convolve_each(x, [mixed(r, first.weight) for r in routing], FIRST).relu()
    expected = convolve_each(middle, [mixed(r, second.weight) for r in routing], SECOND) + second.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(routed(x), expected)


def test_routing_does_not_outlive_the_call():
    conv = CondConv2d(FIRST)
    block = RoutedBlock(nn.Sequential(conv), 6)
    block(torch.randn(2, 6, 5, 5))
    assert conv.routing is None
    with pytest.raises(ConvertError, match="outside the RoutedBlock"):
        conv(torch.randn(2, 6, 5, 5))


def test_classifier_mixes_weights_and_biases():
    layer = shake(CondLinear(nn.Linear(5, 7), experts=3).double())
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = []
    for sample in x:
        routing = torch.sigmoid(linear(layer.route, sample))
        expected.append(mixed(routing, layer.weight) @ sample + mixed(routing, layer.bias))
    torch.testing.assert_close(layer(x), torch.stack(expected))


def test_gradients_reach_everything():
    block = RoutedBlock(nn.Sequential(CondConv2d(FIRST.float()), CondConv2d(SECOND.float())), 6)
    classifier = CondLinear(nn.Linear(8, 3))
    classifier(block(torch.randn(2, 6, 5, 5)).mean((2, 3))).square().sum().backward()
    for module in (block, classifier):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())

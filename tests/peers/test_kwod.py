import copy

import pytest
import torch
from per_sample import convolve_each, linear, shake
from torch import nn

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.peers import kwod
from kernelwarehouse.peers.kwod import KWODConv2d
from kernelwarehouse.temperature import set_temperature


@pytest.mark.parametrize("size, groups", [(3, 1), (1, 1), (3, 8)])
def test_kernels_of_the_warehouse_with_three_more_attentions(size, groups):
    config = WarehouseConfig(budget=2)
    conv = Conv2d(8, 16, size, stride=2, padding=size // 2, groups=groups, config=config, dtype=torch.float64)
    layer = shake(KWODConv2d(conv)).eval()
    set_temperature(layer, 0.25)
    x = torch.randn(3, 8, 6, 7, dtype=torch.float64)
    kernels, inputs, scales = [], [], []
    for sample in x:
        hidden = conv.attention.hidden(sample.mean((1, 2))[None])
        weights = conv.attention.weights(conv.attention.logits(hidden))[0]
        pieces = torch.einsum("mn,n...->m...", weights, conv.warehouse.cells)
        kernel = conv.geometry.partition.join(pieces)
        if size > 1:
            kernel = kernel * torch.sigmoid(linear(layer.position, hidden[0])).view(size, size)
        kernels.append(kernel)
        inputs.append(sample * torch.sigmoid(linear(layer.channel, hidden[0])).view(-1, 1, 1))
        scales.append(torch.sigmoid(linear(layer.filter, hidden[0])).view(-1, 1, 1))
    expected = convolve_each(torch.stack(inputs), kernels, conv) * torch.stack(scales) + conv.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(layer(x), expected)


def test_gradients_reach_everything():
    layer = KWODConv2d(Conv2d(8, 8, 3))
    set_temperature(layer, 0.5)
    layer(torch.randn(4, 8, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_shared_warehouses_stay_shared():
    first = Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(first, copy.copy(first))
    converted = kwod.convert(model)
    assert converted[0].conv.warehouse is converted[1].conv.warehouse
    assert converted[0].conv.warehouse is not first.warehouse


def test_static_models_are_refused():
    with pytest.raises(ConvertError, match="draws on a warehouse"):
        kwod.convert(nn.Sequential(nn.Conv2d(3, 3, 1)))

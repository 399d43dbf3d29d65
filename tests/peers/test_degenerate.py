"""One mixture a layer and one layer a warehouse: then KernelWarehouse is dynamic convolution (paper, "Discussion")."""

import pytest
import torch
from torch import nn

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.peers.dyconv import DYConv2d
from kernelwarehouse.temperature import set_temperature

WHOLE_KERNELS = WarehouseConfig(budget=4, spatial_partition=False, reduction=1 / 4)


def same_attention(dynamic, warehouse_layer):
    """Give the warehouse's attention branch the weights of the dynamic convolution's.

    Its norm, on running statistics, is made to add the bias and nothing else, and its zero cell gets the logit 0.
    """
    attention, experts = warehouse_layer.attention, len(dynamic.weight)
    with torch.no_grad():
        attention.fc1.weight.copy_(dynamic.squeeze.weight)
        attention.norm.running_var.fill_(1 - attention.norm.eps)
        attention.norm.bias.copy_(dynamic.squeeze.bias)
        attention.fc2.weight[:experts] = dynamic.excite.weight
        attention.fc2.weight[experts] = 0
        attention.fc2.bias[:experts] = dynamic.excite.bias
        attention.fc2.bias[experts] = 0
        warehouse_layer.warehouse.cells.copy_(dynamic.weight)


@pytest.mark.parametrize("size, groups, tau", [(3, 1, 0.0), (3, 1, 0.4), (3, 1, 1.0), (1, 1, 0.0), (3, 64, 0.1)])
def test_kernelwarehouse_is_dynamic_convolution(size, groups, tau):
    shape = {"stride": 2, "padding": size // 2, "groups": groups, "bias": False, "dtype": torch.float64}
    dynamic = DYConv2d(nn.Conv2d(64, 64, size, **shape), attention="caf").eval()
    warehouse_layer = Conv2d(64, 64, size, **shape, config=WHOLE_KERNELS).eval()
    partition = warehouse_layer.geometry.partition
    assert (partition.mixtures, len(warehouse_layer.warehouse.cells)) == (1, 4)
    with torch.no_grad():
        for value in dynamic.parameters():
            value.copy_(torch.randn(value.shape, dtype=value.dtype))
    same_attention(dynamic, warehouse_layer)
    for layer in (dynamic, warehouse_layer):
        set_temperature(layer, tau)

    x = torch.randn(3, 64, 6, 6, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(value) for layer, value in zip((dynamic, warehouse_layer), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(dynamic.weight.grad, warehouse_layer.warehouse.cells.grad)

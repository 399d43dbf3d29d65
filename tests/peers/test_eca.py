import pytest
import timm
import torch
from per_sample import shake
from timm.layers.eca import EcaModule
from torch.nn import functional as F

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers import eca


def test_neighbouring_channels_share_a_gate():
    gate = shake(EcaModule(kernel_size=5).double())
    x = torch.randn(3, 12, 4, 6, dtype=torch.float64)
    expected = []
    for sample in x:
        means = F.pad(sample.mean((1, 2)), (2, 2))
        logits = torch.stack([gate.conv.weight[0, 0] @ means[c : c + 5] for c in range(12)])
        expected.append(sample * torch.sigmoid(logits).view(-1, 1, 1))
    torch.testing.assert_close(gate(x), torch.stack(expected))


def test_kernel_sizes_go_by_stage():
    with torch.device("meta"):
        resnet = timm.create_model("resnet50")
    converted = eca.convert(resnet, eca.RESNET50_KERNELS)
    sizes = [module.conv.kernel_size[0] for module in converted.modules() if isinstance(module, EcaModule)]
    assert sizes == [3] * 3 + [5] * 4 + [5] * 6 + [7] * 3


def test_too_few_kernel_sizes():
    with torch.device("meta"):
        resnet = timm.create_model("resnet18")
    with pytest.raises(ConvertError, match=r"\(3, 5\) are for 2 stages"):
        eca.convert(resnet, (3, 5))

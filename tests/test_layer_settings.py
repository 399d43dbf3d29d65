"""What can be set on a layer after it was made, and what cannot."""

import copy
import pickle

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse import layers


def _twins(**arguments: object) -> tuple[nn.Conv2d, nn.Module]:
    """torch's convolution in a model, and the converted one."""
    static = nn.Sequential(nn.Conv2d(4, 6, 3, **arguments)).double()
    return static[0], kw.convert(static, kw.plan(static))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": (2, 2)},
        {"stride": 2},
        {"padding": (2, 1)},
        {"padding": "same"},
        {"dilation": (2, 2), "padding": (2, 2)},
        {"dilation": 2, "padding": 2, "stride": 1},
    ],
)
def test_how_the_kernel_slides_can_be_set_later(changes: dict) -> None:
    static, layer = _twins(padding=1)
    for name, value in changes.items():
        setattr(static, name, value)
        setattr(layer, name, value)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(layer(x), static(x))
    made_so = layers.Conv2d(4, 6, 3, **{"padding": 1} | changes)
    assert layer.extra_repr().split(", warehouse=")[0] == made_so.extra_repr().split(", warehouse=")[0]
    torch.testing.assert_close(copy.deepcopy(layer)(x), static(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), static(x))


def test_the_kind_of_padding_can_be_set_later() -> None:
    _, layer = _twins(padding=1)
    layer.padding_mode = "circular"
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[:, :, 1:-1, 1:-1], _valid(layer, x))
    assert "padding_mode=circular" in layer.extra_repr()
    wrapped = F.pad(x, (1, 1, 1, 1), mode="circular")
    torch.testing.assert_close(layer(x), _valid(layer, wrapped))
    layer.padding_mode = "zeros"
    torch.testing.assert_close(layer(x), _valid(layer, F.pad(x, (1, 1, 1, 1))))


def _valid(layer: layers.WarehouseLayer, x: torch.Tensor) -> torch.Tensor:
    """The layer's kernel at temperature 1, where it is the same for every sample, without any padding."""
    starts = layer.attention.beta.to(x.dtype)
    kernel = layer.geometry.partition.join(torch.einsum("mn,n...->m...", starts, layer.warehouse.cells))
    return F.conv2d(x, kernel, layer.bias, layer.stride, 0, layer.dilation)


def test_dilated_backbones() -> None:
    # As DeepLab does: the last stage keeps its resolution and sees as far as before.
    model = torchvision.models.resnet18(num_classes=4).double().eval()
    converted = kw.convert(model, kw.plan(model))
    for network in (model, converted):
        for block in network.layer4:
            for conv in (block.conv1, block.conv2):
                conv.stride, conv.padding, conv.dilation = (1, 1), (2, 2), (2, 2)
            if block.downsample is not None:
                block.downsample[0].stride = (1, 1)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x), rtol=1e-8, atol=1e-10)


def test_compiled_layers_follow_a_new_stride() -> None:
    static, layer = _twins()
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), static(x))
    static.stride = layer.stride = (2, 2)
    torch.testing.assert_close(compiled(x), static(x))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stride", 0),
        ("stride", (1, 2, 3)),
        ("stride", 1.5),
        ("padding", -1),
        ("padding", "some"),
        ("dilation", (0, 1)),
        ("padding_mode", "mirror"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(name: str, value: object) -> None:
    layer = layers.Conv2d(4, 6, 3, padding=1)
    before, geometry = layer.extra_repr(), layer.geometry
    with pytest.raises(kw.KernelWarehouseError, match=name):
        setattr(layer, name, value)
    assert layer.extra_repr() == before
    assert layer.geometry is geometry
    with pytest.raises(kw.KernelWarehouseError, match=name):
        layers.Conv2d(4, 6, 3, **{name: value})


def test_same_padding_has_no_stride() -> None:
    layer = layers.Conv2d(4, 6, 3, padding="same")
    with pytest.raises(kw.KernelWarehouseError, match="same"):
        layer.stride = 2
    assert layer.stride == (1, 1)


@pytest.mark.parametrize(
    ("layer", "name", "value"),
    [
        (layers.Conv2d(4, 6, 3), "groups", 2),
        (layers.Conv2d(4, 6, 3), "kernel_size", (1, 1)),
        (layers.Conv2d(4, 6, 3), "in_channels", 8),
        (layers.Conv2d(4, 6, 3), "out_channels", 8),
        (layers.Linear(4, 6), "in_features", 8),
        (layers.Linear(4, 6), "out_features", 8),
        (layers.Linear(4, 6), "weight", nn.Parameter(torch.ones(6, 4))),
    ],
)
def test_what_the_kernel_is_cannot_be_set(layer: nn.Module, name: str, value: object) -> None:
    with pytest.raises(AttributeError, match=f"{name}.*before it is converted"):
        setattr(layer, name, value)
    assert "weight" not in dict(layer.named_parameters())


def test_layers_compiled_in_place_can_be_copied() -> None:
    layer = layers.Conv2d(4, 4, 3).eval()
    layer.compile(backend="eager")
    x = torch.randn(2, 4, 6, 6)
    expected = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), expected)

"""What layers would do on a GPU, followed on fake tensors: launches, memory, layouts, and that nothing waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.cases import converted_network
from benchmarks.launches import Count, count_network
from benchmarks.routing import Place, places
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernelwarehouse as kw
from kernelwarehouse.assemble import Geometry, route
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d, WarehouseLayer
from kernelwarehouse.partition import Partition

BATCH = 128
# Of a layer, at most. Most have 3 to 8 and 10 to 25; the most has a strided 3x3 kernel in two chunks of two groups.
LAUNCHES = {"forward": 13, "backward": 46}

# What a layer makes and has alive at once, gigabytes at most: (float32, bfloat16). Numbers of activations where maps
# are large, and two blocks of kernels where they are small.
PEAK = {
    "mobilenetv2_050": (1.1, 0.6),
    "mobilenetv2_100": (2.1, 1.1),
    "resnet18": (1.6, 0.9),
    "resnet50": (2.0, 1.0),
    "convnext_tiny": (2.0, 1.1),
    "deit_small": (1.0, 0.5),
    "deit_tiny": (0.2, 0.1),
    "small_resnet": (0.15, 0.08),
}
USUAL = [(torch.float32, False), (torch.bfloat16, True)]
UNUSUAL = [(torch.float32, True), (torch.bfloat16, False)]
# Inside a family, layers differ in little more than the number of cells; images are not what linear layers see.
ONE_OF_EACH_FAMILY = ["kw1x_mobilenetv2_100", "kw1d2x_resnet50", "kw3d4x_convnext_tiny"]


def _places(preset: str) -> list[Place]:
    with torch.device("meta"):
        model = converted_network(preset)
    return _kinds(places(model, 32 if preset.endswith("_small_resnet") else 224))


def _kinds(found: list[Place]) -> list[Place]:
    """Of layers that are cut and slide alike, those with the largest kernels and with the largest inputs."""
    kinds: dict[Any, list[Place]] = {}
    for place in found:
        geometry, partition = place.layer.geometry, place.layer.geometry.partition
        depthwise, small = partition.kernel_shape[1] == 1, torch.Size(place.shape[1:]).numel() <= 28 * 28
        kind = (
            geometry.kernel_size,
            geometry.stride,
            depthwise,
            small,
            partition.in_groups > 1,
            partition.out_groups > 1,
        )
        kinds.setdefault(kind, []).append(place)
    largest = []
    for alike in kinds.values():
        by_kernel = max(alike, key=lambda place: torch.Size(place.layer.geometry.partition.kernel_shape).numel())
        by_input = max(alike, key=lambda place: torch.Size(place.shape).numel())
        largest += [by_kernel] if by_kernel is by_input else [by_kernel, by_input]
    return largest


def _peak(preset: str, dtype: torch.dtype) -> float:
    backbone = preset.split("_", 1)[1].removesuffix("_published")
    return PEAK[backbone][dtype == torch.bfloat16] * 1e9


@pytest.mark.parametrize("preset", kw.zoo.PRESETS)
def test_layers_are_a_handful_of_launches_in_little_memory(preset: str) -> None:
    found = _places(preset)
    for dtype, last in USUAL + (UNUSUAL if preset in ONE_OF_EACH_FAMILY else []):
        for row in count_network(found, BATCH, dtype, last):
            assert row.launches[0] <= LAUNCHES["forward"], row
            assert row.launches[1] <= LAUNCHES["backward"], row
            assert row.peak <= _peak(preset, dtype), row
            assert row.keeps_layout, row
            assert "hidden" not in (row.forward, row.backward)


@pytest.mark.parametrize("preset", ["kw1x_resnet18", "kw4x_resnet50"])
def test_kernels_of_a_batch_are_read_and_written_a_few_times(preset: str) -> None:
    """On small maps they are nearly all of the traffic: two passes forward and five backward, and what is small beside
    them (cells, windows, images)."""
    with torch.device("meta"):
        found = places(converted_network(preset), 224)
    [place] = [
        place
        for place in found
        if place.layer.geometry.partition.kernel_shape == (512, 512, 3, 3) and place.shape[1:] == (7, 7)
    ]
    [row] = count_network([place], BATCH, torch.bfloat16, True)
    kernels = 2 * BATCH * 512 * 512 * 9
    assert row.forward == row.backward == "windows"
    assert row.moved[0] <= 3 * kernels
    assert row.moved[1] <= 9 * kernels


@contextmanager
def _fake_autocast() -> Iterator[None]:
    """`torch.autocast` turns itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def _move_to_fake_cuda(model: nn.Module) -> None:
    """What `model.to_empty(device="cuda")` should do, which fails on modules that others share."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")


class _Shapes(TorchDispatchMode):
    """Shapes of what is cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.cast.append(args[0].shape)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "preset, training",
    [("kw1x_small_resnet", True), ("kw1x_resnet18", True), ("kw1x_resnet18", False), ("kw1x_deit_tiny", True)],
)
def test_whole_networks_under_autocast(preset: str, training: bool) -> None:
    with torch.device("meta"):
        model = kw.create_model(preset).train(training)
    side = 32 if preset.endswith("_small_resnet") else 224
    with FakeTensorMode(allow_non_fake_inputs=True):
        _move_to_fake_cuda(model)
        x = torch.empty(BATCH, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
        with torch.set_grad_enabled(training), _fake_autocast(), _Shapes() as shapes:
            out = model(x)
    assert out.dtype == torch.bfloat16
    assert out.requires_grad == training
    layers = [layer for layer in model.modules() if isinstance(layer, WarehouseLayer)]
    assert all(layer.route.reason.startswith("by rule") for layer in layers)
    warehouses = {layer.warehouse for layer in layers}
    for shape in {warehouse.cells.shape for warehouse in warehouses}:
        alike = sum(warehouse.cells.shape == shape for warehouse in warehouses)
        assert shapes.cast.count(shape) == alike, shape  # once for each of them


def test_what_would_wait_is_refused() -> None:
    """So that the other tests can fail."""
    with FakeTensorMode():
        layer = Conv2d(8, 8, 3, device="cuda", config=WarehouseConfig())
        with pytest.raises(DataDependentOutputException):
            layer.attention.get_temperature()
        coefficients, factors = layer.attention.factored(torch.empty(2, 8, device="cuda"))
    assert coefficients.shape[2] == factors.shape[1]


def _route(kernel: tuple[int, ...], cell: tuple[int, ...], space: tuple[int, ...], groups: int = 1) -> str:
    axes = len(kernel) - 2
    geometry = Geometry(Partition(kernel, cell), (1,) * axes, tuple(k // 2 for k in kernel[2:]), (1,) * axes, groups)
    with FakeTensorMode():
        channels = kernel[1] * groups
        x = torch.empty(4, *((channels, *space) if axes else (*space, channels)), device="cuda")
        return route(x, x.new_empty(9, *cell), geometry).forward


def test_the_rule() -> None:
    assert _route((64, 64, 1, 1), (64, 32, 1, 1), (14, 14)) == "windows"
    assert _route((64, 64, 1, 1), (32, 32, 1, 1), (14, 14)) == "pointwise"
    assert _route((64, 64, 1, 1), (64, 64, 1, 1), (56, 56)) == "pointwise"
    assert _route((64, 64, 3, 3), (64, 64, 1, 1), (14, 14)) == "windows"
    assert _route((64, 64, 3, 3), (64, 64, 1, 1), (15, 14)) == "grouped"
    assert _route((64, 1, 3, 3), (64, 1, 1, 1), (7, 7), groups=64) == "grouped"
    assert _route((64, 64), (32, 64), (197,)) == "matmul"
    assert _route((64, 64), (64, 32), (197,)) == "windows"
    assert _route((64, 64), (32, 32), (197,)) == "grouped"


def test_counting() -> None:
    def three_steps(x: Tensor) -> Tensor:
        twice = x + x  # a kilobyte is read and one written
        once = twice.view(16, 16) @ twice.view(16, 16)
        del twice
        return once.t()

    with FakeTensorMode():
        x = torch.empty(256, device="cuda")
        with Count() as count:
            out = three_steps(x)
            assert count.launches == 2
            assert count.moved == 2 * 1024 + 3 * 1024
            assert count.peak == 2 * 1024
            del out
            x.mul_(2)
    assert count.launches == 3
    assert count.peak == 2 * 1024

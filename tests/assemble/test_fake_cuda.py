"""What layers would do on a GPU, followed on fake tensors: launches, memory, layouts, and that nothing waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.cases import converted_network
from benchmarks.launches import Count, Row, count_network, refuse_copies
from benchmarks.routing import Place, places
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernelwarehouse as kw
from kernelwarehouse.assemble import Geometry, route
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.attention import Attention, AttentionShape, LowRank
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d, WarehouseLayer
from kernelwarehouse.partition import Partition

BATCH = 128
# Of a layer without its attention branch, at most. Most have 3 to 8 and 10 to 25; the most has a strided 3x3 kernel in
# two chunks of two groups.
LAUNCHES = {"forward": 13, "backward": 47}
# Of an attention branch in float32, at most; the low-rank form has these.
BRANCH = {"forward": 20, "backward": 24}

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
COMBINATIONS = [(dtype, last) for dtype in (torch.float32, torch.bfloat16) for last in (False, True)]


@cache
def _places(preset: str) -> tuple[Place, ...]:
    with torch.device("meta"):
        model = converted_network(preset)
    return tuple(places(model, _side(preset)))


def _side(preset: str) -> int:
    return 32 if preset.endswith("_small_resnet") else 224


# Layers of other presets that are alike in all that is counted here.
_counted: dict[Any, Row] = {}


def _count(place: Place, dtype: torch.dtype, last: bool) -> Row:
    geometry, attention = place.layer.geometry, place.layer.attention.shape
    last = last and geometry.spatial_axes > 0  # tokens have their channels last in any case
    kind = (geometry, attention, place.shape, dtype, last)
    if kind not in _counted:
        [_counted[kind]] = count_network([place], BATCH, dtype, last)
    return _counted[kind]


def _peak(preset: str, dtype: torch.dtype) -> float:
    backbone = preset.split("_", 1)[1].removesuffix("_published")
    return PEAK[backbone][dtype == torch.bfloat16] * 1e9


@pytest.mark.parametrize("preset", kw.zoo.PRESETS)
def test_layers_are_a_handful_of_launches_in_little_memory(preset: str) -> None:
    for dtype, last in COMBINATIONS:
        for row in (_count(place, dtype, last) for place in _places(preset)):
            assert row.launches[0] <= LAUNCHES["forward"], row
            assert row.launches[1] <= LAUNCHES["backward"], row
            assert row.branch[0] <= BRANCH["forward"], row
            assert row.branch[1] <= BRANCH["backward"], row
            assert row.peak <= _peak(preset, dtype), row
            assert row.keeps_layout, row
            assert "hidden" not in (row.forward, row.backward)


@pytest.mark.parametrize("preset", ["kw1x_resnet18", "kw4x_resnet50"])
def test_kernels_of_a_batch_are_read_and_written_a_few_times(preset: str) -> None:
    """On small maps they are nearly all of the traffic: two passes forward and five backward, and what is small beside
    them (cells, windows, images). Adding to the sum of the cells' gradients, in float32, comes on top."""
    [place] = [
        place
        for place in _places(preset)
        if place.layer.geometry.partition.kernel_shape == (512, 512, 3, 3) and place.shape[1:] == (7, 7)
    ]
    row = _count(place, torch.bfloat16, True)
    kernels = 2 * BATCH * 512 * 512 * 9
    assert row.forward == row.backward == "windows"
    assert row.moved[0] <= 3 * kernels
    assert row.moved[1] <= 9 * kernels + (2 + 4 + 4) * place.layer.warehouse.cells.numel()


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
    """Shapes of what is cast to bfloat16; nothing may leave the GPU or come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.cast.append(args[0].shape)
        made = func(*args, **kwargs)
        inputs, outputs = ([leaf for leaf in tree_leaves(some) if isinstance(leaf, Tensor)] for some in (args, made))
        refuse_copies(func, inputs, outputs)
        return made


def _run_whole(preset: str, training: bool, last: bool) -> tuple[Tensor, nn.Module, list[torch.Size]]:
    """A network on fake images: its output, itself, and the shapes of what was cast to bfloat16.

    Every layer goes by rule and leaves channels where they are.
    """
    with torch.device("meta"):
        model = kw.create_model(preset).train(training)
    layers = [layer for layer in model.modules() if isinstance(layer, WarehouseLayer)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        _move_to_fake_cuda(model)
        for layer in layers:
            layer.register_forward_hook(_keeps_channels_where_they_are)
        x = torch.empty(BATCH, 3, _side(preset), _side(preset), device="cuda")
        x = x.to(memory_format=torch.channels_last) if last else x
        with torch.set_grad_enabled(training), _Shapes() as shapes:
            out = model(x)
    assert out.requires_grad == training
    assert all(layer.route.reason.startswith("by rule") for layer in layers)
    return out, model, shapes.cast


def _keeps_channels_where_they_are(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
    assert channels_last(out) == channels_last(given[0])


@pytest.mark.parametrize(
    "preset, training, last",
    [
        *((preset, True, True) for preset in kw.zoo.PRESETS),
        ("kw1x_small_resnet", True, False),
        ("kw1x_resnet18", True, False),
        ("kw1x_resnet18", False, True),
    ],
)
def test_whole_networks_under_autocast(preset: str, training: bool, last: bool) -> None:
    with _fake_autocast():
        out, model, cast = _run_whole(preset, training, last)
    assert out.dtype == torch.bfloat16
    warehouses = {layer.warehouse for layer in model.modules() if isinstance(layer, WarehouseLayer)}
    for shape in {warehouse.cells.shape for warehouse in warehouses}:
        alike = sum(warehouse.cells.shape == shape for warehouse in warehouses)
        assert cast.count(shape) == alike, shape  # once for each of them


@pytest.mark.parametrize(
    "preset, last",
    [*((preset, False) for preset in kw.zoo.PRESETS), ("kw1x_small_resnet", True), ("kw1x_resnet18", True)],
)
def test_whole_networks_in_float32(preset: str, last: bool) -> None:
    """In training; `test_whole_networks_under_autocast` has both modes, and the other layout for all."""
    out, _, cast = _run_whole(preset, True, last)
    assert out.dtype == torch.float32
    assert not cast


def test_what_would_wait_is_refused() -> None:
    """So that the other tests can fail."""
    with FakeTensorMode():
        layer = Conv2d(8, 8, 3, device="cuda", config=WarehouseConfig())
        with pytest.raises(DataDependentOutputException):
            layer.attention.get_temperature()
        coefficients, factors = layer.attention.factored(torch.empty(2, 8, device="cuda"))
        one, there = torch.ones(()), torch.ones((), device="cuda")
        for away in (coefficients.cpu, lambda: torch.ones(3).to("cuda"), lambda: one.copy_(there)):
            for mode in (Count, _Shapes):
                with pytest.raises(RuntimeError, match="to another device"), mode():
                    away()
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


def test_branches_take_on_a_cpu_the_steps_that_they_take_on_a_gpu() -> None:
    """Forward; backward is counted there because autograd does not run on what pretends to be on a GPU."""
    shape = AttentionShape(16, mixtures=4, cells=8, hidden=16, low_rank=LowRank(2, 2, 16))
    names = []
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            attention = Attention(shape, torch.zeros(4, 8, dtype=torch.bool), device=device).train()
            with Count() as count:
                attention(torch.empty(2, 16, 3, 3, device=device))
            names.append(count.names)
    assert names[0] == names[1]
    assert len(names[0]) == BRANCH["forward"]


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

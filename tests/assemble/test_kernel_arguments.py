"""Compiled operators refuse what they cannot take, by name, before they touch any memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kernels import COMPILED
from kernelwarehouse.assemble.build import panel_width

pytestmark = pytest.mark.skipif(not COMPILED, reason="there are no compiled kernels")

BATCH, GROUPS, CELLS, CELL, HIDDEN = 2, 3, 5, 8, 4
GRID = torch.arange(5 * 6).view(5, 6)  # 3 x 4 places, padded by one
TABLES = {
    "targets": GRID[1:-1, 1:-1].flatten(),
    "padded_places": GRID.numel(),
    "places": GRID[:-2, :-2].flatten(),
    "shifts": GRID[:3, :3].flatten(),
}
BASIS = {
    "hidden": torch.randn(BATCH, HIDDEN),
    "scale": torch.randn(BATCH, GROUPS, 9),
    "basis": torch.randn(GROUPS, 9, HIDDEN, CELL, CELL),
    "low": None,
    "steps": None,
}
COMPACT = {
    "basis": torch.ones(GROUPS, 9, HIDDEN, CELL, CELL, dtype=torch.int16),
    "steps": torch.ones(GROUPS, 9, HIDDEN),
}
SPLIT = COMPACT | {"low": torch.ones(GROUPS, 9, HIDDEN, CELL, CELL, dtype=torch.uint8)}
PANEL = panel_width() if COMPILED else 16
PANELS = {"basis": torch.randn(GROUPS, 9, 2, CELL, HIDDEN, PANEL)}
X = {"x": torch.randn(BATCH, CELL, 3, 4)}
BRANCH = {
    "fc1": torch.randn(HIDDEN, CELL),
    "norm_weight": torch.ones(HIDDEN),
    "norm_bias": torch.zeros(HIDDEN),
    "mean": torch.zeros(HIDDEN),
    "variance": torch.ones(HIDDEN),
    "norm_epsilon": 1e-5,
    "fc2": torch.randn(GROUPS * (CELLS + 1), HIDDEN),
    "fc2_bias": torch.zeros(GROUPS * (CELLS + 1)),
    "mixtures": GROUPS,
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "taps": (
        "forward_taps",
        X
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | TABLES
        | {"channels_last": False},
    ),
    "channels last": (
        "forward_taps",
        {"x": torch.randn(BATCH, 12, CELL)}
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | TABLES
        | {"channels_last": True},
    ),
    "pointwise": (
        "forward_pointwise",
        X | {"attention": torch.randn(BATCH, GROUPS, 1, CELLS), "cells": torch.randn(CELLS, CELL, CELL, 1, 1)},
    ),
    "basis": ("forward_taps_basis", X | BASIS | TABLES | {"channels_last": False}),
    "compact basis": ("forward_taps_basis", X | BASIS | COMPACT | TABLES | {"channels_last": False}),
    "24-bit basis": ("forward_taps_basis", X | BASIS | SPLIT | TABLES | {"channels_last": False}),
    "panels": ("forward_taps_basis", X | BASIS | PANELS | TABLES | {"channels_last": False}),
    "compact panels": (
        "forward_taps_basis",
        X | BASIS | COMPACT | {"basis": PANELS["basis"].to(torch.int16)} | TABLES | {"channels_last": False},
    ),
    "winograd panels": (
        "forward_winograd_basis",
        X | BASIS | PANELS | {"padding": (1, 1), "channels_last": False},
    ),
    "pointwise basis": (
        "forward_pointwise_basis",
        X | BASIS | {"scale": torch.randn(BATCH, GROUPS, 1), "basis": torch.randn(GROUPS, 1, HIDDEN, CELL, CELL)},
    ),
    "backward": (
        "backward_taps",
        {"grad": torch.randn(BATCH, GROUPS * CELL, 12), "x": torch.randn(BATCH, CELL, 12)}
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | TABLES
        | {"dense": True, "wants_input": True, "total": torch.zeros(CELLS, CELL, CELL)},
    ),
    "planes backward": (
        "backward_planes",
        {"grad": torch.randn(BATCH, GROUPS * CELL, 3, 4)}
        | X
        | {"attention": torch.randn(BATCH, GROUPS, 1, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | {"wants_input": True, "total": torch.zeros(CELLS, CELL, CELL)},
    ),
    "winograd": (
        "forward_winograd",
        X
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | {"padding": (1, 1), "channels_last": False},
    ),
    "winograd, channels last": (
        "forward_winograd",
        {"x": torch.randn(BATCH, 3, 4, CELL)}
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | {"padding": (1, 1), "channels_last": True},
    ),
    "winograd basis": ("forward_winograd_basis", X | BASIS | {"padding": (1, 1), "channels_last": False}),
    "winograd 24-bit basis": (
        "forward_winograd_basis",
        X | BASIS | SPLIT | {"padding": (1, 1), "channels_last": False},
    ),
    "winograd backward": (
        "backward_winograd",
        {"grad": torch.randn(BATCH, GROUPS * CELL, 3, 4)}
        | X
        | {"attention": torch.randn(BATCH, GROUPS, 9, CELLS), "cells": torch.randn(CELLS, CELL, CELL)}
        | {"padding": (1, 1), "wants_input": True, "total": torch.zeros(CELLS, CELL, CELL)},
    ),
    "depthwise": (
        "forward_depthwise",
        X
        | {"attention": torch.randn(BATCH, 1, 9, CELLS), "cells": torch.randn(CELLS, CELL, 1)}
        | {"out_size": (3, 4), "padding": (1, 1), "dilation": (1, 1), "stride": (1, 1)},
    ),
    "depthwise gradient": (
        "depthwise_kernel_gradient",
        {"grad": torch.randn(BATCH, CELL, 3, 4)}
        | X
        | {"cell": CELL, "padding": (1, 1), "dilation": (1, 1), "stride": (1, 1)},
    ),
    "depthwise input gradient": (
        "depthwise_input_gradient",
        {"grad": torch.randn(BATCH, CELL, 3, 4), "attention": torch.randn(BATCH, 1, 9, CELLS)}
        | {"cells": torch.randn(CELLS, CELL, 1), "channels": CELL, "size": (3, 4)}
        | {"padding": (1, 1), "dilation": (1, 1), "stride": (1, 1)},
    ),
    "attention": (
        "attention",
        X
        | BRANCH
        | {"beta": torch.zeros(GROUPS, CELLS, dtype=torch.bool), "temperature": torch.tensor(2**61)}
        | {"temperature_unit": 2**-62, "epsilon": 1e-3},
    ),
    "coefficients": ("attention_coefficients", X | BRANCH | {"epsilon": 1e-3}),
}
TENSORS = [
    (name, argument)
    for name, (_, arguments) in CALLS.items()
    for argument, value in arguments.items()
    if isinstance(value, Tensor)
]


# Sizes that nothing else has to fit: of images where no table tells their places, of the output, and of the batch where
# only weights are given beside it.
FREE = {
    *(
        (name, "x", axis)
        for name in ("pointwise", "pointwise basis", "depthwise", "depthwise gradient")
        for axis in (2, 3)
    ),
    *(
        (name, "x", axis)
        for name in ("winograd", "winograd basis", "winograd 24-bit basis", "winograd panels")
        for axis in (2, 3)
    ),
    *(
        (name, "basis", 2)
        for name in ("panels", "compact panels", "winograd panels")  # output channels
    ),
    *(("winograd, channels last", "x", axis) for axis in (1, 2)),
    *(
        (name, "attention", 1)
        for name in ("taps", "channels last", "pointwise", "depthwise", "winograd", "winograd, channels last")
    ),
    *(
        (name, "places", 0)
        for name in ("taps", "channels last", "basis", "24-bit basis", "compact basis", "panels", "compact panels")
    ),
    *((name, "grad", axis) for name in ("depthwise gradient", "depthwise input gradient") for axis in (2, 3)),
    *((name, "x", axis) for name in ("attention", "coefficients") for axis in (0, 2, 3)),
}


def call(name: str, **changed: Any) -> Any:
    operator, arguments = CALLS[name]
    return getattr(torch.ops.kernelwarehouse, operator)(**(arguments | changed))


@pytest.mark.parametrize("name", CALLS)
def test_good_calls_are_taken(name: str) -> None:
    """Otherwise the others could not tell what they are refused for."""
    results = call(name)
    for result in results if isinstance(results, tuple) else [results]:
        assert result is None or result.isfinite().all()


def longer(tensor: Tensor, axis: int) -> Tensor:
    return torch.cat([tensor, tensor.narrow(axis, tensor.shape[axis] - 1, 1)], axis)


@pytest.mark.parametrize("name, argument", TENSORS)
def test_other_sizes_are_refused(name: str, argument: str) -> None:
    """Also where another argument is the one that is named, as it does not fit any more."""
    given = CALLS[name][1][argument]
    fixed = [axis for axis in range(given.dim()) if (name, argument, axis) not in FREE]
    others = [longer(given, axis) for axis in fixed] + ([given.flatten()[:-1]] if fixed else [])
    for other in others:
        with pytest.raises(ValueError, match=r" wanted| do not follow|no multiple of|for \d+ (taps|mixtures)"):
            call(name, **{argument: other})


@pytest.mark.parametrize("name, argument", TENSORS)
def test_nothing_is_refused(name: str, argument: str) -> None:
    """Loops divide by sizes."""
    given = CALLS[name][1][argument]
    for axis in range(given.dim()):
        with pytest.raises(ValueError, match=r" wanted| do not follow| logits for "):
            call(name, **{argument: given.narrow(axis, 0, 0).contiguous()})


@pytest.mark.parametrize("name, argument", TENSORS)
def test_other_types_and_orders_are_refused(name: str, argument: str) -> None:
    given = CALLS[name][1][argument]
    if argument in ("fc1", "fc2") or (argument == "x" and name in ("attention", "coefficients")):
        with pytest.raises(
            RuntimeError, match=r"expected scalar type Float|same dtype"
        ):  # as torch's own functions say
            call(name, **{argument: given.double()})
        return  # and these take what lies otherwise
    with pytest.raises(ValueError, match=f"^{argument} is Double of sizes"):
        call(name, **{argument: given.double()})
    if given.dim() == 0:
        return
    spread = torch.stack([given, given], -1)[..., 0]
    assert not spread.is_contiguous()
    with pytest.raises(ValueError, match=f"^{argument} is .* and strides .*contiguous"):
        call(name, **{argument: spread})


@pytest.mark.parametrize("table", ["targets", "places", "shifts"])
@pytest.mark.parametrize("change", [lambda rows: rows - 1 - rows.max(), lambda rows: rows + GRID.numel()])
def test_rows_that_are_not_there_are_refused(table: str, change: Callable[[Tensor], Tensor]) -> None:
    for name in ("taps", "channels last", "basis", "backward"):
        with pytest.raises(ValueError, match=f"{table} are not rows from 0 to"):
            call(name, **{table: change(CALLS[name][1][table])})


def test_rows_beyond_the_last_that_a_kernel_reaches_from_are_refused() -> None:
    places = TABLES["places"].clone()
    places[-1] = GRID.numel() - int(TABLES["shifts"][-1])
    with pytest.raises(ValueError, match="places are not rows from 0 to 15"):
        call("backward", places=places)
    with pytest.raises(ValueError, match="shifts end with 0, which is not the largest"):
        call("taps", shifts=TABLES["shifts"].flip(0))


@pytest.mark.parametrize("name", ["taps", "pointwise"])
def test_cells_that_do_not_fill_vectors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cells are 12 channels wide; multiples of 8 are wanted"):
        call(name, cells=torch.randn(CELLS, 12, CELL))


def test_panels_are_for_several_kernel_positions() -> None:
    one = torch.randn(GROUPS, 1, 2, CELL, HIDDEN, PANEL)
    with pytest.raises(ValueError, match=r"basis of sizes \[3, 1, 2, 8, 4, \d+\] is in panels"):
        call("pointwise basis", basis=one)


def test_last_bits_go_with_steps_and_without_panels() -> None:
    with pytest.raises(ValueError, match="low is given without steps"):
        call("basis", low=SPLIT["low"])
    with pytest.raises(ValueError, match="low is given for a basis in panels"):
        call("compact panels", low=SPLIT["low"])


@pytest.mark.parametrize(
    "option, value",
    [
        ("stride", (3, 1)),
        ("stride", (1, 0)),
        ("dilation", (0, 1)),
        ("padding", (1, -1)),
        ("padding", (3, 1)),
        ("stride", (1,)),
        ("dilation", (1, 1, 1)),
        ("dilation", (1 << 30, 1)),
    ],
)
def test_depthwise_options_are_checked(option: str, value: tuple[int, int]) -> None:
    for name in ("depthwise", "depthwise gradient", "depthwise input gradient"):
        with pytest.raises(ValueError, match="two numbers each are wanted: strides of 1 or 2"):
            call(name, **{option: value})


@pytest.mark.parametrize("size", [(3,), (0, 4), (3, 1 << 30)])
def test_sizes_of_depthwise_inputs_are_checked(size: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"size.*2 |two numbers each are wanted"):
        call("depthwise input gradient", size=size)


@pytest.mark.parametrize("channels", [0, -1, 3, 2 * CELL])
def test_channels_of_depthwise_inputs_are_checked(channels: int) -> None:
    with pytest.raises(ValueError, match=f"{CELL} output channels are no multiple of {channels}"):
        call("depthwise input gradient", channels=channels)


@pytest.mark.parametrize("padding", [(1,), (1, 1, 1), (1, -1), (1 << 31, 1), (0, 1 << 30), (2**31 - 2,) * 2])
def test_padding_for_winograd_is_checked(padding: tuple[int, ...]) -> None:
    for name in ("winograd", "winograd basis", "winograd backward"):
        with pytest.raises((ValueError, RuntimeError), match=r"padding|padded by"):
            call(name, padding=padding)


def test_images_that_a_kernel_does_not_fit_into_are_refused() -> None:
    with pytest.raises(ValueError, match=r"images of 2x4 padded by \[0, 0\] do not fit a kernel of 3x3"):
        call("winograd", x=torch.randn(BATCH, CELL, 2, 4), padding=(0, 0))


def test_rows_are_counted_without_an_overflow() -> None:
    with pytest.raises(ValueError, match="padded_places are 576460752303423489"):
        call("taps", padded_places=2**59 + 1)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_other_devices_find_no_kernel(name: str) -> None:
    elsewhere = {key: value.to("meta") for key, value in CALLS[name][1].items() if isinstance(value, Tensor)}
    with pytest.raises(NotImplementedError, match="Meta"):
        call(name, **elsewhere)

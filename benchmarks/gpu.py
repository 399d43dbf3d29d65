"""The one command for a person with a GPU: are all strategies right there, and which is the fastest for every layer?

First every strategy is compared with the plain definition in float64 on the CPU, outputs and gradients. Then every
candidate for every layer of the networks is timed, and the choices are written as a table that the route reads: into
the machine's own file, or with `--out` into one for `KERNELWAREHOUSE_ROUTES`. `--paper` needs no GPU: it counts
launches and bytes on fake tensors. `--device cpu` runs the same code on the CPU, for a try, whose few runs must not
choose for the machine: it wants `--out`.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.cases import MODES, converted_network
from benchmarks.launches import count_network, total
from benchmarks.routing import Place, places
from kernelwarehouse._files import write_file
from kernelwarehouse.assemble import STRATEGIES, Geometry, route, route_table, routing
from kernelwarehouse.assemble.measure import Times, choose
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.partition import Partition

NETWORKS = ("kw1x_resnet18", "kw1x_resnet50", "kw1x_mobilenetv2_100", "kw1x_convnext_tiny", "kw1x_deit_small")
BATCHES = (64, 128)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}
LAYOUTS = {"contiguous": False, "channels_last": True}

# Errors relative to the length of the exact result; float32 without TF32.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}


def _conv(kernel: tuple[int, ...], cell: tuple[int, ...], stride: int = 1, groups: int = 1) -> Geometry:
    axes = len(kernel) - 2
    return Geometry(
        Partition(kernel, cell), (stride,) * axes, tuple(size // 2 for size in kernel[2:]), (1,) * axes, groups
    )


LAYERS = {
    "3x3": (_conv((32, 16, 3, 3), (16, 16, 1, 1)), (9, 7)),
    "3x3, stride 2": (_conv((32, 16, 3, 3), (16, 8, 1, 1), 2), (9, 7)),
    "3x3, whole cells": (_conv((16, 16, 3, 3), (8, 16, 3, 3)), (6, 6)),
    "3x3, depth-wise": (_conv((16, 1, 3, 3), (16, 1, 1, 1), 1, 16), (9, 7)),
    "1x1": (_conv((32, 16, 1, 1), (16, 8, 1, 1)), (9, 7)),
    "1x1, stride 2": (_conv((32, 16, 1, 1), (32, 8, 1, 1), 2), (9, 7)),
    "1d": (_conv((16, 8, 5), (8, 8, 1)), (11,)),
    "linear": (Geometry(Partition((32, 16), (16, 8))), (7,)),
}


@dataclass(frozen=True)
class Check:
    """How a strategy compares with the definition: the largest error, and where; or what went wrong."""

    strategy: str
    dtype: str
    layers: int
    error: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCES[self.dtype]


def check(strategy: Strategy, dtype: str, device: torch.device) -> Check:
    """All layers that a strategy can evaluate, in both layouts."""
    worst, where, layers = 0.0, "", 0
    for name, (geometry, space) in LAYERS.items():
        for layout, last in LAYOUTS.items():
            x, mixing, cells = _inputs(geometry, space, strategy, DTYPES[dtype])
            if last and geometry.spatial_axes:
                x = x.movedim(1, -1).contiguous().movedim(-1, 1)
            x, cells, mixing = x.to(device), cells.to(device), tuple(part.to(device) for part in mixing)
            if strategy.mixing == "weights" and strategy.obstacle(x, geometry) is not None:
                continue
            layers += 1
            try:
                error = _error(strategy, x, mixing, cells, geometry)
            except (RuntimeError, NotImplementedError) as failure:
                return Check(strategy.name, dtype, layers, float("inf"), f"{name}, {layout}: {failure}")
            if math.isnan(error):  # nothing is larger, and nothing finite may come after it
                return Check(strategy.name, dtype, layers, error, f"{name}, {layout}")
            if error > worst:
                worst, where = error, f"{name}, {layout}"
    return Check(strategy.name, dtype, layers, worst, where)


def _inputs(
    geometry: Geometry, space: tuple[int, ...], strategy: Strategy, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, count, units, partition = 6, 9, 3, geometry.partition

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x = (
        draw(batch, geometry.in_channels, *space)
        if geometry.spatial_axes
        else draw(batch, *space, geometry.in_channels)
    )
    if strategy.mixing == "weights":
        mixing: tuple[Tensor, ...] = (draw(batch, partition.mixtures, count),)
    else:
        mixing = draw(batch, partition.mixtures, units), draw(partition.mixtures, units, count)
    return x, mixing, draw(count, *partition.cell_shape)


def _error(strategy: Strategy, x: Tensor, mixing: tuple[Tensor, ...], cells: Tensor, geometry: Geometry) -> float:
    exact = [tensor.cpu().double().requires_grad_() for tensor in (x, *mixing, cells)]
    weights = exact[1] if len(mixing) == 1 else torch.matmul(exact[1].transpose(0, 1), exact[2]).transpose(0, 1)
    expected = STRATEGIES["plain"].forward(exact[0], weights, exact[-1], geometry)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    if strategy.backward is None:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *mixing, cells)]
        out = strategy.forward(*leaves, geometry)
        found = [out, *torch.autograd.grad(out, leaves, grad.to(x.device))]
    else:
        with torch.no_grad():
            out = strategy.forward(x, *mixing, cells, geometry)
            found = [out, *strategy.backward(grad.to(x.device), x, *mixing, cells, geometry, True)]
    errors = [
        (got.detach().cpu().double() - right).norm() / right.norm() for got, right in zip(found, wanted, strict=True)
    ]
    return torch.stack(errors).max().item()  # NaN where one is, which Python's own may pass over


def milliseconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The fastest of some runs after one that does not count."""
    run()
    best = float("inf")
    for _ in range(rounds):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            run()
            best = min(best, 1e3 * (time.perf_counter() - begun))
    return best


def time_layer(place: Place, x: Tensor, mode: str, rounds: int, console: Console) -> tuple[str, Times, Choice | None]:
    """The name of calls that are alike, times of every candidate, and the choice; of what fails there is no time."""
    layer, geometry, shape = place.layer, place.layer.geometry, place.layer.attention.shape
    tokens = x if geometry.spatial_axes else x.reshape(len(x), -1, x.shape[-1])
    cells = x.new_ones(shape.cells, *geometry.partition.cell_shape)
    training = mode == "training"
    asked = routing.ask(tokens, cells, geometry, layer.attention, training=training, wants_input=training)
    forward, backward = {}, {}
    for strategy in routing._candidates(tokens, asked):
        name, mixtures = strategy.name, shape.mixtures
        mixing = (
            (x.new_full((len(x), mixtures, shape.cells), 0.1),)
            if strategy.mixing == "weights"
            else (
                x.new_full((len(x), mixtures, shape.units), 0.1),
                x.new_full((mixtures, shape.units, shape.cells), 0.1),
            )
        )
        given = tokens, *mixing, cells
        try:
            with torch.no_grad():
                taken = milliseconds(lambda s=strategy, g=given: s.forward(*g, geometry), x.device, rounds)  # type: ignore[misc]
                if training:
                    grad = torch.ones_like(strategy.forward(*given, geometry))
                    backward[name] = milliseconds(
                        lambda s=strategy, g=given, d=grad: s.backward(d, *g, geometry, True),  # type: ignore[misc]
                        x.device,
                        rounds,
                    )
            forward[name] = taken
        except (RuntimeError, NotImplementedError) as failure:  # no memory, most of all: others may do with less
            console.print(f"{place.name} {asked.key()}: {name} fails: {failure}", style="red", highlight=False)
    times = Times(forward, backward)
    if not any(STRATEGIES[name].mixing == "weights" for name in forward):
        return asked.key(), times, None
    usual = route(tokens, cells, geometry, layer.attention, training=training, wants_input=training)
    return asked.key(), times, choose(times, Choice(usual.forward, usual.backward), STRATEGIES)


def inputs(place: Place, chosen: argparse.Namespace) -> Iterator[tuple[Tensor, str]]:
    """What a layer is timed on: every batch, type, layout and mode."""
    device = torch.device(chosen.device)
    for batch in chosen.batch:
        for dtype in chosen.dtype:
            for layout in chosen.layout if place.layer.geometry.spatial_axes else ["contiguous"]:
                x = torch.randn(batch, *place.shape, device=device).to(DTYPES[dtype])
                if LAYOUTS[layout]:
                    x = x.movedim(1, -1).contiguous().movedim(-1, 1)
                for mode in chosen.mode:
                    yield x, mode


def check_all(chosen: argparse.Namespace, console: Console) -> bool:
    table = Table(title=f"every strategy on {chosen.device}, beside the definition in float64", title_justify="left")
    for column in ("strategy", "type", "layers", "largest error", ""):
        table.add_column(column)
    passed = True
    for strategy in STRATEGIES.values():
        for dtype in ("float64", *chosen.dtype):
            found = check(strategy, dtype, torch.device(chosen.device))
            if found.layers:
                passed = passed and found.passed
                verdict = "[green]pass[/]" if found.passed else "[red]FAIL[/]"
                table.add_row(found.strategy, dtype, str(found.layers), f"{found.error:.1e} ({found.where})", verdict)
    console.print(table)
    return passed


def time_all(chosen: argparse.Namespace, console: Console) -> None:
    choices: dict[str, Choice] = {}
    for preset in chosen.preset:
        with torch.device("meta"):
            model = converted_network(preset)
        for place in places(model, _side(preset)):
            for x, mode in inputs(place, chosen):
                key, times, choice = time_layer(place, x, mode, chosen.rounds, console)
                if choice is None:
                    continue
                choices[key] = choice
                ways = (
                    choice.forward
                    if choice.backward in (None, choice.forward)
                    else f"{choice.forward}, {choice.backward}"
                )
                slower = {
                    name: f"{taken:.3g}" + (f" + {times.backward[name]:.3g}" if times.backward else "")
                    for name, taken in times.forward.items()
                }
                console.print(f"{preset} {place.name} {key}: [bold]{ways}[/]; ms {slower}", highlight=False)
        # After every network: a long run that is broken off has measured something.
        write(choices, chosen.out, torch.device(chosen.device), console)
        del model
        gc.collect()
        if chosen.device.startswith("cuda"):
            torch.cuda.empty_cache()


def write(choices: dict[str, Choice], out: Path | None, device: torch.device, console: Console) -> None:
    """Into a file of its own, or beside what is known of the machine."""
    if out is not None:
        write_file(out, json.dumps(route_table.to_json(choices), indent=1) + "\n")
        console.print(f"{len(choices)} choices are in {out}; KERNELWAREHOUSE_ROUTES={out} takes them and no others")
        return
    for key, choice in choices.items():
        route_table.remember(key, choice)
    place = route_table.machine_file(device.type) or "no file"
    console.print(f"{len(choices)} choices are kept for this machine in {place}")


def paper(chosen: argparse.Namespace, console: Console) -> None:
    """Launches and bytes of the strategies that the rule takes on a GPU, and launches of attention branches beside."""
    table = Table(title="one training step on a GPU, counted on fake tensors", title_justify="left")
    for column in (
        "network",
        "batch",
        "type",
        "layout",
        "launches",
        "most of a layer",
        "launches of branches",
        "GB moved",
        "peak of a layer, GB",
    ):
        table.add_column(column, justify="right" if "GB" in column or "l" in column else "left")
    for preset in chosen.preset:
        with torch.device("meta"):
            found = places(converted_network(preset), _side(preset))
        for batch in chosen.batch:
            for dtype in chosen.dtype:
                for layout in chosen.layout:
                    rows = count_network(found, batch, DTYPES[dtype], LAYOUTS[layout])
                    most = " + ".join(str(max(row.launches[way] for row in rows)) for way in (0, 1))
                    launches, branches, moved = (
                        total(rows, lambda row: sum(row.launches)),
                        total(rows, lambda row: sum(row.branch)),
                        total(rows, lambda row: sum(row.moved)),
                    )
                    peak = max(row.peak for row in rows)
                    table.add_row(
                        preset,
                        str(batch),
                        dtype,
                        layout,
                        str(launches),
                        most,
                        str(branches),
                        f"{moved / 1e9:.0f}",
                        f"{peak / 1e9:.2f}",
                    )
    console.print(table)


def _side(preset: str) -> int:
    return 32 if preset.endswith("small_resnet") else 224


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", nargs="*", default=list(NETWORKS), help="none: correctness only")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=10, help="runs of which the fastest counts")
    parser.add_argument("--tf32", action="store_true", help="time float32 products of matrices with TF32")
    parser.add_argument("--paper", action="store_true", help="count launches and bytes, without a GPU")
    parser.add_argument("--out", type=Path, help="a file of choices; without it, that of this machine")
    chosen = parser.parse_args(arguments)
    console = Console()
    if chosen.paper:
        paper(chosen, console)
        return
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --device cpu --out FILE tries the command, --paper counts without one")
    if not chosen.device.startswith("cuda") and chosen.preset and chosen.out is None:
        parser.error(f"--device {chosen.device} is for a try: name a file with --out, or its times would choose here")
    convolutions = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    passed = check_all(chosen, console)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = chosen.tf32, convolutions
    if not passed:
        raise SystemExit("a strategy is wrong on this device: nothing was timed; please report the table above")
    if chosen.preset:
        time_all(chosen, console)


if __name__ == "__main__":
    main()

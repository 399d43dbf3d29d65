"""Where the time goes: every converted layer against the static layer in its place.

    python -m benchmarks.breakdown kw1x_mobilenetv2_100 --batch 1
    python -m benchmarks.breakdown kw4x_resnet18 --batch 1 --prepare 2000000000
    python -m benchmarks.breakdown kw1x_small_resnet --mode training --batch 128 --operators 20

Layers are timed where they stand, by hooks, the two networks in turns, after two steps that are not counted.
In training that is their forward pass, beside the ways that both passes took; `--operators` shows what forward and
backward are made of.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

import kernelwarehouse as kw
from benchmarks.cases import MODES, Case, converted_network, runner, static_network, way_taken
from benchmarks.speed import WARM_UPS
from kernelwarehouse.costs import layer_costs

Runs = dict[str, Callable[[], None]]


class Stopwatch:
    """Times of the named modules of a model; the name "" is the model itself."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._started: dict[str, float] = {}
        self._taken: dict[str, list[float]] = defaultdict(list)
        for name in names:
            self._watch(model.get_submodule(name), name)

    def _watch(self, module: nn.Module, name: str) -> None:
        def start(*_: object) -> None:
            self._started[name] = time.perf_counter()

        def stop(*_: object) -> None:
            self._taken[name].append(time.perf_counter() - self._started[name])

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)

    def milliseconds(self, name: str) -> float:
        return 1e3 * statistics.median(self._taken[name])


def layer_table(case: Case, models: dict[str, nn.Module], runs: Runs, rounds: int, most: int) -> Table:
    """The layers that cost most above the static ones, and sums."""
    example = torch.randn(case.batch, 3, case.image, case.image)
    costs = {cost.layer: cost for cost in layer_costs(models["ours"], example, case.mode == "training")}
    for _ in range(WARM_UPS):
        for run in runs.values():
            run()
    watches = {way: Stopwatch(model, ["", *costs]) for way, model in models.items()}
    for _ in range(rounds):
        for run in runs.values():
            run()
    times = {name: [watch.milliseconds(name) for watch in watches.values()] for name in ["", *costs]}
    table = Table(title=f"{case.name}: milliseconds of forward, medians of {rounds}", title_justify="left")
    for column in ("layer", "kernel", "how", "mixing (MMAC)", "product (MMAC)", "static", "ours", "more"):
        table.add_column(column, justify="left" if column in ("layer", "kernel", "how") else "right")

    def add(title: str, kernel: str, how: str, mixing: float, product: float, static: float, ours: float) -> None:
        work = (f"{mixing / 1e6:,.1f}", f"{product / 1e6:,.1f}")
        table.add_row(title, kernel, how, *work, f"{static:.3f}", f"{ours:.3f}", f"{ours - static:.3f}")

    for name in sorted(costs, key=lambda name: times[name][0] - times[name][1])[:most]:
        cost, layer = costs[name], models["ours"].get_submodule(name)
        kernel = "x".join(map(str, layer.geometry.partition.kernel_shape))
        add(name, kernel, way_taken(layer), cost.mixing, cost.product, *times[name])
    table.add_section()
    mixing, product = (sum(getattr(cost, part) for cost in costs.values()) for part in ("mixing", "product"))
    add(
        f"all {len(costs)} layers",
        "",
        "",
        mixing,
        product,
        *(sum(times[name][way] for name in costs) for way in (0, 1)),
    )
    add("the network", "", "", mixing, product, *times[""])
    return table


def operator_table(title: str, run: Callable[[], None], rounds: int, most: int) -> Table:
    """The operators that take the processor longest in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(rounds):
            run()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    table = Table(title=f"{title}: operators of a step", title_justify="left")
    for column in ("operator", "calls", "milliseconds"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for event in events[:most]:
        table.add_row(event.key, f"{event.count / rounds:.0f}", f"{event.self_cpu_time_total / 1e3 / rounds:.2f}")
    table.add_section()
    table.add_row("all", "", f"{sum(event.self_cpu_time_total for event in events) / 1e3 / rounds:.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.breakdown", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset")
    parser.add_argument("--mode", choices=MODES, default="inference")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prepare", type=int, help="memory limit of prepare_inference in bytes, for inference")
    parser.add_argument("--compact", action="store_true", help="with --prepare: bases in 16 bits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=20, help="so many are shown (%(default)s)")
    parser.add_argument("--operators", type=int, default=0, help="show so many operators as well")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    case = Case(chosen.preset, chosen.mode, chosen.batch, chosen.prepare if chosen.mode == "inference" else None)
    models = {"static": static_network(case.preset), "ours": converted_network(case.preset)}
    runs = {way: runner(model, way, case.mode, case.batch, case.image) for way, model in models.items()}
    if case.prepared:
        kw.prepare_inference(models["ours"], case.prepared, case.batch, chosen.compact)
    console = Console()
    if chosen.operators:
        for way, run in runs.items():
            for _ in range(WARM_UPS):
                run()
            console.print(operator_table(f"{case.name}, {way}", run, chosen.rounds, chosen.operators))
    console.print(layer_table(case, models, runs, chosen.rounds, chosen.layers))


if __name__ == "__main__":
    main()

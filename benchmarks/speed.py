"""Time of a step: static network, plain definition (how the published code works) and ours, interleaved in one process.

Without arguments, the cases that the project has targets for. With `--preset`, any network, mode and batch.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

import kernelwarehouse as kw
from benchmarks import results
from benchmarks.cases import (
    MODES,
    SPEED,
    Case,
    add_arguments,
    chosen_cases,
    chosen_ways,
    converted_network,
    runner,
    static_network,
)

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def interleave(
    runs: dict[str, Callable[[], None]], seconds: float, fewest: int, clock: str = "wall"
) -> dict[str, list[float]]:
    """Times of each, taken in turns, so that what else the machine does hits all alike. The first round warms up.

    Every other round runs backwards: what comes right after the plain definition finds caches and heap as that has left
    them, and this should hit the first and the last alike. The processor's clock counts what all threads have computed,
    and not what they waited for a shared machine.
    """
    now = CLOCKS[clock]
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {way: [] for way in runs}
    end = time.perf_counter() + seconds
    order = list(runs)
    while len(times[order[0]]) < fewest or time.perf_counter() < end:
        for way in order:
            start = now()
            runs[way]()
            times[way].append(now() - start)
        order.reverse()
    return times


def measure(case: Case, ways: Sequence[str], seconds: float, fewest: int, clock: str) -> dict[str, Any]:
    """Median milliseconds of each way and their ratios to the static network."""
    torch.manual_seed(0)
    static, converted = static_network(case.preset), converted_network(case.preset)
    models = {"static": static, "plain": converted, "ours": converted}
    runs = {way: runner(models[way], way, case.mode, case.batch, case.image) for way in ways}
    prepared = kw.prepare_inference(converted, case.prepared, case.batch) if case.prepared else None
    times = interleave(runs, seconds, fewest, clock)
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    return {
        **case.facts(),
        "prepared": str(prepared) if prepared else None,
        "rounds": len(times["static"]),
        "milliseconds": {way: round(1e3 * median, 2) for way, median in medians.items()},
        "fastest": {way: round(1e3 * min(taken), 2) for way, taken in times.items()},
        "ratio": {way: round(medians[way] / medians["static"], 3) for way in ways if way != "static"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    add_arguments(parser, MODES, [1, 16])
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=20, help="time for a case, at least")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a case, at least")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    whole = not chosen.preset and not chosen.only
    out = chosen.out or (results.FOLDER / f"speed-{chosen.threads}.json" if whole else None)
    console, rows = Console(), []
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    for case in chosen_cases(chosen, SPEED):
        rows.append(measure(case, chosen_ways(chosen), chosen.seconds, chosen.rounds, chosen.clock))
        console.print(f"{case.name}: {rows[-1]['milliseconds']} ms, ratios {rows[-1]['ratio']}")
        if out:  # after every case: a long run that is broken off has measured something
            results.write(out, {"machine": facts, "rows": rows})
        gc.collect()
    title = f"time relative to the static network, {chosen.threads} thread(s)"
    console.print(results.ratio_table(rows, "milliseconds", title))


if __name__ == "__main__":
    main()

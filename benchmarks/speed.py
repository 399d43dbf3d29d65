"""Time of a step: static network, ours, and the plain definition (how the published code works).

Without arguments, the cases that the project has targets for, which takes about half an hour (less with `--ways static
ours`). With `--preset`, any network, mode and batch.

Static and ours take turns in one process. The static network is also measured alone, in a process of its own, as
whatever runs beside it costs it time; the smaller of its two medians is what all are compared with. That process takes
its turns among the others: what else a machine does changes within minutes, and should hit all alike. The plain
definition follows in a few rounds, for information: among the others it would slow down both.

Every way does two whole steps first that are not counted, so that what is done on first use (memory is mapped, kernels
are compiled, the way a layer is evaluated is chosen) is not part of the figures; the plain definition does one, as it
has nothing to choose.
"""

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console

import kernelwarehouse as kw
from benchmarks import child, results, tables
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
    ways_taken,
)

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
WARM_UPS = 2
PLAIN_ROUNDS = 3
REST = 0.05  # seconds: threads of OpenMP look for more work for some milliseconds before they let the core go

ALONE = "static alone"

Times = dict[str, list[float]]


def interleave(
    runs: dict[str, Callable[[], None]],
    seconds: float,
    fewest: int,
    clock: str = "wall",
    elsewhere: Mapping[str, Callable[[], float]] | None = None,
    pages: dict[str, list[int]] | None = None,
) -> Times:
    """Times of each, taken in turns, so that what else the machine does hits all alike, after `WARM_UPS` steps of each.

    Every other round runs backwards: what comes right after another finds caches and heap as that has left them, and
    this should hit the first and the last alike. The processor's clock counts what all threads have computed, and not
    what they waited for a shared machine.

    What runs elsewhere says itself how long it took. Nothing of it is to be seen here: threads that still look for work
    are waited for, there and here, and a step that is not counted brings back what it has driven out of the caches.

    `pages` gets how many pages of memory the system had to give in each step: what a heap has handed back is mapped
    again, and that takes time of its own.
    """
    for _ in range(WARM_UPS):
        for run in runs.values():
            run()
    elsewhere = elsewhere or {}
    times: Times = {way: [] for way in (*runs, *elsewhere)}
    end = time.perf_counter() + seconds
    order = list(runs)
    while len(times[order[0]]) < fewest or time.perf_counter() < end:
        for way in order:
            before = _pages()
            times[way].append(_seconds(runs[way], CLOCKS[clock]))
            if pages is not None:
                pages.setdefault(way, []).append(_pages() - before)
        order.reverse()
        for way, ask in elsewhere.items():
            time.sleep(REST)
            times[way].append(ask())
            time.sleep(REST)
            runs[order[0]]()
    return times


def _seconds(run: Callable[[], None], now: Callable[[], float]) -> float:
    start = now()
    run()
    return now() - start


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def few(run: Callable[[], None], seconds: float, most: int, clock: str = "wall") -> list[float]:
    """Times of so many steps at most, and of one at least, after one to warm up; none begins after the seconds."""
    now = CLOCKS[clock]
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (len(times) < most and time.perf_counter() < end):
        times.append(_seconds(run, now))
    return times


def take_turns(
    runs: dict[str, Callable[[], None]],
    seconds: float,
    fewest: int,
    clock: str,
    plain_rounds: int = PLAIN_ROUNDS,
    before_plain: Callable[[], None] = lambda: None,
    elsewhere: Mapping[str, Callable[[], float]] | None = None,
    pages: dict[str, list[int]] | None = None,
) -> Times:
    """Times of the ways: those that are compared in turns, and the plain definition after them."""
    compared = {way: run for way, run in runs.items() if way != "plain"}
    times = interleave(compared, seconds, fewest, clock, elsewhere, pages)
    before_plain()  # layers remember their last call
    if "plain" in runs:
        times["plain"] = few(runs["plain"], seconds, plain_rounds, clock)
    return times


def summary(times: Times, alone: Sequence[float]) -> dict[str, Any]:
    """Median milliseconds of each way, and their ratios to the faster of the two static medians."""
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    static = {"beside ours": medians["static"], "alone": statistics.median(alone)}
    medians["static"] = min(static.values())
    return {
        "rounds": {**{way: len(taken) for way, taken in times.items()}, "static alone": len(alone)},
        "milliseconds": {way: round(1e3 * median, 2) for way, median in medians.items()},
        "static milliseconds": {where: round(1e3 * median, 2) for where, median in static.items()},
        "fastest": {
            **{way: round(1e3 * min(taken), 2) for way, taken in times.items()},
            "static alone": round(1e3 * min(alone), 2),
        },
        "ratio": {way: round(medians[way] / medians["static"], 3) for way in times if way != "static"},
    }


def static_alone(case: Case, chosen: argparse.Namespace) -> AbstractContextManager[Callable[[], float]]:
    """A process that says how long a step of the static network takes whenever it is asked."""
    options = [*case.options(), "--threads", str(chosen.threads), "--clock", chosen.clock]
    return child.partner("speed", ["--static-alone", *options])


def answer_with_static_times(case: Case, clock: str) -> None:
    """Be that process: after a step that brings back what others have driven out of the caches."""
    torch.manual_seed(0)
    run = runner(static_network(case.preset, case.classes), "static", case.mode, case.batch, case.image, case.classes)
    for _ in range(WARM_UPS):
        run()
    for _ in sys.stdin:
        run()
        print(_seconds(run, CLOCKS[clock]), flush=True)


def measure(case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    with static_alone(case, chosen) as alone:
        alone()  # when it answers, it is ready and will do nothing while others are measured
        return measure_beside(alone, case, chosen)


def measure_beside(alone: Callable[[], float], case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    static, converted = static_network(case.preset, case.classes), converted_network(case.preset, case.classes)
    models = {"static": static, "plain": converted, "ours": converted}
    runs = {
        way: runner(models[way], way, case.mode, case.batch, case.image, case.classes) for way in chosen_ways(chosen)
    }
    prepared = kw.prepare_inference(converted, case.prepared, case.batch, case.compact) if case.prepared else None
    routes: dict[str, int] = {}
    pages: dict[str, list[int]] = {}
    times = take_turns(
        runs,
        chosen.seconds,
        chosen.rounds,
        chosen.clock,
        before_plain=lambda: routes.update(ways_taken(converted)),
        elsewhere={ALONE: alone},
        pages=pages,
    )
    given = {way: round(statistics.median(counts)) for way, counts in pages.items()}
    facts = {**case.facts(), "prepared": str(prepared) if prepared else None, "routes": routes, "pages": given}
    times_alone = times.pop(ALONE)
    return {**facts, **summary(times, times_alone)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, MODES, [1, 16])
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=6, help="time for a case, at least")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a case, at least")
    parser.add_argument("--static-alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    cases = chosen_cases(chosen, SPEED)
    if chosen.static_alone:
        answer_with_static_times(cases[0], chosen.clock)
        return
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    kept = chosen.out or len(cases) == len(SPEED)
    out = results.destination(f"speed-{chosen.threads}", facts, chosen.out) if kept else None
    console, rows = Console(), []
    for case in cases:
        rows.append(measure(case, chosen))
        found = rows[-1]
        console.print(
            f"{case.name}: {found['milliseconds']} ms, ratios {found['ratio']}, {found['rounds']} rounds, "
            f"pages given in a step {found['pages']}, static milliseconds {found['static milliseconds']}"
        )
        if out:  # after every case: a long run that is broken off has measured something
            results.write(out, {"machine": facts, "rows": rows})
        gc.collect()
    title = f"time relative to the static network, {facts['vector instructions']}, {chosen.threads} thread(s)"
    console.print(tables.ratios(rows, "milliseconds").rich(title))


if __name__ == "__main__":
    main()

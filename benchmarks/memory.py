"""Peak memory of a step above what imports take, each way in processes of its own.

The peak is that of all steps, the first one included: what is tried out on first use has to fit into memory as well.
How much freed memory the C library keeps differs from process to process, by a tenth and more: the median of several
counts, and the files of results have them all.
Without arguments, the cases that the project has targets for. With `--preset`, any network, mode and batch.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import kernelwarehouse as kw
from benchmarks import child, results, tables
from benchmarks.cases import (
    MEMORY,
    WAYS,
    Case,
    add_arguments,
    chosen_cases,
    chosen_ways,
    converted_network,
    runner,
    static_network,
)
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.compare.memory import status_bytes


def process_memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    found = status_bytes(field)
    if found is None:
        raise RuntimeError(f"the system does not tell {field}; memory can be measured on Linux only")
    return found


def peak_in_this_process(case: Case, way: str, steps: int) -> int:
    """Bytes: the most this process has held during the steps, without what it held before the network was made."""
    load_native()
    torch.manual_seed(0)
    before = process_memory("VmRSS")
    network = static_network if way == "static" else converted_network
    model = network(case.preset, case.classes)
    run = runner(model, way, case.mode, case.batch, case.image, case.classes)
    if case.prepared and way == "ours":
        kw.prepare_inference(model, case.prepared, case.batch, case.compact)
    for _ in range(steps):
        run()
    return process_memory("VmHWM") - before


def in_child(case: Case, way: str, threads: int, steps: int) -> int:
    options = ["--child", way, *case.options(), "--threads", str(threads), "--steps", str(steps)]
    return int(child.ask("memory", options)["bytes"])


def measure(case: Case, ways: Sequence[str], threads: int, steps: int, processes: int) -> dict[str, Any]:
    found: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(processes):
        for way in ways:
            found[way].append(in_child(case, way, threads, steps))
    peaks = {way: statistics.median(each) for way, each in found.items()}
    return {
        **case.facts(),
        "megabytes": {way: round(peak / 1e6, 1) for way, peak in peaks.items()},
        "processes": {way: [round(peak / 1e6, 1) for peak in each] for way, each in found.items()},
        "ratio": {way: round(peaks[way] / peaks["static"], 3) for way in ways if way != "static"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    add_arguments(parser, ["training"], [16])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=3, help="of each way; the median of their peaks counts")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    cases = chosen_cases(chosen, MEMORY)
    if chosen.processes < 1:
        parser.error(f"--processes is {chosen.processes}; at least 1 is wanted")
    if chosen.child:
        print(json.dumps({"bytes": peak_in_this_process(cases[0], chosen.child, chosen.steps)}))
        return
    facts = results.machine(chosen.threads)
    kept = chosen.out or len(cases) == len(MEMORY)
    out = results.destination("memory", facts, chosen.out) if kept else None
    console, rows = Console(), []
    for case in cases:
        rows.append(measure(case, chosen_ways(chosen), chosen.threads, chosen.steps, chosen.processes))
        console.print(f"{case.name}: {rows[-1]['processes']} MB, ratios {rows[-1]['ratio']}")
        if out:  # after every case: a long run that is broken off has measured something
            results.write(out, {"machine": facts, "rows": rows})
    console.print(tables.ratios(rows, "megabytes").rich("peak memory relative to the static network"))


if __name__ == "__main__":
    main()

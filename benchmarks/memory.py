"""Peak memory of a step above what imports take, each way in a process of its own.

Without arguments, the cases that the project has targets for. With `--preset`, any network, mode and batch.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import kernelwarehouse as kw
from benchmarks import results
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
    model = static_network(case.preset) if way == "static" else converted_network(case.preset)
    run = runner(model, way, case.mode, case.batch, case.image)
    if case.prepared and way == "ours":
        kw.prepare_inference(model, case.prepared, case.batch)
    for _ in range(steps):
        run()
    return process_memory("VmHWM") - before


def in_child(case: Case, way: str, threads: int, steps: int) -> int:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", way, "--preset", case.preset, "--mode", case.mode]
    command += ["--batch", str(case.batch), "--threads", str(threads), "--steps", str(steps)]
    if case.prepared:
        command += ["--prepare", str(case.prepared)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure(case: Case, ways: Sequence[str], threads: int, steps: int) -> dict[str, Any]:
    peaks = {way: in_child(case, way, threads, steps) for way in ways}
    return {
        **case.facts(),
        "megabytes": {way: round(peak / 1e6, 1) for way, peak in peaks.items()},
        "ratio": {way: round(peaks[way] / peaks["static"], 3) for way in ways if way != "static"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    add_arguments(parser, ["training"], [16])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    cases = chosen_cases(chosen, MEMORY)
    if chosen.child:
        print(json.dumps({"bytes": peak_in_this_process(cases[0], chosen.child, chosen.steps)}))
        return
    console, rows = Console(), []
    facts = results.machine(chosen.threads)
    for case in cases:
        rows.append(measure(case, chosen_ways(chosen), chosen.threads, chosen.steps))
        console.print(f"{case.name}: {rows[-1]['megabytes']} MB, ratios {rows[-1]['ratio']}")
    console.print(results.ratio_table(rows, "megabytes", "peak memory relative to the static network"))
    whole = not chosen.preset and not chosen.only
    out = chosen.out or (results.FOLDER / "memory.json" if whole else None)
    if out:
        results.write(out, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()

"""Peak memory of a step above what imports take, each way in a process of its own.

Without arguments, the cases that the project has targets for. With `--preset`, any network, mode and batch.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kernelwarehouse as kw
from benchmarks import results
from benchmarks.cases import MEMORY, MODES, WAYS, Case, converted_network, runner, static_network
from kernelwarehouse.assemble.build import load_native


def process_memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory can be measured on Linux only")


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
        "name": case.name,
        "preset": case.preset,
        "mode": case.mode,
        "batch": case.batch,
        "megabytes": {way: round(peak / 1e6, 1) for way, peak in peaks.items()},
        "ratio": {way: round(peaks[way] / peaks["static"], 3) for way in ways if way != "static"},
        "published": case.published,
        "most": case.most,
    }


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in ("case", "static MB", "plain", "ours", "published code", "target"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        ratio = row["ratio"]
        shown.add_row(
            row["name"],
            f"{row['megabytes']['static']:.0f}",
            f"{ratio['plain']:.2f}" if "plain" in ratio else "",
            f"{ratio['ours']:.2f}",
            f"{row['published']:.2f}" if row["published"] else "",
            results.verdict(ratio["ours"], row["most"]),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--preset", nargs="+", help="networks to measure instead of the target cases")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["training"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16])
    parser.add_argument("--prepare", type=int, help="memory limit of prepare_inference in bytes, for inference")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; by default results/memory.json for all cases")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    cases = list(MEMORY)
    if chosen.preset:
        cases = [
            Case(preset, mode, batch, chosen.prepare if mode == "inference" else None)
            for preset in chosen.preset
            for mode in chosen.mode
            for batch in chosen.batch
        ]
    if chosen.child:
        print(json.dumps({"bytes": peak_in_this_process(cases[0], chosen.child, chosen.steps)}))
        return
    ways = [way for way in WAYS if way in chosen.ways or way in ("static", "ours")]
    console, rows = Console(), []
    facts = results.machine(chosen.threads)
    for case in cases:
        rows.append(measure(case, ways, chosen.threads, chosen.steps))
        console.print(f"{case.name}: {rows[-1]['megabytes']} MB, ratios {rows[-1]['ratio']}")
    console.print(table(rows, "peak memory relative to the static network"))
    out = chosen.out or (None if chosen.preset else results.FOLDER / "memory.json")
    if out:
        results.write(out, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()

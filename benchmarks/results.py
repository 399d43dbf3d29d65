"""Files of results. `python -m benchmarks.results` prints all that are committed, as Markdown.

A file is named after its benchmark, the processor and the kind of its vector instructions, and no run writes over what
another kind of machine has measured.
"""

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import TABLES, caption
from kernelwarehouse._files import write_file
from kernelwarehouse.assemble.build import load_native

FOLDER = Path(__file__).parent / "results"
# Where these are equal, figures may take each other's place.
_KIND = ("processor", "vector instructions", "told", "cores")
# By which torch, its libraries and our kernels are told to use fewer of the processor's instructions than it has.
_TELLING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "KERNELWAREHOUSE_LANES")


def processor_times() -> list[int]:
    """What all cores did so far, as Linux counts it: user, nice, system, idle, waiting, two interrupts, stolen, ..."""
    counts = Path("/proc/stat")
    return list(map(int, counts.read_text().splitlines()[0].split()[1:])) if counts.exists() else []


_BEGIN = processor_times()


def stolen_share(begin: Sequence[int], end: Sequence[int]) -> float | None:
    """Of the time that programs wanted to compute, the part in which the host let other machines do so instead."""
    if not begin or not end:
        return None
    taken = [after - before for before, after in zip(begin, end, strict=True)]
    user, nice, system, _, _, *interrupts, stolen = taken[:8]
    wanted = user + nice + system + sum(interrupts) + stolen
    return round(stolen / wanted, 3) if wanted else None


def machine(threads: int | Sequence[int]) -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    told = {name: os.environ[name] for name in _TELLING if os.environ.get(name)}
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        **({"told": told} if told else {}),
        "load when started": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiled kernels": load_native(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")} or "default",
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def slug(facts: dict[str, Any]) -> str:
    """The kind of machine in a file's name, as `amd-epyc-avx2`: no trade marks and numbers of cores.

    A clock rate is part of it where no other number tells processors of that name apart. One that was told which
    instructions to use is another kind: `amd-epyc-told-avx2`.
    """
    name = re.sub(r"\((r|tm)\)|\d+-core|\b(cpu|processor)\b", " ", facts["processor"].lower())
    model = name.partition("@")[0]
    kept = model if re.search(r"\d", model) else name
    told = "told" if facts.get("told") else ""
    return "-".join(re.findall(r"[a-z0-9]+", f"{kept} {told} {facts['vector instructions'].lower()}"))


def destination(name: str, facts: dict[str, Any], out: Path | None = None) -> Path:
    """Where a benchmark on this machine writes, or `out`; asked before it begins, so nothing is measured in vain."""
    path = out or FOLDER / f"{name}-{slug(facts)}.json"
    _refuse_another_machines(path, facts)
    return path


def write(path: Path, data: dict[str, Any]) -> None:
    """Results, and how much of the time since this process began was not the machine's own."""
    _refuse_another_machines(path, data["machine"])
    facts = {**data["machine"], "stolen": stolen_share(_BEGIN, processor_times())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({**data, "machine": facts}, indent=1) + "\n")


def _refuse_another_machines(path: Path, facts: dict[str, Any]) -> None:
    if not path.exists():
        return
    there = json.loads(path.read_text())["machine"]
    differences = [
        f"{fact} {there.get(fact)}, here {facts.get(fact)}" for fact in _KIND if there.get(fact) != facts.get(fact)
    ]
    if differences:
        raise SystemExit(f"{path} has another machine's results ({'; '.join(differences)}): name another file by --out")


@dataclass(frozen=True)
class Result:
    """A file of results, and what it is called without the machine: `speed-1`."""

    path: Path
    name: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]

    def markdown(self) -> str:
        """What it was measured on, and its table."""
        table = TABLES.get(self.name.split("-")[0])
        return f"{caption(self.machine)}\n\n{table(self.rows).markdown() if table else f'See {self.path.name}.'}"


def committed(folder: Path = FOLDER) -> Iterator[Result]:
    """All results in the folder, in the order of their files' names."""
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        yield Result(path, path.stem.removesuffix(f"-{slug(data['machine'])}"), data["machine"], data["rows"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="results whose file's name contains this; default: all")
    only = parser.parse_args(arguments).only
    print("\n\n".join(f"### {it.path.stem}\n\n{it.markdown()}" for it in committed() if only in it.path.name))


if __name__ == "__main__":
    main()

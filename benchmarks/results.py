"""Tables and files of results."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelwarehouse._files import write_file
from kernelwarehouse.assemble.build import load_native

FOLDER = Path(__file__).parent / "results"


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "load when started": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiled kernels": load_native(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")} or "default",
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(data, indent=1) + "\n")


def ratio_table(rows: Sequence[dict[str, Any]], unit: str, title: str) -> Table:
    """Static in the unit, plain and ours relative to it, and whether the target is met."""
    table = Table(title=title, title_justify="left")
    for column in ("case", f"static ({unit})", "plain", "ours", "published code", "target"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        ratio, most = row["ratio"], row["most"]
        verdict = "[red]missed[/]" if most is not None and ratio["ours"] > most else "[green]met[/]"
        table.add_row(
            row["name"],
            f"{row[unit]['static']:.1f}",
            f"{ratio['plain']:.2f}" if "plain" in ratio else "",
            f"{ratio['ours']:.2f}",
            f"{row['published']:.2f}" if row["published"] else "",
            "" if most is None else f"{most:.2f} {verdict}",
        )
    return table

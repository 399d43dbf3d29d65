"""Measurements in a process of their own, which nothing else has touched."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def ask(benchmark: str, options: Sequence[str]) -> dict[str, Any]:
    """What `python -m benchmarks.<benchmark>` answers: the last line that it prints, as JSON."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])

"""Processes that load the compiled kernels from a cache of the test's own."""

import os
import subprocess
import sys
from pathlib import Path

LOAD = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(message)s")
from kernelwarehouse.assemble.build import load_native
print("loaded", load_native())
print("from", *[path for path in torch.ops.loaded_libraries if "native" in path])
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A cache and temporary files in `folder`; what the machine's environment says about kernels does not count."""
    (folder / "tmp").mkdir(exist_ok=True)
    places = {"TORCH_EXTENSIONS_DIR": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "KERNELWAREHOUSE_NATIVE": "1", **places, **more}


def run(folder: Path, script: str = LOAD, **more: str) -> str:
    """What the script prints and our log lines. A process that dies of a signal is an error."""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(folder, **more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout + "".join(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("LOG"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}

"""Compiled kernels are turned off, or missing, without anything else changing."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(message)s")
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.layers import Conv2d
torch.manual_seed(0)
layer = Conv2d(8, 8, 3)
out = [layer(torch.ones(2, 8, 5, 5)) for _ in range(2)]
print("loaded", load_native(), tuple(out[1].shape))
"""


def _run(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1", "KERNELWAREHOUSE_NATIVE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + "".join(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("LOG"))


def test_turned_off() -> None:
    assert _run(KERNELWAREHOUSE_NATIVE="0") == "loaded False (2, 8, 3, 3)\n"


def test_without_a_compiler_one_line_is_logged(tmp_path: Path) -> None:
    found = _run(TORCH_EXTENSIONS_DIR=str(tmp_path), CXX="no-such-compiler")
    assert found.startswith("loaded False (2, 8, 3, 3)\n")
    assert found.count("LOG") == 1
    assert "no C++ compiler 'no-such-compiler'" in found


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = _run(TORCH_EXTENSIONS_DIR=str(blocked))
    assert found.startswith("loaded False")
    assert found.count("LOG") == 1

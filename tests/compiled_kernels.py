"""Compiled kernels: what this machine has, and tests as if it had none."""

import subprocess
from contextlib import suppress

import pytest

from kernelwarehouse.assemble import branch, depthwise, native, repetition
from kernelwarehouse.assemble.build import load_native

COMPILED = load_native()
CAN_BE = [True, False] if COMPILED else [False]
"""Doing without them is possible everywhere."""


def _second_level() -> int:
    """As `csrc/layer.h` asks: bytes, or what is usual where the machine does not say."""
    said = ""
    with suppress(OSError):  # Python's own sysconf does not know the name
        said = subprocess.run(["getconf", "LEVEL2_CACHE_SIZE"], capture_output=True, text=True, check=False).stdout
    return int(said) if said.strip().isdigit() and int(said) > 0 else 512 * 1024


LEVEL2 = _second_level() // 4
"""Numbers that a core's second-level cache holds; the compiled kernels are cut to it."""


def pretend(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Let everything believe that there are compiled kernels, or none."""
    for module in (branch, depthwise, native, repetition):
        monkeypatch.setattr(module, "load_native", lambda: available)
    monkeypatch.setattr("kernelwarehouse.assemble.routing._answers", {})

"""Compiled kernels: what this machine has, and tests as if it had none."""

import pytest

from kernelwarehouse.assemble import branch, depthwise, native
from kernelwarehouse.assemble.build import load_native

COMPILED = load_native()
CAN_BE = [True, False] if COMPILED else [False]
"""Doing without them is possible everywhere."""


def pretend(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Let everything believe that there are compiled kernels, or none."""
    for module in (branch, depthwise, native):
        monkeypatch.setattr(module, "load_native", lambda: available)
    monkeypatch.setattr("kernelwarehouse.assemble.routing._answers", {})

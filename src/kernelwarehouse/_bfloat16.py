"""Whether torch can compute in bfloat16 on this processor: found out in a child process, before this one tries.

Some virtual machines advertise AMX and fault on it. oneDNN, which multiplies for torch, then kills the process with an
illegal instruction, or cannot create a primitive. Kept below AMX it works. It reads `ONEDNN_MAX_CPU_ISA` once, when
torch first needs it: a variable set later has no effect.
"""

import faulthandler
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from functools import cache
from pathlib import Path

import torch

from kernelwarehouse.errors import PrecisionError

VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAP = "AVX512_CORE_BF16"  # bfloat16 without AMX
TRIAL = Path(__file__).with_name("_bfloat16_trial.py")
# The value of VARIABLE that bfloat16 works with, for the children of this process, which then need no trial.
_REMEMBERED = "KERNELWAREHOUSE_BFLOAT16_WORKS_WITH"
_PATIENCE = 120.0  # seconds for a fork, which may hang where other threads held locks

_log = logging.getLogger("kernelwarehouse")


def require_computable(device: torch.device, dtype: torch.dtype) -> None:
    """Raise where torch would die of computing in `dtype`, or in what autocast around the caller says, on `device`.

    Costs a process of its own for the first bfloat16 on a CPU, and nothing for anything else.
    """
    if torch.compiler.is_compiling() or device.type != "cpu":
        return
    if dtype == torch.bfloat16 or (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    ):
        problem = _problem()
        if problem is not None:
            raise PrecisionError(problem)


@cache
def _problem() -> str | None:
    """Why this process cannot compute in bfloat16, or nothing. It is capped where that is what it takes."""
    before = os.environ.get(VARIABLE)
    if os.environ.get(_REMEMBERED) == (before or ""):
        return None
    fault = _fault(before)
    if fault is None:
        os.environ[_REMEMBERED] = before or ""
        return None
    tried = f"torch cannot compute in bfloat16 on this processor (in a trial, {fault})"
    if before == CAP or _fault(CAP) is not None:
        return f"{tried}, not even with {VARIABLE}={CAP} in the environment; use float32"
    os.environ[VARIABLE] = CAP
    if not _works_in_a_copy():
        _restore(before)
        return (
            f"{tried}. With {VARIABLE}={CAP} in the environment it can, but in this process torch has multiplied "
            "before and no longer looks at it: set it before the process starts, or use float32"
        )
    os.environ[_REMEMBERED] = CAP
    _log.warning("torch faults on bfloat16 on this processor; %s=%s is set and helps", VARIABLE, CAP)
    return None


def _restore(value: str | None) -> None:
    if value is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = value


def _fault(cap: str | None) -> str | None:
    """What the trial dies of in a new process with this cap, or nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if cap is not None:
        environment[VARIABLE] = cap
    # -P: the folder of the trial holds this library's modules, which are not to be taken for others.
    command = [sys.executable, "-P", str(TRIAL)]
    try:
        child = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        _log.warning("no process to try bfloat16 in could be started, and it is taken to work: %s", error)
        return None
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        number = -child.returncode
        return f"the process died of signal {number}, {signal.strsignal(number) or 'which has no name'}"
    return (child.stderr.strip().splitlines() or [f"the process ended with {child.returncode}"])[-1]


def _works_in_a_copy() -> bool:
    """Whether the trial works in a fork of this process, which has what torch has set up here already."""
    if not hasattr(os, "fork"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks of processes with threads may hang
        child = os.fork()
    if child == 0:
        _try_and_exit()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _try_and_exit() -> None:
    """The fork: without a word, and without the threads of the process, which it does not have."""
    status = 1
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        faulthandler.disable()
        torch.set_num_threads(1)
        runpy.run_path(str(TRIAL), run_name="__main__")
        status = 0
    finally:
        os._exit(status)

"""Stands in for `_bfloat16_trial.py` on a machine that faults on AMX: dies of it unless oneDNN is capped in time.

Like oneDNN it reads the variable once in a process. As a plugin of pytest (`-p faulting_trial`), it makes the machine
such a one before `conftest.py` is read.
"""

import os
import resource
import signal
import sys
from pathlib import Path

if __name__ == "faulting_trial":
    from kernelwarehouse import _bfloat16

    _bfloat16.TRIAL = Path(__file__)
else:
    read_once = vars(sys).setdefault("max_cpu_isa", os.environ.get("ONEDNN_MAX_CPU_ISA"))
    if read_once != "AVX512_CORE_BF16":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGILL)

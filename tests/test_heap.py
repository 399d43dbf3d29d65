"""Freed memory goes back to the system."""

import ctypes
import platform

import torch

from kernelwarehouse._heap import give_back
from kernelwarehouse.compare.memory import status_bytes


def test_memory_below_what_is_in_use_is_given_back() -> None:
    give_back()  # what other tests have left
    before = status_bytes("VmRSS")
    if platform.libc_ver()[0] != "glibc" or before is None:
        return  # where it did no harm
    assert hasattr(ctypes.CDLL(None), "malloc_trim")
    # Tensors that the heap has, each below one that stays.
    kept = [(torch.ones(1 << 14), torch.ones(256)) for _ in range(2000)]
    held = status_bytes("VmRSS")
    stay = [small for _, small in kept]
    del kept
    give_back()
    after = status_bytes("VmRSS")
    assert held is not None
    assert after is not None
    assert held - before > 100 << 20
    assert held - after > 100 << 20
    assert all(bool((each == 1).all()) for each in stay)

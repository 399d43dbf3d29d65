"""Freed memory, back to the system."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Hand back what the C library keeps of freed memory. glibc itself gives back only its top."""
    with suppress(OSError, AttributeError, TypeError):  # glibc has this, others do not
        ctypes.CDLL(None).malloc_trim(0)

"""One run in a folder at a time. The system holds the lock, so it ends with the process, however that ends."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from kernelwarehouse._files import write_file
from kernelwarehouse.errors import TrainingError

LOCK_FILE = ".lock"
HOLDER_FILE = ".lock-holder.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder; `TrainingError` if another process does, with what is known of it."""
    lock = FileLock(folder / LOCK_FILE)
    holder = folder / HOLDER_FILE
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    try:
        lock.acquire(timeout=0)
        write_file(holder, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n")
    except Timeout as error:
        raise TrainingError(
            f"{folder} is in use by {_holder(folder)}; wait until that run is through or end it, or use another "
            "--output"
        ) from error
    except OSError as error:
        lock.release()
        raise TrainingError(f"{folder} cannot be locked for a run: {error}; use another --output") from error
    try:
        yield
    finally:
        with suppress(OSError):  # what stays of it is true only while somebody has the lock
            holder.unlink()
        lock.release()


def _holder(folder: Path) -> str:
    try:
        known = json.loads((folder / HOLDER_FILE).read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not yet said who it is
        return "another process"

"""SIGTERM as a wish: a run ends at its next whole step, with a checkpoint, instead of at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Termination:
    """Whether SIGTERM has come. It is noted inside `watched`, and only there; outside it ends the process as always."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Python lets only the main thread set handlers; a run in another one is ended by SIGTERM as anything else is.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            # None stands for a handler that was not set from Python and cannot be set again from here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

"""SIGTERM as a wish, and Ctrl-C that is never lost: how a run is ended from outside."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


class Termination:
    """Whether SIGTERM or Ctrl-C has come. They are noted inside `watched`, and only there.

    SIGTERM is a wish: the run ends at its next whole step, with a checkpoint. Ctrl-C interrupts at once, as always; but
    where the interrupt falls into a destructor or a callback of the garbage collector, Python prints it and goes on.
    So it is noted as well, and `check_interrupt` ends the run then.
    """

    def __init__(self) -> None:
        self.asked = False
        self._interrupted = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Python lets only the main thread set handlers; a run in another one is ended by signals as anything else is.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.asked = self._interrupted = False  # of what was watched before
        with ExitStack() as handlers:
            handlers.enter_context(_handled(signal.SIGTERM, self._note))
            # Where Ctrl-C is ignored, as in the background of a shell, or handled by who called, it stays so.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                handlers.enter_context(_handled(signal.SIGINT, self._interrupt))
            yield

    def check_interrupt(self) -> None:
        """Interrupt again if Ctrl-C has come: who gets here has lost it."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


@contextmanager
def _handled(number: signal.Signals, handler: "signal._HANDLER") -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python and cannot be set again from here.
        signal.signal(number, signal.SIG_DFL if before is None else before)

"""Times of things that do the same, taken one after the other where they will be used."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

# What is this many times slower than the fastest is not tried again. After a first run more is forgiven, and everything
# that is short: memory was touched and libraries were set up then, which can take longer than the work itself.
_HOPELESS, _HOPELESS_AT_FIRST = 1.5, 3.0
_SHORT = 5e-3
# Rounds at least and at most, and the seconds after which more of them tell nothing new.
_FEWEST, _MOST = 3, 10
_ENOUGH = 50e-3
# The part of the time that one of the threads may have to wait for a processor. Of threads that others leave alone none
# comes near it, and where others compute as well, each waits for far more.
_WAITING = 0.1


def best_times(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Seconds of the fastest of a few runs of each, taken in turns; what is far behind is run once or twice.

    Runs on another device than the CPU have to wait for it themselves.
    """
    best = {name: _seconds(run, device) for name, run in runs.items()}
    order, spent = list(runs), 0.0
    for turn in range(1, _MOST):
        if turn >= _FEWEST and spent > _ENOUGH:
            break
        fastest = min(best.values())
        limit = max(_SHORT, _HOPELESS_AT_FIRST * fastest) if turn == 1 else _HOPELESS * fastest
        order.reverse()  # what comes after a certain other finds caches as that has left them
        for name in order:
            if best[name] <= limit:
                taken = _seconds(runs[name], device)
                best[name] = min(best[name], taken)
                spent += taken
    return best


class Watch:
    """Whether others leave the processor to this process from now on."""

    def __init__(self) -> None:
        self._waited = _waited()
        self._begin = time.perf_counter()

    def crowded(self) -> bool:
        """Whether times of several threads can be wrong by now: all of them wait for the one that has no processor.

        How long they do depends on how often they meet, so that others' work can turn round which way is the fastest.
        One thread has a clock of its own, that stands still meanwhile.
        """
        if torch.get_num_threads() == 1:
            return False
        passed = time.perf_counter() - self._begin
        waits = [seconds - self._waited.get(thread, 0.0) for thread, seconds in _waited().items()]
        return max(waits, default=0.0) > _WAITING * passed


def _waited() -> dict[str, float]:
    """Seconds that each thread of this process was ready so far and had no processor; none where Linux is not there."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
            continue
    return found


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    # What one thread computes is told by its own clock, whatever the machine and other threads (loaders, servers) do;
    # how well several work together is not, nor how long a thread sleeps until another device is done.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if alone else time.perf_counter
    start = now()
    run()
    return now() - start

"""Times of things that do the same, taken one after the other where they will be used."""

import time
from collections.abc import Callable, Mapping

import torch

# What is this many times slower than the fastest is not tried again; short runs are, as first ones are never short.
_HOPELESS = 1.5
_SHORT = 5e-3
_ROUNDS = 3
_ENOUGH = 10e-3  # seconds for the runs of a round after which more rounds tell nothing new


def best_times(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest of a few runs of each, taken in turns; what is far behind is run once or twice."""
    best = {name: _seconds(run) for name, run in runs.items()}
    spent = 0.0
    for turn in range(4 * _ROUNDS):
        if turn >= _ROUNDS - 1 and spent > _ENOUGH:
            break
        limit = _HOPELESS * min(best.values())
        for name, taken in list(best.items()):
            if taken <= limit or (turn == 0 and taken < _SHORT):
                again = _seconds(runs[name])
                best[name] = min(taken, again)
                spent += again
    return best


def _seconds(run: Callable[[], object]) -> float:
    # What one thread computes is told by the processor's clock, whatever else the machine does; how well several work
    # together is not.
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    run()
    return now() - start

"""What a user sees while a study goes on: a bar in a terminal, plain lines in a log."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kernelwarehouse._terminal import console
from kernelwarehouse.study.results import Result


@dataclass(frozen=True)
class State:
    """Numbers of runs; `ahead` are all epochs still to be trained, as method and epochs."""

    done: int
    running: int
    left: int
    ahead: Sequence[tuple[str, float]]


def seconds_left(state: State, results: Iterable[Result], processes: int) -> float | None:
    """By the finished runs of each method; of a method without any, by the mean of the others. `None` without any."""
    by_method: dict[str, list[float]] = {}
    for result in results:
        if result.accuracies:
            by_method.setdefault(result.method, []).append(result.seconds / len(result.accuracies))
    known = {method: mean(seconds) for method, seconds in by_method.items()}
    if not known:
        return None
    usual = mean(known.values())
    return sum(known.get(method, usual) * epochs for method, epochs in state.ahead) / processes


class StudyDisplay:
    """On stderr, so that nothing but tables is ever on stdout."""

    def __init__(self, out: Console | None = None) -> None:
        self._console = out or console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), console=self._console, transient=True
        )
        self._task = self._bar.add_task("", total=None)
        self._shown = self._console.is_terminal

    def __enter__(self) -> "StudyDisplay":
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, state: State, seconds: float | None) -> None:
        """The bar, which a log does not have."""
        done, total = state.done, state.done + state.running + state.left
        self._bar.update(self._task, completed=done, total=total, description=told(state, seconds))


def told(state: State, seconds: float | None) -> str:
    time = "time left not known yet" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"
    return f"{state.done} done, {state.running} running, {state.left} left, {time}"

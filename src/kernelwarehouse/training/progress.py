"""What a user sees while a run goes on: a bar in a terminal, plain lines in a log."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def accuracies_told(values: dict[str, Any]) -> list[str]:
    """The evaluation of a classifier, in words."""
    shares = [f"top-1 {values['top1']:.2%}", f"top-5 {values['top5']:.2%}"]
    return [*shares, f"loss {values['loss']:.4f} (training {values['training_loss']:.4f})"]


class Display:
    """Silent in all processes but the main one."""

    def __init__(self, console: Console | None = None, *, silent: bool = False) -> None:
        self._console = console or Console(highlight=False)
        self._silent = silent
        self._between = " | " if self._console.options.ascii_only else " · "
        self._bar: Progress | None = None
        self._steps = 0

    def say(self, text: str) -> None:
        if not self._silent:
            self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def start(self, done: int, steps: int) -> None:
        self._steps = steps
        if self._silent or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.fields[where]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
        )
        self._bar.add_task("", total=steps, completed=done, where="", numbers="")
        self._bar.start()

    def step(self, step: int, epoch: str, values: dict[str, Any], seconds_left: float) -> None:
        left = timedelta(seconds=round(seconds_left))
        parts = [f"loss {values['loss']:.4f}", f"{values['images_per_second']:,.0f} images/s"]
        parts += [f"tau {values['tau']:.3f}"] if values["tau"] is not None else []
        numbers = self._between.join([*parts, f"{left} left"])
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, where=f"epoch {epoch}", numbers=numbers)
        else:
            self.say(self._between.join([f"epoch {epoch}", f"step {step}/{self._steps}", numbers]))

    def epoch(self, epoch: str, values: dict[str, Any], told: Sequence[str] = ()) -> None:
        """`told` is what the evaluation gave, in words; without it, accuracies are told."""
        parts = [f"epoch {epoch}", *(told or accuracies_told(values))]
        parts += ["best so far"] if values["best"] else []
        self.say(self._between.join(parts))

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

"""One run of a study in a process of its own: `python -m kernelwarehouse.study.child TASK PARENT`, the task as JSON.

Trains with the engine, which resumes what a kill has left, and writes what came out beside the run.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from kernelwarehouse._files import write_file
from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import DivergedError, KernelWarehouseError, Terminated
from kernelwarehouse.study.results import commit, machine
from kernelwarehouse.training.api import train
from kernelwarehouse.training.distributed import join_processes
from kernelwarehouse.training.folder_lock import LOCK_FILE
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.recipe import recipe_from_dict
from kernelwarehouse.training.run import RunOptions

OUTCOME_FILE = "outcome.json"
PATIENCE = 60.0
"""Seconds for a child of a killed study to write its last checkpoint and let go of the run's folder."""


@dataclass(frozen=True)
class Task:
    """`test` is only there for a network that is to be tested, `weights` for one that begins with another's."""

    folder: str
    model: str
    model_args: Mapping[str, Any]
    recipe: Mapping[str, Any]
    seed: int
    data: str
    data_name: str
    test: str | None
    weights: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(arguments: list[str]) -> int:
    task, parent = Task(**json.loads(arguments[0])), int(arguments[1])
    take_the_lowest_priority()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    folder = Path(task.folder)
    if (folder / OUTCOME_FILE).exists() and (folder / "last").exists():
        return 0  # through, and the study was killed before it noticed: test images are looked at once
    (folder / OUTCOME_FILE).unlink(missing_ok=True)  # of a run whose network is gone
    try:
        outcome = run(task)
    except (KernelWarehouseError, OSError) as error:
        print(error, file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 2
    write_file(folder / OUTCOME_FILE, json.dumps(outcome) + "\n")
    return 0


def run(task: Task) -> dict[str, Any]:
    """Train, and test if that is asked for; what came out, as `Result` has it."""
    # By the name that the run's folder keeps, the data may lie elsewhere when the run goes on.
    data = replace(open_dataset(task.data), name=task.data_name)
    recipe = recipe_from_dict(task.recipe, "of the study")
    arguments = dict(task.model_args)
    network = build_network(task.model, recipe, len(data.classes), seed=task.seed, arguments=arguments)
    outcome: dict[str, Any] = {
        "commit": commit(),
        "machine": machine(),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "diverged": False,
        "test_accuracy": None,
    }
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(folder / LOCK_FILE, timeout=PATIENCE):
        pass  # nobody else is in the folder any more; if somebody is, the engine says who
    try:
        train(
            task.model,
            data,
            recipe,
            folder,
            options=RunOptions(seed=task.seed, workers=0),
            arguments=arguments,
            weights=Path(task.weights) if task.weights else None,
            device="cpu",
        )
    except DivergedError as error:
        print(error, file=sys.stderr)
        outcome["diverged"] = True
    metrics = read_metrics(folder / "metrics.jsonl")
    accuracies = [line["top1"] for line in metrics if line["kind"] == "epoch"]
    outcome |= {"accuracies": accuracies, "accuracy": None if outcome["diverged"] else accuracies[-1]}
    outcome["seconds"] = training_seconds(metrics, recipe.batch_size)
    if task.test and not outcome["diverged"]:
        outcome["test_accuracy"] = _tested(folder, task.test)
    return outcome


def training_seconds(metrics: list[dict[str, Any]], batch_size: int) -> float:
    """The time of all steps, by their reports: whatever pauses a run has made, and without the evaluations."""
    seconds, before = 0.0, 0
    for line in metrics:
        if line["kind"] == "step":
            seconds += (line["step"] - before) * batch_size / line["images_per_second"]
            before = line["step"]
    return round(seconds, 3)


def _tested(folder: Path, test: str) -> float:
    """The network after the last epoch, whichever was the best on the images kept apart."""
    with join_processes("cpu") as processes:
        trained = open_trained(folder / "last")
        return trained.evaluate(open_dataset(test), processes, batch_size=128, workers=0, unreadable="stop").top1


def take_the_lowest_priority() -> None:
    """Let everything else on the machine go first."""
    if hasattr(os, "nice"):
        os.nice(19)
    # Where Linux shares the processor among sessions, `nice` only orders the processes inside of one, and a run is one.
    session = Path("/proc/self/autogroup")
    if not session.exists() or os.getsid(0) != os.getpid():  # the session of a terminal is not ours to put back
        return
    for wait in (0.0, 0.15, 0.25, 0.35, 0.45):  # ten changes a second are all that it allows to all users together
        time.sleep(wait)
        with suppress(OSError):
            session.write_text("19")
            return


def _end_with_parent(parent: int) -> None:
    """End as by SIGTERM, with a checkpoint, when the study itself was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

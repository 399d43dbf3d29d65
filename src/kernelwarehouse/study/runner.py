"""Runs a study: a process a core, each a run of the training engine, and a line of results for each that is through."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelwarehouse.errors import StudyError, Terminated
from kernelwarehouse.study.child import OUTCOME_FILE, Task
from kernelwarehouse.study.jobs import Job, Plan, by_key, plan_jobs, tell_unused
from kernelwarehouse.study.progress import State, StudyDisplay, seconds_left, told
from kernelwarehouse.study.results import Result, append_result, read_results, refuse_mixed_data
from kernelwarehouse.study.spec import Study
from kernelwarehouse.study.split import Split
from kernelwarehouse.training.folder_lock import locked
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.run_folder import SLOTS, TENSORBOARD, VERSIONS
from kernelwarehouse.training.termination import Termination

LOOK_EVERY = 0.2
"""Seconds between looks at the running processes."""
TAIL = 12
"""Lines that are shown of what a failed run said."""


def child_command(task: Task) -> list[str]:
    return [sys.executable, "-m", "kernelwarehouse.study.child", task.to_json(), str(os.getpid())]


@dataclass(frozen=True)
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    said: IO[bytes]


class StudyRunner:
    """`found` are all results so far, by the keys of their jobs; `failed` are the jobs that are not tried again in this
    process."""

    def __init__(
        self,
        study: Study,
        split: Split,
        output: Path,
        results: Path,
        *,
        processes: int,
        display: StudyDisplay,
        command: Callable[[Task], list[str]] = child_command,
    ) -> None:
        self.study = study
        self.split = split
        self.output = output
        self.results = results
        self.processes = processes
        self.display = display
        self.command = command
        self.found: dict[str, Result] = {}
        self.failed: set[str] = set()
        self.running: dict[str, Running] = {}
        self.termination = Termination()

    def run(self) -> bool:
        """Make all runs that are missing; whether all are there now. Ctrl-C and SIGTERM end the runs that are going on,
        each with a checkpoint."""
        with locked(self.output), self.termination.watched():
            self._read()
            self.display.say(told(*self._state(plan_jobs(self.study, self.found))))
            with self.display:
                try:
                    while self._start_what_is_ready():
                        self._wait_for_one()
                finally:
                    self._stop()
            return self._conclude()

    def _read(self) -> None:
        known = read_results(self.results) if self.results.exists() else []
        refuse_mixed_data(known, self.results, self.split.digest)
        self.found = by_key(known)
        unused = tell_unused(self.study, self.found, self.results)
        if unused:
            self.display.say(unused)

    def _start_what_is_ready(self) -> bool:
        """Fill the free cores; whether anything is running."""
        plan = plan_jobs(self.study, self.found)
        for job in plan.jobs:
            if len(self.running) >= self.processes:
                break
            ready = self._ready(job)
            if ready is not None:
                self._start(ready)
        self.display.show(*self._state(plan))
        return bool(self.running)

    def _ready(self, job: Job) -> Job | None:
        """The job, or the one that it waits for; `None` if there is nothing to start."""
        if job.key in self.found or job.key in self.failed or job.key in self.running:
            return None
        if job.base is None or self._is_kept(job.base):
            return job
        return None if job.base.key in self.failed or job.base.key in self.running else job.base

    def folder(self, job: Job) -> Path:
        name = re.sub(r"\W+", "-", job.method).strip("-").lower()
        return self.output / f"runs-{self.split.digest}" / f"{name}-{job.phase}-{job.seed}-{job.key}"

    def _is_kept(self, base: Job) -> bool:
        """Whether the network to begin with is there, and whole."""
        outcome = read_outcome(self.folder(base))
        return outcome is not None and not outcome["diverged"] and (self.folder(base) / "last").exists()

    def _start(self, job: Job) -> None:
        task = Task(
            folder=str(self.folder(job)),
            model=job.model,
            model_args=job.model_args,
            recipe=job.recipe.as_dict(),
            seed=job.seed,
            data=str(self.split.train),
            data_name=f"study data {self.split.digest}",
            test=str(self.split.test) if job.phase == "final" else None,
            weights=str(self.folder(job.base).resolve() / "last") if job.base else None,
        )
        said = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process is through)
        process = subprocess.Popen(
            self.command(task),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others with SIGTERM
        )
        self.running[job.key] = Running(job, process, said)

    def _wait_for_one(self) -> None:
        while True:
            self.termination.check_interrupt()
            if self.termination.asked:
                raise Terminated("ended by SIGTERM; the same command goes on where the runs were")
            through = [each for each in self.running.values() if each.process.poll() is not None]
            for each in through:
                del self.running[each.job.key]
                self._collect(each)
            if through:
                return
            time.sleep(LOOK_EVERY)

    def _collect(self, through: Running) -> None:
        """What the process left becomes a line of results. Then its checkpoints go, unless others begin with them."""
        job, folder = through.job, self.folder(through.job)
        with through.said as said:
            said.seek(0)
            tail = said.read().decode(errors="replace").splitlines()[-TAIL:]
        outcome = None if through.process.returncode else read_outcome(folder)
        if outcome is None:
            self.failed.add(job.key)
            self.display.say(f"FAILED, status {through.process.returncode}: {job}")
            self.display.say("\n".join(f"    {line}" for line in tail))
            return
        result = Result(
            method=job.method,
            phase=job.phase,
            seed=job.seed,
            learning_rate=job.recipe.learning_rate,
            weight_decay=job.recipe.weight_decay,
            data=self.split.digest,
            settings=job.settings,
            **outcome | {"accuracies": tuple(outcome["accuracies"])},
        )
        if job.key not in self.found:
            append_result(self.results, result)
            self.found[job.key] = result
        if job.phase != "base":
            _remove_checkpoints(folder)
        elif result.diverged:
            self.failed.add(job.key)  # as nothing can begin with it
        self._tell(job, result)

    def _tell(self, job: Job, result: Result) -> None:
        reached = "diverged" if result.accuracy is None else f"{result.accuracy:.2%} of the images kept apart"
        state, left = self._state(plan_jobs(self.study, self.found))
        self.display.say(f"{job}: {reached}, {result.seconds:.0f} s ({told(state, left)})")

    def _state(self, plan: Plan) -> tuple[State, float | None]:
        wanted = {job.key: job for job in plan.jobs}
        missing = {key: job for key, job in wanted.items() if key not in self.found}
        bases = {job.base.key: job.base for job in missing.values() if job.base and not self._is_kept(job.base)}
        ahead: list[tuple[str, float]] = list(plan.waiting)
        for key, job in (missing | bases).items():
            ahead.append((job.method, job.epochs - (self._epochs_done(job) if key in self.running else 0)))
        running = len(self.running)
        state = State(len(wanted) - len(missing), running, len(missing | bases) + len(plan.waiting) - running, ahead)
        return state, seconds_left(state, self.found.values(), self.processes)

    def _epochs_done(self, job: Job) -> int:
        return sum(line["kind"] == "epoch" for line in read_metrics(self.folder(job) / "metrics.jsonl"))

    def _stop(self) -> None:
        """End what is running; each run writes a checkpoint first."""
        for each in self.running.values():
            each.process.terminate()
        for each in self.running.values():
            each.process.wait()
            each.said.close()
        self.running.clear()

    def _conclude(self) -> bool:
        plan = plan_jobs(self.study, self.found)
        missing = [job for job in plan.jobs if job.key not in self.found]
        if not missing and not plan.waiting:
            self.display.say(f"all {len(plan.jobs)} runs are done; 'kernelwarehouse study table' shows them")
            return True
        self.display.say(
            f"{len(missing) + len(plan.waiting)} runs are missing: {len(self.failed)} failed, others wait for them, "
            "or for the settings of a method whose trials all diverged; the same command tries again"
        )
        return False


def _remove_checkpoints(folder: Path) -> None:
    for slot in SLOTS:
        (folder / slot).unlink(missing_ok=True)
    for name in (VERSIONS, TENSORBOARD):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder / name)


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """What the process of a run has written when it was through."""
    try:
        return dict(json.loads((folder / OUTCOME_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def run_study(study: Study, split: Split, output: Path, results: Path, processes: int) -> bool:
    """Make all runs that are missing in the results; whether none is missing any more."""
    if processes < 1:
        raise StudyError(f"--processes (={processes}) must be at least 1")
    return StudyRunner(study, split, output, results, processes=processes, display=StudyDisplay()).run()

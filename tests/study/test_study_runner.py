"""How a study's runs are started, collected and ended, with processes that only pretend to train."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from small_studies import WHOLE, result_of, results_of, study_of, twice_as_long

from kernelwarehouse.errors import StudyError, Terminated, TrainingError
from kernelwarehouse.study.child import Task, training_seconds
from kernelwarehouse.study.jobs import by_key, plan_jobs
from kernelwarehouse.study.progress import State, StudyDisplay, seconds_left, told
from kernelwarehouse.study.results import Result, append_result, read_results
from kernelwarehouse.study.runner import StudyRunner
from kernelwarehouse.study.spec import Study
from kernelwarehouse.study.split import Split

# Accuracy is the learning rate, so that the highest is the best. What it was asked for is noted in a file.
PRETENDING = """
import json, os, pathlib, signal, sys, time
task, mode, log = json.loads(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
folder = pathlib.Path(task["folder"])
folder.mkdir(parents=True, exist_ok=True)
with log.open("a") as file:
    print(json.dumps(task | {"threads": os.environ["OMP_NUM_THREADS"]}), file=file)
if mode == "slow":
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "ended").touch(), sys.exit(143)))
    (folder / "started").touch()
    time.sleep(600)
if mode == "failing twins" and task["model"].startswith("kw"):
    print(*(f"line {number}" for number in range(30)), sep="\\n")
    sys.exit("the disk is on fire")
diverged = mode == "diverging" and task["recipe"]["epochs"] == 1 and not task["weights"]
(folder / ".versions").mkdir()
(folder / ".versions" / "last-1").mkdir()
(folder / "last").symlink_to(".versions/last-1")
accuracies = [0.0] * (task["recipe"]["epochs"] - 1) + [task["recipe"]["learning_rate"]]
outcome = {
    "accuracies": accuracies,
    "accuracy": None if diverged else accuracies[-1],
    "diverged": diverged,
    "test_accuracy": 0.5 if task["test"] else None,
    "parameters": 7,
    "seconds": 3.5,
    "commit": "abc",
    "machine": "a machine",
}
(folder / "outcome.json").write_text(json.dumps(outcome))
"""


class Place:
    """Where a study is run: its output, its results, what was started, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self.output.mkdir()
        self.results = folder / "results.jsonl"
        self.log = folder / "log"
        self.console = Console(width=200, record=True, file=io.StringIO())

    def runner(self, study: Study, mode: str = "", processes: int = 2) -> StudyRunner:
        def command(task: Task) -> list[str]:
            return [sys.executable, "-c", PRETENDING, task.to_json(), mode, str(self.log)]

        split = Split(Path("train.npz"), Path("test.npz"), "d1")
        display = StudyDisplay(self.console)
        return StudyRunner(
            study, split, self.output, self.results, processes=processes, display=display, command=command
        )

    def started(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def said(self) -> str:
        return self.console.export_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return study_of(tmp_path)


def kinds(results: list[Result]) -> list[tuple[str, str, int, float, int]]:
    return [(each.method, each.phase, each.seed, each.learning_rate, len(each.accuracies)) for each in results]


def test_all_runs_are_made_in_order_and_once(study: Study, place: Place) -> None:
    assert place.runner(study, processes=1).run()
    results = read_results(place.results)
    assert kinds(results) == [
        ("static", "trial", 9, 0.01, 2),
        ("static", "trial", 9, 0.05, 2),
        ("static", "final", 0, 0.05, 4),
        ("static", "final", 1, 0.05, 4),
        ("twin", "trial", 9, 0.01, 2),
        ("twin", "trial", 9, 0.05, 2),
        ("twin", "final", 0, 0.05, 4),
        ("twin", "final", 1, 0.05, 4),
        ("static", "base", 9, 0.05, 1),
        ("upgraded", "trial", 9, 0.01, 1),
        ("upgraded", "trial", 9, 0.05, 1),
        ("static", "base", 0, 0.05, 2),
        ("upgraded", "final", 0, 0.05, 2),
    ]
    assert [each.test_accuracy for each in results] == [0.5 if each.phase == "final" else None for each in results]
    assert "all 11 runs are done" in place.said()
    count = len(place.started())
    assert place.runner(study).run()
    assert len(place.started()) == count == len(results)


def test_children_get_what_they_need_and_no_test_images_but_at_the_end(study: Study, place: Place) -> None:
    assert place.runner(study).run()
    tasks = place.started()
    assert {task["threads"] for task in tasks} == {"1"}
    assert {task["data"] for task in tasks} == {"train.npz"}
    finals = [task for task in tasks if task["test"] is not None]
    assert len(finals) == 5
    assert all("-final-" in task["folder"] for task in finals)
    upgraded = [task for task in tasks if task["weights"]]
    assert len(upgraded) == 3
    assert all(Path(task["weights"]).parent.name.startswith("static-base-") for task in upgraded)


def test_checkpoints_go_but_for_those_that_others_begin_with(study: Study, place: Place) -> None:
    assert place.runner(study).run()
    kept = {path.name for path in (place.output / "runs-d1").iterdir() if (path / "last").exists()}
    assert len(kept) == 2
    assert all(name.startswith("static-base-") for name in kept)
    assert not [path for path in place.output.rglob(".versions") if path.parent.name not in kept]


def test_a_failed_run_is_told_with_its_last_words_and_stops_no_other(study: Study, place: Place) -> None:
    assert not place.runner(study, "failing twins").run()
    said = place.said()
    assert "FAILED, status 1: twin, trial, rate 0.01, decay 0.0005, seed 9" in said
    assert "    line 29\n    the disk is on fire" in said
    assert "line 17\n" not in said
    assert "7 runs are missing: 4 failed" in said
    assert {each.method for each in read_results(place.results)} == {"static"}
    assert place.runner(study).run()
    assert len(read_results(place.results)) == 13


def test_nothing_begins_with_a_run_that_diverged(study: Study, place: Place) -> None:
    assert not place.runner(study, "diverging").run()
    results = read_results(place.results)
    [base] = [each for each in results if each.phase == "base"]
    assert base.diverged
    assert base.accuracy is None
    assert not [each for each in results if each.method == "upgraded"]


def test_results_that_are_there_are_not_made_again(study: Study, place: Place) -> None:
    for result in results_of(study, "static", [0.6, 0.5], [0.7]):
        append_result(place.results, result)
    assert place.runner(study).run()
    finals = [each for each in read_results(place.results) if each.method == "static" and each.phase == "final"]
    assert [(each.seed, each.learning_rate, each.test_accuracy) for each in finals] == [(0, 0.01, 0.7), (1, 0.01, 0.5)]


def test_a_network_to_begin_with_that_is_gone_is_made_again(study: Study, place: Place) -> None:
    assert place.runner(study).run()
    lines = place.results.read_text().splitlines(keepends=True)
    [final] = [line for line in lines if '"method": "upgraded", "phase": "final"' in line]
    place.results.write_text("".join(line for line in lines if line != final))
    for run in (place.output / "runs-d1").iterdir():
        os.rename(run, run.with_name(f"moved-{run.name}"))
    before = len(place.started())
    assert place.runner(study).run()
    assert [Path(task["folder"]).name.split("-")[1] for task in place.started()[before:]] == ["base", "final"]
    assert len(read_results(place.results)) == 13


def test_results_of_an_earlier_study_stay_and_are_told(tmp_path: Path, study: Study, place: Place) -> None:
    assert place.runner(study).run()
    before = place.results.read_text()
    longer = study_of(tmp_path, twice_as_long(WHOLE))
    assert place.runner(longer).run()
    assert "are of other settings than the study's; they stay there, unused" in place.said()
    assert place.results.read_text().startswith(before)
    assert {len(each.accuracies) for each in read_results(place.results) if each.phase == "final"} == {2, 4, 8}


def test_other_images_are_refused(study: Study, place: Place) -> None:
    job = plan_jobs(study, {}).jobs[0]
    append_result(place.results, result_of(job, 0.5, data="d2"))
    with pytest.raises(StudyError, match=r"not all of the same images \(there are d1, d2, and the data now is d1\)"):
        place.runner(study).run()


def started_and(place: Place, count: int, act: Callable[[], None]) -> None:
    """In another thread, once so many processes run."""

    def wait_and_act() -> None:
        while len(list(place.output.rglob("started"))) < count:
            time.sleep(0.01)
        act()

    threading.Thread(target=wait_and_act, daemon=True).start()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_end_the_runs_by_sigterm(
    study: Study, place: Place, number: signal.Signals, error: type[BaseException]
) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    try:
        started_and(place, 2, lambda: os.kill(os.getpid(), number))
        with pytest.raises(error):
            place.runner(study, "slow").run()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(list(place.output.rglob("ended"))) == 2
    assert not place.results.exists()
    for path in place.output.rglob("ended"):
        path.unlink()
    assert place.runner(study).run()


def test_one_study_at_a_time(study: Study, place: Place) -> None:
    refused: list[str] = []

    def start_another() -> None:
        try:
            place.runner(study).run()
        except TrainingError as error:
            refused.append(str(error))
        os.kill(os.getpid(), signal.SIGTERM)

    started_and(place, 2, start_another)
    with pytest.raises(Terminated):
        place.runner(study, "slow").run()
    assert "is in use by process" in refused[0]


def test_time_left_is_that_of_the_same_method_or_the_mean(study: Study) -> None:
    results = results_of(study, "static", [0.5, 0.5], [])  # 120 seconds for 2 epochs each
    state = State(2, 1, 3, [("static", 4), ("twin", 2)])
    assert seconds_left(state, [], 1) is None
    assert seconds_left(state, results, 1) == 6 * 60
    slow = result_of(plan_jobs(study, by_key(results)).jobs[-1], 0.5, method="twin", seconds=480.0)
    assert seconds_left(state, [*results, slow], 2) == (4 * 60 + 2 * 240) / 2
    assert told(state, 3661.2) == "2 done, 1 running, 3 left, about 1:01:01 left"
    assert told(state, None).endswith("time left not known yet")


def test_seconds_are_those_of_the_steps_whatever_pauses_there_were() -> None:
    lines = [
        {"kind": "step", "step": 20, "images_per_second": 100.0},
        {"kind": "epoch", "step": 20},
        {"kind": "step", "step": 30, "images_per_second": 50.0},
    ]
    assert training_seconds(lines, 16) == pytest.approx(20 * 16 / 100 + 10 * 16 / 50)


def test_runs_let_everything_else_go_first() -> None:
    """Also where Linux shares the processor among sessions, and only then among a session's processes."""
    code = (
        "import os, pathlib; from kernelwarehouse.study.child import take_the_lowest_priority as take; take(); "
        "group = pathlib.Path('/proc/self/autogroup'); "
        "print(os.nice(0), group.read_text().split()[-1] if os.access(group, os.W_OK) else '')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True
    )
    nice, of_session = ran.stdout.rstrip("\n").split(" ")
    assert nice == "19"
    assert of_session in ("19", "")

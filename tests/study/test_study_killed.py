"""A real study on small images: killed, ended, and gone on with by the same command."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from small_studies import HEAD, STATIC, UPGRADED, write_study

from kernelwarehouse.cli import main
from kernelwarehouse.data import open_dataset
from kernelwarehouse.study.jobs import by_key, final_jobs, trial_jobs
from kernelwarehouse.study.results import Result, read_results
from kernelwarehouse.study.spec import Study, load_study
from kernelwarehouse.training.api import train
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.run import RunOptions

# One trial and one final run of a method, each with epochs left when a signal meets it. An epoch has 3 steps.
LONG = HEAD.replace("epochs = 4", "epochs = 8").replace("seed = 9\nepochs = 2", "seed = 9\nepochs = 16")
LONG = LONG.replace("[0.01, 0.05]", "[0.05]")
METHODS = STATIC.replace("seeds = [0, 1]", "seeds = [0]") + UPGRADED.replace("upgrade_after = 2", "upgrade_after = 4")

# The command with one thing more: from a line of its metrics on, the run that is to be met waits until SIGTERM has come
# to its own process, from the study that ends or because that is gone. Else a short run might be over before, on a
# machine with other work. It does not wait for ever: a run that nobody ends has an outcome, which the test sees.
WAITING = """
import functools, sys
from kernelwarehouse.cli import main
from kernelwarehouse.study import runner

child, run, *words = sys.argv[1:]

def command(task):
    executable, _, _, *arguments = runner.child_command(task)
    return [executable, "-c", child, run, *arguments]

runner.StudyRunner = functools.partial(runner.StudyRunner, command=command)
sys.exit(main(words))
"""
WAITING_RUN = """
import sys, time
from kernelwarehouse.study import child
from kernelwarehouse.training.metrics import MetricsLog, read_metrics
from kernelwarehouse.training.termination import Termination

run, *arguments = sys.argv[1:]
write, note, noted = MetricsLog.write, Termination._note, []

def note_and_tell(self, *what):
    note(self, *what)
    noted.append(self)

def write_and_wait(self, *what):
    write(self, *what)
    if self._path.parent.name.startswith(run + "-") and len(read_metrics(self._path)) >= 8:
        end = time.monotonic() + 120
        while not noted and time.monotonic() < end:
            time.sleep(0.005)

Termination._note, MetricsLog.write = note_and_tell, write_and_wait
sys.exit(child.main(arguments))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_study(tmp_path, LONG + METHODS)


def words(path: Path, data: Path) -> list[str]:
    return f"study run {path} --data {data} --output {path.parent / 'output'} --processes 1".split()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def broken_by(number: signal.Signals, path: Path, data: Path, run: str) -> tuple[int, str]:
    """The command, met by a signal when the run of this name has reported a few times; its status, and what it said."""
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # shells ignore it in the background
    command = [sys.executable, "-c", WAITING, WAITING_RUN, run, *words(path, data)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, **heeding)
    try:
        output = path.parent / "output"
        until(lambda: any(len(read_metrics(file)) >= 5 for file in output.glob(f"*/{run}-*/metrics.jsonl")), process)
        process.send_signal(number)
        return process.wait(), process.communicate()[1]
    finally:
        process.kill()


def assert_as_in_one_go(study: Study, results: list[Result], data: Path, folder: Path) -> None:
    """Accuracies are those of the engine alone, without a process of its own or a break."""
    found = by_key(results)
    static, upgraded = study.methods
    base = (final_jobs(study, upgraded, found) or [])[0].base
    assert base is not None
    jobs = [*(trial_jobs(study, static, found) or []), *(final_jobs(study, static, found) or []), base]
    [split] = (folder / "output").glob("data-*")
    torch.set_num_threads(1)
    for job in jobs:
        result = found[job.key]
        output = folder / f"alone-{job.phase}"
        images = replace(open_dataset(str(split / "train.npz")), name="images")
        options = RunOptions(seed=job.seed, workers=0)
        alone = train(job.model, images, job.recipe, output, options=options, arguments=dict(job.model_args))
        epochs = [line["top1"] for line in read_metrics(alone.metrics_path) if line["kind"] == "epoch"]
        assert result.accuracies == tuple(epochs)
        if job.phase == "final":
            tested = open_dataset(str(data)).validation
            network = open_trained(output / "last")
            with torch.no_grad():
                logits = network.network.eval()(network.prepare([tested.load(number) for number in range(25)]))
            right = (logits.argmax(1).numpy() == tested.labels).mean()
            assert result.test_accuracy == pytest.approx(right)
            assert result.parameters == sum(parameter.numel() for parameter in network.network.parameters())


def test_a_broken_study_ends_with_the_results_of_a_whole_one(path: Path, striped_npz: Path) -> None:
    folder = path.parent
    assert broken_by(signal.SIGKILL, path, striped_npz, "static-trial")[0] == -signal.SIGKILL
    [run] = (folder / "output").glob("runs-*/*")
    with FileLock(run / ".lock"):  # its process has noticed by itself that the study is gone, and written a checkpoint
        assert not (run / "outcome.json").exists()
        state = torch.load(run / "last" / "training.pt", weights_only=True)
        assert 0 < state["trainer"]["steps_done"] < 3 * 16
    begun = (run / "run.json").stat().st_mtime_ns
    status, said = broken_by(signal.SIGTERM, path, striped_npz, "static-final")
    assert status == 143
    assert "ended by SIGTERM; the same command goes on where the runs were" in said
    assert (run / "run.json").stat().st_mtime_ns == begun  # the killed run went on
    status, said = broken_by(signal.SIGINT, path, striped_npz, "upgraded-trial")
    assert status == 130
    assert "interrupted; the same command goes on where the runs were" in said
    assert "Traceback" not in said
    results = path.with_suffix(".jsonl")
    results.write_bytes(results.read_bytes() + results.read_bytes()[:100])  # as if a kill had met the writing of a line
    assert main(words(path, striped_npz)) == 0
    lines = read_results(results)
    assert [(line.method, line.phase) for line in lines] == [
        ("static", "trial"),
        ("static", "final"),
        ("static", "base"),
        ("upgraded", "trial"),
        ("static", "base"),
        ("upgraded", "final"),
    ]
    assert [len(line.accuracies) for line in lines] == [16, 8, 8, 8, 4, 4]
    assert all(line.seconds > 0 for line in lines)
    assert_as_in_one_go(load_study(path), lines, striped_npz, folder)
    assert not (run / "last").exists()


def test_too_high_a_rate_is_a_result_and_no_failure(tmp_path: Path, striped_npz: Path) -> None:
    short = HEAD.replace("[0.01, 0.05]", "[1e29, 0.05]").replace("epochs = 4", "epochs = 2")
    path = write_study(tmp_path, short + METHODS.partition('\n[[methods]]\nname = "upgraded"')[0])
    assert main(words(path, striped_npz)) == 0
    wild, tame, final = read_results(path.with_suffix(".jsonl"))
    assert (wild.diverged, wild.accuracy, wild.learning_rate) == (True, None, 1e29)
    assert not tame.diverged
    assert (final.learning_rate, final.test_accuracy is not None) == (0.05, True)

"""Runs that are really killed, terminated or interrupted, and started again with the same command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import kernelwarehouse as kw
from kernelwarehouse.assemble import kernel_cache, route_table
from kernelwarehouse.assemble.build import fingerprint
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.cli import main
from kernelwarehouse.training.folder_lock import locked
from kernelwarehouse.training.metrics import read_metrics

RECIPE = ["warmup_epochs=0.5", "ema_decay=0.9", "auto_augment=rand-m5", "random_erasing=0.3", "drop_path=0.1"]
MIXING = ["mixup=0.4", "cutmix=0.4", "mix_probability=0.7", "learning_rate=0.02"]


EPOCHS = 6
STEPS = 4 * EPOCHS

# The command line with one thing more: from a line of the metrics on it waits until a file says that the signal was
# sent. Else a run might be over before this process, on a machine with other work, gets to send it.
WAITING = """
import sys, time
from pathlib import Path
from kernelwarehouse.cli import main
from kernelwarehouse.training.metrics import MetricsLog, read_metrics

wait_from, signalled, write = int(sys.argv[1]), Path(sys.argv[2]), MetricsLog.write

def write_and_wait(self, *what):
    write(self, *what)
    while len(read_metrics(self._path)) >= wait_from and not signalled.exists():
        time.sleep(0.005)

MetricsLog.write = write_and_wait
sys.exit(main(sys.argv[3:]))
"""
# So that signals fall into the middle of steps as well, the run goes on for some lines.
AHEAD = 3


def arguments(
    data: Path, output: Path, *, workers: int, checkpoint_seconds: float = 0, epochs: int = EPOCHS
) -> list[str]:
    words = f"train kw1x_resnet18 --data {data} --recipe small --output {output} --epochs {epochs} --batch-size 16 "
    words += f"--workers {workers} --report-every 1 --checkpoint-seconds {checkpoint_seconds} "
    words += "--device-batch-size 8 --seed 3 "
    words += "--model-arg channels=[8,8,16,16] --model-arg layers=[1,1,1,1]"
    settings = [word for text in RECIPE + MIXING for word in ("--set", text)]
    return [*words.split(), *settings]


def run(words: list[str]) -> str:
    """The command line, to its end; what it printed."""
    whole = [sys.executable, "-m", "kernelwarehouse", *words]
    return subprocess.run(whole, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@contextmanager
def started(words: list[str], metrics: Path, lines: int) -> Iterator[subprocess.Popen[str]]:
    """The command line, once it has reported so often, waiting for `send` a little later. What is left of it
    afterwards, its workers included, is killed."""
    waiting = [sys.executable, "-c", WAITING, str(lines + AHEAD), str(signalled(metrics)), *words]
    signalled(metrics).unlink(missing_ok=True)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # Where the tests run in the background of a shell, Ctrl-C is ignored, and children inherit that.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(waiting, env=environment(), start_new_session=True, **pipes, **heeding)
    try:
        while len(read_metrics(metrics)) < lines:
            if process.poll() is not None:
                raise AssertionError(f"the run ended by itself with code {process.returncode}")
            time.sleep(0.005)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def signalled(metrics: Path) -> Path:
    return metrics.parent.with_suffix(".signalled")


def send(process: subprocess.Popen[str], number: signal.Signals, metrics: Path) -> None:
    """To the run and its workers, as from a terminal or a scheduler."""
    os.killpg(process.pid, number)
    signalled(metrics).touch()


def kill_after(words: list[str], metrics: Path, lines: int, delay: float) -> int:
    """Start the command, wait until it has reported so often, wait a little more, and kill it; its last step."""
    with started(words, metrics, lines) as process:
        time.sleep(delay)
    assert process.returncode == -signal.SIGKILL
    return read_metrics(metrics)[-1]["step"]


@pytest.fixture(scope="module")
def whole(striped_npz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unbroken run."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run(arguments(striped_npz, output, workers=1))
    return output


def assert_same_run(whole: Path, broken: Path) -> None:
    """Every tensor, and every metric that is no time."""
    for slot in ("last", "best"):
        expected, found = (kw.load(folder / slot).state_dict() for folder in (whole, broken))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), f"{slot}: {name}"
    states = [torch.load(folder / "last" / "training.pt", weights_only=True) for folder in (whole, broken)]
    for name, tensor in states[0]["trainer"]["model"].items():
        assert torch.equal(tensor, states[1]["trainer"]["model"][name]), name
    timed = ("images_per_second",)
    lines = [
        [{key: value for key, value in line.items() if key not in timed} for line in read_metrics(path)]
        for path in (whole / "metrics.jsonl", broken / "metrics.jsonl")
    ]
    assert lines[0] == lines[1]


def test_killed_runs_end_with_the_weights_of_an_unbroken_one(whole: Path, striped_npz: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    # Kills during the first steps, in the middle of an epoch, and around its end; with other numbers of workers.
    reached = 0
    for lines, delay, workers in ((1, 0.0, 2), (9, 0.013, 0), (16, 0.031, 1)):
        words = arguments(striped_npz, broken, workers=workers)
        step = kill_after(words, broken / "metrics.jsonl", lines, delay)
        assert reached < step < STEPS
        reached = step
    assert f"resuming {broken} at step" in run(arguments(striped_npz, broken, workers=1))
    assert_same_run(whole, broken)


def test_killed_runs_go_on_by_what_they_have_measured(
    striped_npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs by the choices that the first has measured; the second is resumed where all choices are others."""
    own = tmp_path / "kernels" / "kernelwarehouse"
    own.mkdir(parents=True)
    # The suite's kernels, so that they are not compiled again.
    for library in kernel_cache.usual_folder().glob(f"native-{fingerprint()}-*.so"):
        shutil.copy(library, own)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own.parent))
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(arguments(striped_npz, whole, workers=0, epochs=2))
    [machine] = own.glob("routes-*.json")
    measured = route_table.read(machine)
    words = arguments(striped_npz, broken, workers=0, epochs=2)
    # After the first evaluation, so that all choices have been made; the second one waits for the kill in any case.
    assert 5 <= kill_after(words, broken / "metrics.jsonl", 6, 0.0) <= 8
    others = {
        key: Choice(*("matmul" if way == "grouped" else way and "grouped" for way in (choice.forward, choice.backward)))
        for key, choice in measured.items()
    }
    machine.write_text(json.dumps(route_table.to_json(others)))
    assert f"resuming {broken} at step" in run(words)
    assert_same_run(whole, broken)
    [expected], [kept] = (
        torch.load(folder / "last" / "training.pt", weights_only=True)["routes"] for folder in (whole, broken)
    )
    assert expected == kept
    choices = route_table.from_json(kept, "the checkpoint").items()
    assert choices <= measured.items()  # the report has measured more
    assert {key.rsplit(", ", 1)[1] for key, _ in choices} == {"training", "inference"}
    assert route_table.read(machine) == others  # nothing was left to measure


def test_sigterm_writes_a_checkpoint_and_ctrl_c_damages_nothing(whole: Path, striped_npz: Path, tmp_path: Path) -> None:
    """Both reach the workers as well. No checkpoint is due within an epoch here."""
    broken = tmp_path / "broken"
    metrics = broken / "metrics.jsonl"
    words = arguments(striped_npz, broken, workers=2, checkpoint_seconds=1000)
    with started(words, metrics, 6) as process:
        send(process, signal.SIGTERM, metrics)
        said = process.communicate()[1]
    assert process.returncode == 143
    assert "Traceback" not in said
    assert f"the checkpoint is in {broken / 'last'}, and the same command goes on from there" in said
    reached = torch.load(broken / "last" / "training.pt", weights_only=True)["trainer"]["steps_done"]
    assert 5 <= reached < STEPS
    assert read_metrics(metrics)[-1]["step"] == reached

    with started(words, metrics, reached + reached // 4 + 2) as process:
        send(process, signal.SIGINT, metrics)
        said = process.communicate()[1]
    assert process.returncode == 130
    assert "_worker_loop" not in said  # through which every traceback of a worker goes
    assert "_bootstrap" not in said

    run(arguments(striped_npz, broken, workers=1))
    assert_same_run(whole, broken)


def test_folder_is_locked_until_its_process_dies(
    striped_npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    words = arguments(striped_npz, output, workers=2)
    with started(words, output / "metrics.jsonl", 1) as process:
        assert main(words) == 2
        assert f"{output} is in use by process {process.pid} on " in capsys.readouterr().err
        # Only the process itself is killed; its workers live on for a while, and do not hold the lock.
        process.kill()
        process.wait()
        with locked(output):
            pass

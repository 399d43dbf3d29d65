"""Signals to this process while it trains. SIGTERM: the run ends after a whole step, and goes on as if nothing had
been. Ctrl-C: it ends, wherever that falls."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelwarehouse as kw
from kernelwarehouse.data import DataSet
from kernelwarehouse.errors import Terminated
from kernelwarehouse.training.api import train
from kernelwarehouse.training.loading import EvaluationImages
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run import RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.termination import Termination
from kernelwarehouse.training.trainer import Trainer
from tiny_things import TINY_RESNET

# Four steps an epoch; reports after steps 3, 4 (the epoch), 6 and 8.
OPTIONS = RunOptions(workers=0, report_every=3)


def run(data: DataSet, recipe: Recipe, output: Path) -> RunFolder:
    return train("kw1x_resnet18", data, recipe, output, options=OPTIONS, arguments=TINY_RESNET)


def what_it_left(folder: RunFolder) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = [
        {name: value for name, value in line.items() if name != "images_per_second"}
        for line in read_metrics(folder.metrics_path)
    ]
    state = folder.read_state()
    assert state is not None
    return lines, state["trainer"]["model"] | {
        f"best {k}": v for k, v in kw.load(folder.path / "best").state_dict().items()
    }


def doing(function: Callable[..., Any], at: int, do: Callable[[], Any]) -> Callable[..., Any]:
    """The function, which does something before its call of that number."""
    calls = 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            do()
        return function(*arguments)

    return called


def signalling(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, which sends SIGTERM to this process when it is called for the so-manyeth time."""
    return doing(function, at, lambda: os.kill(os.getpid(), signal.SIGTERM))


def forgetting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The same with an interrupt that Python loses."""
    return doing(function, at, InterruptedWhenForgotten)


@pytest.fixture(scope="module")
def unbroken(striped: DataSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("step", "image", "reached"),
    [
        pytest.param(1, 0, 1, id="in the first step"),
        pytest.param(5, 0, 5, id="between two reports"),
        pytest.param(6, 0, 6, id="in a step with a report"),
        pytest.param(4, 0, 4, id="in the last step of an epoch"),
        pytest.param(0, 20, 4, id="while the epoch is evaluated"),
        pytest.param(8, 0, 8, id="in the last step of all"),
    ],
)
def test_ended_run_goes_on_as_if_it_had_not_been(
    striped: DataSet,
    recipe: Recipe,
    tmp_path: Path,
    unbroken: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    image: int,
    reached: int,
) -> None:
    if not unbroken:
        unbroken["left"] = what_it_left(run(striped, recipe, tmp_path / "whole"))
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", signalling(Trainer.step, step))
        patched.setattr(EvaluationImages, "__getitem__", signalling(EvaluationImages.__getitem__, image))
        message = rf"ended by SIGTERM after step {reached} of 8; the checkpoint is in .*last.*the same command goes on"
        with pytest.raises(Terminated, match=message):
            run(striped, recipe, tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is handler
    state = RunFolder(tmp_path / "run").read_state()
    assert state is not None
    assert state["trainer"]["steps_done"] == reached

    lines, tensors = what_it_left(run(striped, recipe, tmp_path / "run"))
    expected_lines, expected_tensors = unbroken["left"]
    assert lines == expected_lines
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.equal(tensor, tensors[name]), name


class InterruptedWhenForgotten:
    """Python prints an exception of a destructor and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("step", "image"),
    [
        pytest.param(2, 0, id="in a step"),
        pytest.param(0, 20, id="while the epoch is evaluated"),
        pytest.param(8, 0, id="in the last step"),
    ],
)
def test_interrupt_that_python_lost_ends_the_run(
    striped: DataSet, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, image: int
) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    monkeypatch.setattr(Trainer, "step", forgetting(Trainer.step, step))
    monkeypatch.setattr(EvaluationImages, "__getitem__", forgetting(EvaluationImages.__getitem__, image))
    try:
        with pytest.raises(KeyboardInterrupt):
            run(striped, recipe, tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_that_is_ignored_or_handled_by_who_called_stays_so() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Termination().watched():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_signal_is_noted_only_while_it_is_watched_for() -> None:
    termination = Termination()
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with termination.watched():
            os.kill(os.getpid(), signal.SIGTERM)
        assert termination.asked
        assert not seen
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_may_train() -> None:
    problems: list[BaseException] = []

    def watch() -> None:
        try:
            with Termination().watched():
                pass
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert not problems

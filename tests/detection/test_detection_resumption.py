"""Detectors whose training is broken off: killed, asked to end, shared by two processes."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from detection_runs import OPTIONS, train_tiny

import kernelwarehouse as kw
from kernelwarehouse.data.batches import TrainingBatches
from kernelwarehouse.data.seeds import derive_seed
from kernelwarehouse.detection.data import CocoData, open_coco
from kernelwarehouse.errors import Terminated
from kernelwarehouse.training import trainer
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.trainer import Trainer

SCRIPT = Path(__file__).with_name("killed_detection.py")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.fixture(scope="module")
def data(scenes: Path) -> CocoData:
    return open_coco(scenes)


@pytest.fixture(scope="module")
def unbroken(data: CocoData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train_tiny(data, tmp_path_factory.mktemp("runs") / "unbroken")


def what_it_left(folder: RunFolder) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = [
        {name: value for name, value in line.items() if name != "images_per_second"}
        for line in read_metrics(folder.metrics_path)
    ]
    state = folder.read_state()
    assert state is not None
    best = kw.load(folder.path / "best").state_dict()
    return lines, state["trainer"]["model"] | {f"best {name}": tensor for name, tensor in best.items()}


def assert_as_unbroken(folder: RunFolder, unbroken: RunFolder) -> None:
    lines, weights = what_it_left(folder)
    expected_lines, expected = what_it_left(unbroken)
    assert lines == expected_lines
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def test_a_killed_run_goes_on_to_the_same_weights(
    data: CocoData, scenes: Path, unbroken: RunFolder, tmp_path: Path
) -> None:
    """Killed in the second epoch, by a signal that cannot be handled."""
    words = [sys.executable, str(SCRIPT), str(scenes), str(tmp_path / "run"), "3"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    folder = RunFolder(tmp_path / "run")
    assert folder.read_state()["trainer"]["steps_done"] == 3
    train_tiny(data, tmp_path / "run")
    assert_as_unbroken(folder, unbroken)


def test_sigterm_ends_a_run_after_a_whole_step(
    data: CocoData, unbroken: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def signalled(trainer: Trainer, parts: list) -> torch.Tensor:
        if trainer.steps_done == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, parts)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", signalled)
        with pytest.raises(Terminated, match="ended by SIGTERM after step 1 of 4"):
            train_tiny(data, tmp_path / "run")
    assert_as_unbroken(train_tiny(data, tmp_path / "run"), unbroken)


def test_a_finished_run_changes_nothing(
    data: CocoData, unbroken: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = what_it_left(unbroken)
    train_tiny(data, unbroken.path)
    assert f"{unbroken.path} is finished: 2 epochs" in capsys.readouterr().out
    lines, weights = what_it_left(unbroken)
    assert lines == before[0]
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in weights.items())


def train_as_two(data: CocoData, output: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """In one process and two parts, which hold the scenes of two processes and draw boxes with their seeds."""
    order = TrainingBatches.order

    def dealt(batches: TrainingBatches, epoch: int) -> list[int]:
        scenes, size = order(batches, epoch), batches.batch_size
        steps = [scenes[start : start + size] for start in range(0, len(scenes), size)]
        return [scene for step in steps for rank in range(2) for scene in step[rank::2]]

    def seed_of_process(what: str, seed: int, step: int, part: int, rank: int) -> int:
        assert rank == 0
        return derive_seed(what, seed, step, 0, part)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingBatches, "order", dealt)
        patched.setattr(trainer, "derive_seed", seed_of_process)
        return train_tiny(data, output, options=replace(OPTIONS, device_batch_size=2))


def test_two_processes_share_a_run(
    data: CocoData, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its half of every batch and its share of the validation pictures. Weights are those of one
    process. Running statistics, and so evaluations, are not: they are the first process's, which sees half of it."""
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 0"
    words = [sys.executable, *torchrun.split(), str(SCRIPT), str(scenes), str(tmp_path / "run")]
    subprocess.run([*words, "-1"], env=environment(), check=True, capture_output=True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 1), ("step", 2), ("epoch", 2), ("step", 3), ("step", 4), ("epoch", 4)
    ]  # fmt: skip
    assert [line["images"] for line in lines if line["kind"] == "epoch"] == [3, 3]
    state = RunFolder(tmp_path / "run").read_state()
    assert state["trainer"]["steps_done"] == 4
    assert len(state["routes"]) == 2

    alone = train_as_two(data, tmp_path / "alone", monkeypatch)
    losses = [
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
        for folder in (tmp_path / "run", alone.path)
    ]
    assert losses[0] == pytest.approx(losses[1])
    expected = alone.read_state()["trainer"]
    names = [name for name, _ in kw.load(alone.path / "last").named_parameters()]
    for kept in ("model", "average"):
        ours, theirs = ({name: values[kept][name] for name in names} for values in (state["trainer"], expected))
        torch.testing.assert_close(ours, theirs)

"""Two real processes, joined over gloo, against one with the same batch."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from shared_run import shared_run

from kernelwarehouse.training.metrics import read_metrics


def environment() -> dict[str, str]:
    """For a script that imports what tests share; pytest itself finds it through the conftest beside it."""
    shared = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": shared}


def test_two_processes_train_as_one_even_if_one_is_killed(tmp_path: Path) -> None:
    """Two processes in two parts each; the second is killed at step 5, and torchrun starts both again.

    It may start them once more where torch's own connections failed, as they have on a busy machine: what comes out is
    the same. That is told, with its reasons.
    """
    shared_run(tmp_path / "one")
    script = Path(__file__).with_name("shared_run.py")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 2"
    words = [sys.executable, *torchrun.split(), str(script), str(tmp_path / "two"), "5", "SIGKILL"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "have outlived their group" not in ended.stderr
    failures = ended.stderr.count("failed (exitcode: ")
    assert failures >= 1
    if failures > 1:
        warnings.warn(f"{failures} attempts failed, one of them as it should:\n{ended.stderr}", stacklevel=1)

    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [(line["kind"], line["step"]) for line in one] == [(line["kind"], line["step"]) for line in two]
    assert len(one) == 10
    for alone, shared in zip(one, two, strict=True):
        assert abs(alone["loss"] - shared["loss"]) < 1e-5 * alone["loss"], alone["step"]
        assert alone["tau"] == shared["tau"]
    assert [(line["images"], line["top1"]) for line in one[-1:]] == [
        (line["images"], line["top1"]) for line in two[-1:]
    ]
    assert one[-1]["images"] == 25

    states = [
        torch.load(tmp_path / name / "last" / "training.pt", weights_only=True)["trainer"] for name in ("one", "two")
    ]
    for part in ("model", "average"):
        for name, tensor in states[0][part].items():
            torch.testing.assert_close(tensor, states[1][part][name], rtol=1e-4, atol=1e-5, msg=f"{part}: {name}")


def test_sigterm_to_one_process_ends_all_at_the_same_step(tmp_path: Path) -> None:
    """Only the second process gets it, in step 6: both end after that step, and the main one has written it down."""
    script = Path(__file__).with_name("shared_run.py")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 0"
    words = [sys.executable, *torchrun.split(), str(script), str(tmp_path / "run"), "5", "SIGTERM", "1000"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.count("ended by SIGTERM after step 6 of 8") == 2
    state = torch.load(tmp_path / "run" / "last" / "training.pt", weights_only=True)
    assert state["trainer"]["steps_done"] == 6
    assert not (tmp_path / "run" / ".lock-holder.json").exists()
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 4, 5, 6]

"""Two real processes, joined over gloo, against one with the same batch."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from shared_run import shared_run

from kernelwarehouse.training.metrics import read_metrics


def test_two_processes_train_as_one_even_if_one_is_killed(tmp_path: Path) -> None:
    """Two processes in two parts each; the second is killed at step 5, and torchrun starts both again."""
    shared_run(tmp_path / "one")
    script = Path(__file__).with_name("shared_run.py")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1"
    words = [sys.executable, *torchrun.split(), str(script), str(tmp_path / "two"), "5"]
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)

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

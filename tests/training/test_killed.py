"""Runs that are really killed, by SIGKILL, and started again with the same command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import kernelwarehouse as kw
from kernelwarehouse.training.metrics import read_metrics

RECIPE = ["warmup_epochs=0.5", "ema_decay=0.9", "auto_augment=rand-m5", "random_erasing=0.3", "drop_path=0.1"]
MIXING = ["mixup=0.4", "cutmix=0.4", "mix_probability=0.7", "learning_rate=0.02"]


def command(data: Path, output: Path, *, epochs: int, workers: int) -> list[str]:
    arguments = f"train kw1x_resnet18 --data {data} --recipe small --output {output} --epochs {epochs} --batch-size 16 "
    arguments += f"--workers {workers} --report-every 1 --checkpoint-seconds 0 --device-batch-size 8 --seed 3 "
    arguments += "--model-arg channels=[8,8,16,16] --model-arg layers=[1,1,1,1]"
    settings = [word for text in RECIPE + MIXING for word in ("--set", text)]
    return [sys.executable, "-m", "kernelwarehouse", *arguments.split(), *settings]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def kill_after(words: list[str], metrics: Path, lines: int, delay: float) -> int:
    """Start the command, wait until it has reported so often, wait a little more, and kill it; its last step."""
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(read_metrics(metrics)) < lines:
            if process.poll() is not None:
                raise AssertionError(f"the run ended by itself with code {process.returncode}")
            time.sleep(0.005)
        time.sleep(delay)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    return read_metrics(metrics)[-1]["step"]


def test_killed_runs_end_with_the_weights_of_an_unbroken_one(striped_npz: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(striped_npz, whole, epochs=6, workers=1), env=environment(), check=True)

    # Kills during the first steps, in the middle of an epoch, and around its end; with other numbers of workers.
    reached = 0
    for lines, delay, workers in ((1, 0.0, 2), (9, 0.013, 0), (16, 0.031, 1)):
        words = command(striped_npz, broken, epochs=6, workers=workers)
        step = kill_after(words, broken / "metrics.jsonl", lines, delay)
        assert reached < step < 24
        reached = step
    last = command(striped_npz, broken, epochs=6, workers=1)
    shown = subprocess.run(last, env=environment(), check=True, capture_output=True, text=True).stdout
    assert f"resuming {broken} at step" in shown

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

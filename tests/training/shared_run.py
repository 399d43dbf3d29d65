"""A short run for one process or many: `torchrun ... shared_run.py OUTPUT STEP SIGNAL [SECONDS]`.

At STEP the second process sends itself the signal, the first time round. SECONDS lie between checkpoints.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from kernelwarehouse.data import ArrayImages, DataSet
from kernelwarehouse.training.distributed import join_processes
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import load_recipe
from kernelwarehouse.training.run import Run, RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import RunSettings
from tiny_things import layer_norm_network, striped_arrays

# All that is random here belongs to single images, so it is the same however they are dealt.
CHANGES = {
    "epochs": 2,
    "batch_size": 16,
    "learning_rate": 0.05,
    "warmup_epochs": 0.5,
    "tau_epochs": 1.5,
    "random_erasing": 0.3,
    "auto_augment": "rand-m5",
    "ema_decay": 0.9,
    "clip_norm": 5.0,
}


def shared_run(
    output: Path, *, device_batch_size: int = 0, signal_at: int = -1, number: int = 0, checkpoint_seconds: float = 0
) -> None:
    train, validation = striped_arrays(64, 0), striped_arrays(25, 1)
    names = ("rows", "columns", "down", "up")
    data = DataSet("striped", names, ArrayImages(*train, "train"), ArrayImages(*validation, "validation"))
    options = RunOptions(
        workers=0, report_every=1, checkpoint_seconds=checkpoint_seconds, device_batch_size=device_batch_size
    )
    with join_processes("cpu") as processes:
        # Processes start from different weights: the first one's must reach them all.
        torch.manual_seed(processes.rank)
        run = Run(
            layer_norm_network(),
            data,
            RunSettings("convnext", data.name, names, 16, 0, load_recipe("small").with_overrides(CHANGES)),
            RunFolder(output),
            options=options,
            processes=processes,
            display=Display(silent=True),
        )
        step = run.trainer.step

        def step_with_signal(parts: list) -> torch.Tensor:
            first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            if first_time and processes.rank == 1 and run.trainer.steps_done == signal_at:
                os.kill(os.getpid(), number)
            return step(parts)

        run.trainer.step = step_with_signal
        run.train()
    if processes.world_size == 1:
        return
    wrappers = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    if wrappers:
        raise RuntimeError(f"{len(wrappers)} wrappers have outlived their group of processes")


if __name__ == "__main__":
    output, step, name, *seconds = sys.argv[1:]
    shared_run(
        Path(output),
        device_batch_size=4,
        signal_at=int(step),
        number=signal.Signals[name],
        checkpoint_seconds=float(*seconds),
    )

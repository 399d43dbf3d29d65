"""How much of the speed of bare steps the training loop keeps.

    python -m benchmarks.training_loop

Bare steps are forward, backward and optimiser on one batch that is already in memory. The loop adds reading and
augmenting images, seeds, schedules, temperature, and the sums that are reported. Both take turns in one process, after
a turn of each that is not counted. The share on the clock counts waiting for images. The share of the process's own CPU
time does not, and it does not suffer from what else the machine is doing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks import results, tables
from kernelwarehouse.data import open_dataset
from kernelwarehouse.training.api import own_image_size
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import Batch
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.optimisation import make_loss, make_optimizer
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.training.run import Run, RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import RunSettings

# Steps of a turn: several times what workers read ahead, so that little is read while it is not the loop's turn.
TURN = 20


class Turn(NamedTuple):
    """Seconds that `TURN` steps took, on the clock and of this process's CPU time."""

    clock: float
    cpu: float


def now() -> Turn:
    return Turn(time.perf_counter(), time.process_time())


def since(start: Turn) -> Turn:
    return Turn(*(end - begin for end, begin in zip(now(), start, strict=True)))


def bare_turns(name: str, recipe: Recipe, batch: Batch) -> Iterator[Turn]:
    """Bare steps, again and again."""
    model = build_network(name, recipe, 10, seed=0).train()
    optimizer, loss = make_optimizer(model, recipe), make_loss(recipe)
    while True:
        start = now()
        for _ in range(TURN):
            loss(model(batch.images), batch.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield since(start)


def loop_turns(name: str, recipe: Recipe, folder: Path, workers: int) -> Iterator[Turn]:
    """From report to report of a real run; they come every `TURN` steps."""
    data = open_dataset("embedded")
    run = Run(
        build_network(name, recipe, len(data.classes), seed=0),
        data,
        RunSettings(name, data.name, data.classes, own_image_size(data), 0, recipe),
        RunFolder(folder),
        options=RunOptions(workers=workers, report_every=TURN, checkpoint_seconds=1e9),
        processes=Processes(),
        display=Display(silent=True),
    )
    reports = run.train_and_report()
    while True:
        start = now()
        next(reports)
        yield since(start)


def measure(name: str, batch_size: int, workers: int, turns: int) -> dict[str, Any]:
    # So many epochs that the run does not end, and none of them ends while it is measured.
    changes = {"epochs": 10_000, "batch_size": batch_size, "tau_epochs": 10_000.0, "label_smoothing": 0.0}
    recipe = load_recipe("small").with_overrides(changes)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, 28, 28, generator=generator)
    batch = Batch(images, torch.randint(0, 10, (batch_size,), generator=generator), [])
    with tempfile.TemporaryDirectory() as folder:
        bare, loop = bare_turns(name, recipe, batch), loop_turns(name, recipe, Path(folder), workers)
        for warm_up in (bare, loop):
            next(warm_up)
        pairs = [(next(bare), next(loop)) for _ in range(turns)]
    images = TURN * batch_size
    return {
        "network": name,
        "bare images/s": images / statistics.median(bare.clock for bare, _ in pairs),
        "loop images/s": images / statistics.median(loop.clock for _, loop in pairs),
        "share": statistics.median(bare.clock / loop.clock for bare, loop in pairs),
        "share of CPU time": statistics.median(bare.cpu / loop.cpu for bare, loop in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_loop", description="The loop and bare steps.")
    parser.add_argument("--networks", nargs="+", default=["small_resnet", "kw1x_small_resnet"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both (%(default)s)")
    parser.add_argument("--turns", type=int, default=8, help=f"of {TURN} steps each (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    facts = results.machine(arguments.threads)
    out = results.destination("training_loop", facts, arguments.out)
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments.batch_size, arguments.workers, arguments.turns) for name in arguments.networks]
    Console().print(tables.training_loop(rows).rich("bare steps and the training loop"))
    results.write(out, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()

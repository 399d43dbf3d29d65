"""`make demo`: train a small network on embedded images, upgrade it to KernelWarehouse, and train both some more."""

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table

from kernelwarehouse._terminal import console
from kernelwarehouse.data import DataSet, open_dataset
from kernelwarehouse.errors import KernelWarehouseError
from kernelwarehouse.report.page import write_page
from kernelwarehouse.report.run import RunSummary, runs_page, summarise_run
from kernelwarehouse.study.statistics import estimate
from kernelwarehouse.training.api import train
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.training.run import RunOptions
from kernelwarehouse.training.run_folder import RunFolder

STATIC, TWIN = "small_resnet", "kw1x_small_resnet"
UPGRADE = {"begin": "logits"}
SEEDS = 2
# Rates are those that `studies/demo.toml` found best on training images that it kept apart.
LENGTHS = {"batch_size": 64, "warmup_epochs": 0.5}
FIRST = {"epochs": 4, "learning_rate": 0.8}
MORE_STATIC = {"epochs": 2, "learning_rate": 0.4}
MORE_UPGRADED = {"epochs": 2, "learning_rate": 0.2}


@dataclass(frozen=True)
class Seed:
    """What one seed gave: the network at first, after more epochs, and after as many as upgraded."""

    first: RunSummary
    more: RunSummary
    upgraded: RunSummary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernelwarehouse.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how often all of it is done (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds (={arguments.seeds}) must be at least 1")
    # The other half of the cores is for the processes that read images: more threads than cores slow each other down.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    began = time.monotonic()
    out = console()
    data = open_dataset("embedded")
    counts = f"{len(data.validation.labels):,} to validate"
    if data.train is not None:
        counts = f"{len(data.train.labels):,} images of 28x28 to train, {counts}"
    out.print(f"Embedded Fashion-MNIST: {counts}, {len(data.classes)} classes.")
    seeds = [run_seed(seed, data, arguments.output / f"seed{seed}") for seed in range(arguments.seeds)]
    shown = seeds[0]
    title = f"{STATIC}, and its upgrade to KernelWarehouse"
    about = f"{data.name} images, seed 0: both begin with the weights of {STATIC} after {FIRST['epochs']} epochs."
    report = write_page(runs_page(title, about, [shown.more, shown.upgraded]), arguments.output / "report.html")
    out.print("", result_table(seeds))
    out.print(f"Report with curves, predictions and attention heat maps: {report.resolve()}", soft_wrap=True)
    out.print(f"{time.monotonic() - began:.0f} seconds in all.")
    return 0


def run_seed(seed: int, data: DataSet, output: Path) -> Seed:
    """Train, upgrade, and train both; the same call again resumes what was begun."""
    out = console()
    options = RunOptions(seed=seed, report_every=39)

    def trained(name: str, model: str, changes: dict[str, float], begin: RunFolder | None = None) -> RunSummary:
        out.print(f"\nTraining {name} (in {output / name}; the same command again resumes it):")
        folder = train(
            model,
            data,
            recipe_of(changes),
            output / name,
            options=options,
            arguments=UPGRADE if model == TWIN else None,
            weights=begin.path / "last" if begin else None,
        )
        return replace(summarise_run(folder, data), name=name)

    first = trained("static", STATIC, FIRST)
    folder = RunFolder(output / "static")
    difference = upgrade_difference(folder, data, seed)
    out.print(f"Upgraded, it gives the same outputs at once: on validation images they differ by {difference:.1e}.")
    more = trained("static-goes-on", STATIC, MORE_STATIC, folder)
    return Seed(first, more, trained("upgraded", TWIN, MORE_UPGRADED, folder))


def recipe_of(changes: dict[str, float]) -> Recipe:
    return load_recipe("small").with_overrides(LENGTHS | changes)


@torch.no_grad()
def upgrade_difference(folder: RunFolder, data: DataSet, seed: int) -> float:
    """How far the outputs of the trained network and of its upgrade are apart, relative to the largest output."""
    weights, classes = folder.path / "last", len(data.classes)
    trained = open_trained(weights)
    images = trained.prepare([data.validation.load(number) for number in range(0, len(data.validation.labels), 50)])
    upgraded = build_network(TWIN, recipe_of(FIRST), classes, seed=seed, arguments=UPGRADE, weights=weights).eval()
    expected = trained.network.eval()(images)
    return float((upgraded(images) - expected).abs().max() / expected.abs().max())


def result_table(seeds: list[Seed]) -> Table:
    """Means over the seeds, and their standard deviation."""
    columns = {
        f"{STATIC}, {FIRST['epochs']} epochs": [seed.first for seed in seeds],
        f"{MORE_STATIC['epochs']} more": [seed.more for seed in seeds],
        f"upgraded, {MORE_UPGRADED['epochs']} more": [seed.upgraded for seed in seeds],
    }
    table = Table(title=f"Mean of {len(seeds)} seeds" if len(seeds) > 1 else "One seed")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row("parameters", *(f"{runs[0].parameters:,}" for runs in columns.values()))
    for name, key in (("top-1 after the last epoch", "top1"), ("validation loss", "loss")):
        cells = [
            spread([run.epochs[-1][key] for run in runs], ".2%" if key == "top1" else ".3f")
            for runs in columns.values()
        ]
        table.add_row(name, *cells)
    table.add_row(
        "time of a step",
        *(f"{fmean(run.seconds_per_step for run in runs) * 1000:,.0f} ms" for runs in columns.values()),
    )
    gains = [seed.upgraded.epochs[-1]["top1"] - seed.more.epochs[-1]["top1"] for seed in seeds]
    table.add_row("upgraded - static, in points", "", "", ", ".join(f"{100 * gain:+.2f}" for gain in gains))
    return table


def spread(values: list[float], form: str) -> str:
    found = estimate(values)
    deviation = found.deviation if found else None
    text = f"{fmean(values):{form}}"
    return text if deviation is None else f"{text} ± {deviation:{form}}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KernelWarehouseError as error:
        print(f"kernelwarehouse: {error}", file=sys.stderr)
        sys.exit(2)

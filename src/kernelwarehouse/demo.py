"""`make demo`: train a small network and its KernelWarehouse twin on embedded images, and put them side by side."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.table import Table

from kernelwarehouse._terminal import console
from kernelwarehouse.data import DataSet, open_dataset
from kernelwarehouse.errors import KernelWarehouseError
from kernelwarehouse.report.page import write_page
from kernelwarehouse.report.run import result_table, runs_page, summarise_run, write_run_report
from kernelwarehouse.training.api import train
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.training.run import RunOptions

STATIC, TWIN = "small_resnet", "kw1x_small_resnet"
# The recipe for small images, shorter, with tau over half of the run: few steps need its help for longer.
CHANGES = {"epochs": 5, "batch_size": 64, "tau_epochs": 2.5}
OPTIONS = RunOptions(seed=0, report_every=39)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernelwarehouse.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    output = parser.parse_args().output
    # The other half of the cores is for the processes that read images: more threads than cores slow each other down.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    began = time.monotonic()
    out = console()
    data = open_dataset("embedded")
    recipe = load_recipe("small").with_overrides(CHANGES)
    counts = f"{len(data.validation.labels):,} to validate"
    if data.train is not None:
        counts = f"{len(data.train.labels):,} images of 28x28 to train, {counts}"
    out.print(f"Embedded Fashion-MNIST: {counts}, {len(data.classes)} classes.")
    difference = start_difference(data, recipe)
    out.print(f"Before training (tau 1) the twin gives the static network's outputs: they differ by {difference:.1e}.")
    summaries = []
    for name in (STATIC, TWIN):
        out.print(f"\nTraining {name} (in {output / name}; the same command again resumes it):")
        folder = train(name, data, recipe, output / name, options=OPTIONS)
        write_run_report(folder, data)
        summaries.append(summarise_run(folder, data))

    title = f"{STATIC} and its KernelWarehouse twin"
    about = f"{recipe.epochs} epochs on {data.name} images, the same recipe, seed and order of images for both."
    report = write_page(runs_page(title, about, summaries), output / "report.html")
    result = result_table(summaries)
    table = Table(title=title)
    table.add_column("")
    for name in result.columns[1:]:
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(*row)
    out.print("", table)
    out.print(
        f"Report with curves, predictions and the attention heat maps of the twin: {report.resolve()}", soft_wrap=True
    )
    out.print(f"{time.monotonic() - began:.0f} seconds in all.")
    return 0


@torch.no_grad()
def start_difference(data: DataSet, recipe: Recipe) -> float:
    """How far the outputs of the two new networks are apart on the same images, relative to the largest output."""
    images = torch.randn(16, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    # timm starts the last norm of every block at 0, which would hide the converted layers from the outputs.
    visible = {"zero_init_last": False}
    static, twin = (
        build_network(name, recipe, len(data.classes), seed=OPTIONS.seed, arguments=visible).eval()(images)
        for name in (STATIC, TWIN)
    )
    return float((twin - static).abs().max() / static.abs().max())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KernelWarehouseError as error:
        print(f"kernelwarehouse: {error}", file=sys.stderr)
        sys.exit(2)

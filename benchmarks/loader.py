"""Images per second of the loader alone: decoding, augmentation and collating, for numbers of worker processes.

python -m benchmarks.loader                       the embedded images, and JPEG files of 500x375 made for it
python -m benchmarks.loader --data DIR --recipe advanced
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from benchmarks import results, tables
from kernelwarehouse.data import DataSet, FileImages, open_dataset
from kernelwarehouse.data.batches import TrainingBatches
from kernelwarehouse.training.api import own_image_size
from kernelwarehouse.training.augment import training_transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import TrainingImages, read_batches, training_loader
from kernelwarehouse.training.recipe import load_recipe

PHOTOS = 256


def photo_like_files(folder: Path) -> DataSet:
    """JPEG files of ImageNet's usual size. Smooth noise compresses about as photographs do."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(PHOTOS):
        coarse = Image.fromarray(generator.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        path = folder / f"{number}.jpg"
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=92)
        paths.append(path)
    files = FileImages(paths, [0] * PHOTOS)
    return DataSet("made JPEG files, 500x375", ("photo",), files, files)


def images_per_second(data: DataSet, recipe_name: str, workers: int, seconds: float) -> float:
    """After the first batches, for about so many seconds."""
    recipe = load_recipe(recipe_name)
    if data.train is None:
        raise SystemExit(f"{data.name} has no training images")
    size = recipe.image_size or own_image_size(data)
    images = TrainingImages(data.train, training_transform(recipe, size), seed=0)
    batches = TrainingBatches(len(data.train.labels), 64, epochs=10**6, seed=0)
    stream = read_batches(training_loader(images, batches, workers, Processes()))
    for _ in range(4 * max(workers, 1)):  # workers start, and what they read ahead is not counted
        next(stream)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        count += len(next(stream).targets)
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description="Images per second of the loader.")
    parser.add_argument("--data", help="as for 'kernelwarehouse train'; default: two kinds of images that are at hand")
    parser.add_argument("--recipe", default="traditional", help="whose augmentation, with --data (%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, os.cpu_count() or 1])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each figure (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    facts = results.machine(1)
    out = results.destination("loader", facts, arguments.out)
    torch.set_num_threads(1)  # as in the workers
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data:
            cases = [(open_dataset(arguments.data), arguments.recipe)]
        else:
            files = photo_like_files(Path(folder))
            cases = [(open_dataset("embedded"), "small"), (files, "traditional"), (files, "advanced")]
        rows = [
            {
                "data": data.name,
                "recipe": recipe,
                "workers": workers,
                "images_per_second": images_per_second(data, recipe, workers, arguments.seconds),
            }
            for data, recipe in cases
            for workers in dict.fromkeys(arguments.workers)
        ]
    Console().print(tables.loader(rows).rich("images per second of the loader"))
    results.write(out, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()

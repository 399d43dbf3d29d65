"""Training by one call, as the command line and the demonstration do it."""

from pathlib import Path
from typing import Any

from kernelwarehouse._extras import require
from kernelwarehouse.data.images import DataSet
from kernelwarehouse.errors import DataError, UnreadableImageError
from kernelwarehouse.training.augment import training_transform
from kernelwarehouse.training.distributed import join_processes
from kernelwarehouse.training.network import build_network, check_fits
from kernelwarehouse.training.precision import require_precision
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run import Run, RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import RunSettings
from kernelwarehouse.training.task import Unreadable


def train(
    name: str,
    data: DataSet,
    recipe: Recipe,
    output: str | Path,
    *,
    options: RunOptions | None = None,
    arguments: dict[str, Any] | None = None,
    weights: Path | None = None,
    device: str = "",
) -> RunFolder:
    """Train the network `name` and leave everything in `output`. The same call again resumes the run, or finds it
    finished. The recipe's exceptions for this network hold. `arguments` go to the network's maker; `weights` is a
    folder of `kernelwarehouse.save` to start from."""
    require("train", "training")  # now, and not when the report is to be written, hours later
    options = options or RunOptions()
    folder = RunFolder(output)
    recipe = recipe.for_model(name)
    size = recipe.image_size or own_image_size(data, options.unreadable)
    training_transform(recipe, size)  # what it refuses is refused before the folder is taken
    with join_processes(device) as processes:
        require_precision(processes.device, recipe.precision)
        settings = RunSettings(
            model=name,
            data=data.name,
            classes=data.classes,
            image_size=size,
            seed=options.seed,
            recipe=recipe,
            arguments=arguments or {},
            weights=str(weights) if weights else None,
            fingerprint=data.fingerprint() if processes.is_main else None,
        )
        model = build_network(name, recipe, len(data.classes), seed=options.seed, arguments=arguments, weights=weights)
        check_fits(model, name, image_size=size, classes=len(data.classes))
        display = Display(silent=not processes.is_main)
        Run(model, data, settings, folder, options=options, processes=processes, display=display).train()
    return folder


def own_image_size(data: DataSet, unreadable: Unreadable = "stop") -> int:
    """The side of the images, for recipes that leave them as they are: that of the first one that can be read."""
    images = data.validation
    for number in range(len(images.labels)):
        try:
            width, height = images.load(number).size
        except UnreadableImageError:
            if unreadable == "stop":
                raise
            continue
        if width != height:
            raise DataError(
                f"{images.name(number)} is {width} x {height}; the recipe keeps the images' own size, which works for "
                "square ones: pass --set image_size=... to resize and crop"
            )
        return width
    raise DataError(f"{data.name}: none of the {len(images.labels)} validation images can be read")

"""Training by one call, as the command line and the demonstration do it."""

from pathlib import Path
from typing import Any

from kernelwarehouse.data.images import DataSet
from kernelwarehouse.errors import DataError
from kernelwarehouse.training.distributed import join_processes
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.precision import require_precision
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run import Run, RunOptions
from kernelwarehouse.training.run_folder import RunFolder


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
    finished. `arguments` go to the network's maker; `weights` is a folder of `kernelwarehouse.save` to start from."""
    options = options or RunOptions()
    folder = RunFolder(output)
    settings = {
        "model": name,
        "arguments": arguments or {},
        "weights": str(weights) if weights else None,
        "data": data.name,
        "classes": list(data.classes),
        "image_size": recipe.image_size or own_image_size(data),
        "seed": options.seed,
        "recipe": recipe.as_dict(),
    }
    with join_processes(device) as processes:
        require_precision(processes.device, recipe.precision)
        display = Display(silent=not processes.is_main)
        model = build_network(name, recipe, len(data.classes), seed=options.seed, arguments=arguments, weights=weights)
        run = Run(
            model,
            data,
            recipe,
            folder,
            settings=settings,
            options=options,
            processes=processes,
            display=display,
        )
        run.go()
    return folder


def own_image_size(data: DataSet) -> int:
    """The side of the images, for recipes that leave them as they are."""
    width, height = data.validation.load(0).size
    if width != height:
        raise DataError(
            f"{data.validation.name(0)} is {width} x {height}; the recipe keeps the images' own size, which works for "
            "square ones: pass --set image_size=... to resize and crop"
        )
    return width

"""What a classification run has learnt, for the backbone of a detector."""

from pathlib import Path

import torch
from torch import Tensor, nn

from kernelwarehouse.builder import builder_of
from kernelwarehouse.conversion import names_of, plan_of
from kernelwarehouse.errors import CheckpointError
from kernelwarehouse.planning.plan import PlannedWarehouse
from kernelwarehouse.saving.checkpoint import PLAN_FILE, load
from kernelwarehouse.temperature import HasTemperature, set_temperature
from kernelwarehouse.zoo import common_name


def find_checkpoint(folder: Path) -> Path:
    """What `kernelwarehouse.save` wrote: the folder itself, or the best or the last network of a run's folder."""
    for place in (folder, folder / "best", folder / "last"):
        if (place / PLAN_FILE).is_file():
            return place
    raise CheckpointError(
        f"{folder} has no network: neither {PLAN_FILE} nor best or last of a run; a folder that kernelwarehouse.save "
        "or kernelwarehouse train wrote is wanted"
    )


def load_backbone(body: nn.Module, folder: Path, name: str) -> None:
    """Copy what the classification network in `folder` has learnt, all but its classifier, and turn the attention start
    strategy off, as the paper fine-tunes."""
    place = find_checkpoint(folder)
    source = load(place)
    _check_same(body, source, place, name)
    theirs = {common_name(key): tensor for key, tensor in source.state_dict().items()}
    own = body.state_dict()
    _check_tensors(own, theirs, place, name)
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(theirs[common_name(key)])
    if any(isinstance(module, HasTemperature) for module in body.modules()):
        set_temperature(body, 0.0)


def _check_same(body: nn.Module, source: nn.Module, place: Path, name: str) -> None:
    """Refuse a network by another name, or with other warehouses."""
    wanted, found = builder_of(body), builder_of(source)
    if wanted is None or found is None:
        raise CheckpointError(
            f"{place} holds a {type(source).__name__}; the backbone {name} wants a network of the zoo's or timm's"
        )
    here, there = wanted.name.partition(".")[0], found.name.partition(".")[0]
    ours, theirs = (_warehouses(network, set(names_of(body))) for network in (body, source))
    if here != there:
        problem = f"a network made of {there}, not of {here}"
    elif bool(ours) != bool(theirs):
        problem = f"a {here} {'with' if theirs else 'without'} warehouses, not one {'with' if ours else 'without'}"
    elif ours != theirs:
        problem = f"a {here} with other warehouses: another preset's, or for other arguments"
    else:
        return
    raise CheckpointError(f"{place} holds another network than the backbone {name}: {problem}; train a {name} first")


def _warehouses(network: nn.Module, layers: set[str]) -> list[PlannedWarehouse]:
    """Those that any of these layers draws on: not a classifier's, which depends on the number of classes."""
    plan = plan_of(network)
    found = () if plan is None else plan.warehouses
    if not layers:
        return list(found)
    return [planned for planned in found if any(layer.spec.name in layers for layer in planned.layers)]


def _check_tensors(own: dict[str, Tensor], theirs: dict[str, Tensor], place: Path, name: str) -> None:
    for key, tensor in own.items():
        found = theirs.get(common_name(key))
        if found is None or found.shape != tensor.shape:
            there = "missing" if found is None else f"of shape {tuple(found.shape)}"
            raise CheckpointError(
                f"{place} does not fit the backbone {name}: {key!r} is of shape {tuple(tensor.shape)} here and {there} "
                "there; give the detector the arguments that the classifier was built with"
            )

"""Save and load models: weights as safetensors, everything else as JSON."""

import contextlib
import copy
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernelwarehouse._files import replacing, write_file
from kernelwarehouse.errors import CheckpointError, KernelWarehouseWarning, PlanError
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.saving.origin import Architecture, identify
from kernelwarehouse.saving.placement import Placement, find_placement
from kernelwarehouse.saving.sliding import slides_otherwise, sliding

FORMAT = 2  # 1 had no names: every layer of the plan was in the model, or the zoo knew better
PLAN_FILE = "plan.json"
_OWN_WEIGHTS = re.compile(r"model-[0-9a-f]{8}\.safetensors")
_KEYS = frozenset({"format", "weights", "class", "architecture", "plan"})


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a model, converted or static, into a directory: `plan.json` and the weights it names.

    The weights go to a new file and `plan.json`, which names them, is then replaced in one step: whatever fails, the
    directory holds a whole model, the old one or the new one. Files that `save` did not write stay. Nothing changes on
    the model. A `KernelWarehouseWarning` says where `load` will need a `model` though the class is not the user's own:
    for a network of the zoo that was changed, or a wrapper around a converted model.

    Arguments:
        model: any model; for DistributedDataParallel, DataParallel and torch.compile, the one inside is saved.
        directory: made if it is not there. It may not be a symbolic link, and neither may the files to be replaced.

    Raises:
        CheckpointError: for a model that `load` could not give back, because its layers are not those of its plan any
            more; for links and a `plan.json` of someone else; where writing fails.

    Example:
        >>> import kernelwarehouse as kw
        >>> kw.save(kw.create_model("kw1x_mobilenetv2_050", num_classes=2), "two_classes")
        >>> kw.load("two_classes").num_classes
        2
    """
    model = unwrap(model)
    directory = Path(directory)
    _check_has_memory(model)
    placement, problem = find_placement(model)
    origin = identify(model, placement)
    if origin.architecture is None and problem is not None:
        raise CheckpointError(f"this {type(model).__name__} could not be loaded again: {problem}")
    old = _weights_to_replace(directory)
    if origin.architecture is None and (origin.misfit or _is_wrapper(placement)):
        warnings.warn(_how_to_load(model, directory, placement, origin.misfit), KernelWarehouseWarning, stacklevel=2)
    weights = directory / f"model-{secrets.token_hex(4)}.safetensors"
    description = {
        "format": FORMAT,
        "weights": weights.name,
        "class": type(model).__name__,
        "architecture": origin.architecture.to_dict() if origin.architecture else None,
        "plan": placement.plan.to_dict() if placement else None,
        "names": placement.names if placement else None,
        "sliding": sliding(model),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(weights) as aside:
            save_file(_unshared(model.state_dict()), aside)
        write_file(directory / PLAN_FILE, json.dumps(description, indent=1))
    except BaseException as error:
        with contextlib.suppress(OSError):
            weights.unlink(missing_ok=True)
        if isinstance(error, Exception):
            raise CheckpointError(f"the model could not be saved to {directory}: {error}") from error
        raise
    if old is not None:
        with contextlib.suppress(OSError):  # the new model is in place; an old file that stays does no harm
            old.unlink()


def load(directory: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read what `save` wrote, in evaluation mode and on the CPU, whatever torch's default device is.

    A model that timm, torchvision or the zoo built is rebuilt by name. Nothing is unpickled, and a description can ask
    for registered networks with plain arguments only: it cannot make this function fetch or read anything else.

    Arguments:
        directory: what `save` was given.
        model: for a model that no library builds, a new one like that before it was converted. It stays as it is,
            where it is; a copy of it gets the weights and is returned. A `KernelWarehouseWarning` says where its
            convolutions slide otherwise (stride, padding, dilation) than those that were saved.

    Raises:
        CheckpointError: for files that are missing, damaged, of a newer format, or of another model.
        PlanError: for a `model` that the stored plan does not fit.

    Example:
        >>> import kernelwarehouse as kw
        >>> kw.save(kw.create_model("kw1x_mobilenetv2_050", num_classes=2), "two_classes")
        >>> kw.load("two_classes").training
        False
    """
    directory = Path(directory)
    description = _read_description(directory)
    placement = _read_placement(description, directory)
    with torch.device("cpu"), torch.inference_mode(False):  # weights made in inference mode can never be trained
        if model is None:
            model = _rebuild(description, directory, placement)
        else:
            _check_has_memory(model)
            model = copy.deepcopy(model)
            model = model if placement is None else placement.apply(model)
            otherwise = slides_otherwise(description.get("sliding"), model)
            if otherwise is not None:
                warnings.warn(f"{directory}: {otherwise}", KernelWarehouseWarning, stacklevel=2)
        try:
            state = load_file(directory / description["weights"])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory / description['weights']} cannot be read: {error}") from error
        load_state(model, state, str(directory))
    return model.eval()


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict whole, or say what does not fit and leave the model as it was."""
    own = model.state_dict()
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unexpected:
        problems = {"missing": missing, "unknown": unexpected}
        parts = [f"{len(names)} {what}, such as {names[0]!r}" for what, names in problems.items() if names]
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {' and '.join(parts)}")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
            raise CheckpointError(f"{source} does not fit {type(model).__name__}: {name!r} is {shapes}")
    # Types follow the file: a model saved in bfloat16 comes back in bfloat16.
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, target in tensors:
        if name in state and target.dtype != state[name].dtype:
            target.data = target.data.to(state[name].dtype)
    model.load_state_dict(dict(state))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _weights_to_replace(directory: Path) -> Path | None:
    """The weights of the model that the directory holds now, if `save` wrote them. Refuses what is not its own."""
    path = directory / PLAN_FILE
    _refuse_link(directory, f"give the directory that it leads to: {os.path.realpath(directory)}")
    _refuse_link(path, "remove it or choose another directory")
    if not path.exists():
        return None
    try:
        description = _read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it would be overwritten, choose another directory") from error
    name = description["weights"]
    if not isinstance(name, str) or not _OWN_WEIGHTS.fullmatch(name):
        return None
    weights = directory / name
    _refuse_link(weights, "remove it or choose another directory")
    return weights if weights.exists() and stat.S_ISREG(weights.lstat().st_mode) else None


def _refuse_link(path: Path, hint: str) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, and a model is not saved through links; {hint}")


def _is_wrapper(placement: Placement | None) -> bool:
    """Whether the plan is that of a model inside the saved one."""
    return placement is not None and any(name != inside for name, inside in placement.names.items())


def _how_to_load(model: nn.Module, directory: Path, placement: Placement | None, misfit: str | None) -> str:
    kind = type(model).__name__
    new = f"a new {kind}" if placement is None else f"a new {kind} like this one before it was converted"
    why = misfit or f"{kind} holds a converted model"
    call = f"kernelwarehouse.load({str(directory)!r}"
    return f"{call}) cannot rebuild this model alone ({why}); use {call}, model=...) with {new}"


def _check_has_memory(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise CheckpointError(
                f"this {type(model).__name__} has no memory for weights: {name!r} is on the device meta; "
                "make the model on the CPU or another real device"
            )


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Safetensors wants tensors that are contiguous and share no memory; tied weights are written twice."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        hint = "a directory written by kernelwarehouse.save is wanted"
        raise CheckpointError(f"{path} cannot be read: {error}; {hint}") from error
    if not isinstance(description, dict) or not description.keys() >= _KEYS:
        raise CheckpointError(f"{path} is not a description written by kernelwarehouse.save")
    return description


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / PLAN_FILE
    description = _read_json(path)
    number = description["format"]
    if type(number) is not int or not 1 <= number <= FORMAT:
        hint = "it comes from a newer version" if type(number) is int and number > FORMAT else "it is damaged"
        raise CheckpointError(f"{path} has format {number!r}; this library reads 1 to {FORMAT}: {hint}")
    weights = description["weights"]
    if not isinstance(weights, str) or Path(weights).name != weights:
        raise CheckpointError(f"{path} names weights {weights!r}; a file beside it is wanted")
    return description


def _read_placement(description: dict[str, Any], directory: Path) -> Placement | None:
    path = directory / PLAN_FILE
    if description["plan"] is None:
        return None
    try:
        placement = Placement.whole(Plan.from_dict(description["plan"]))
    except PlanError as error:
        raise CheckpointError(f"{path} holds a damaged plan: {error}") from error
    if description["format"] == 1:
        return placement
    names = description.get("names")
    if not isinstance(names, dict) or not names.keys() <= placement.names.keys():
        raise CheckpointError(f"{path} holds names of layers that its plan does not have: {names!r}")
    if not all(isinstance(name, str) for name in names.values()) or len(set(names.values())) < len(names):
        raise CheckpointError(f"{path} does not give every layer of its plan a name of its own: {names!r}")
    return Placement(placement.plan, names)


def _rebuild(description: dict[str, Any], directory: Path, placement: Placement | None) -> nn.Module:
    if description["architecture"] is None:
        raise CheckpointError(
            f"{directory} holds a {description['class']}, which no library builds by name; give a new one: "
            f"kernelwarehouse.load({str(directory)!r}, model={description['class']}(...))"
        )
    try:
        return Architecture.from_dict(description["architecture"]).rebuild(placement)
    except (CheckpointError, PlanError) as error:
        raise CheckpointError(f"{directory / PLAN_FILE}: {error}") from error

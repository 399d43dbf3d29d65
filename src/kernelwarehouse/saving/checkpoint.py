"""Save and load models: weights as safetensors, everything else as JSON."""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernelwarehouse.conversion import convert, plan_of
from kernelwarehouse.errors import CheckpointError, PlanError
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.saving.origin import Architecture, identify

FORMAT = 1
PLAN_FILE = "plan.json"


def save(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a model, converted or static, into a directory: `plan.json` and the weights it names.

    The weights go to a new file and `plan.json`, which names them, is then replaced in one step: whatever fails, the
    directory holds a whole model, the old one or the new one.
    """
    model = unwrap(model)
    directory = Path(directory)
    architecture, plan = identify(model), plan_of(model)
    weights = directory / f"model-{secrets.token_hex(4)}.safetensors"
    description = {
        "format": FORMAT,
        "weights": weights.name,
        "class": type(model).__name__,
        "architecture": architecture.to_dict() if architecture else None,
        "plan": plan.to_dict() if plan else None,
    }
    aside = directory / f".{PLAN_FILE}.{secrets.token_hex(4)}"
    old = _weights_in(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(_unshared(model.state_dict()), weights)
        aside.write_text(json.dumps(description, indent=1), encoding="utf-8")
        os.replace(aside, directory / PLAN_FILE)
    except BaseException as error:
        for file in (weights, aside):
            with contextlib.suppress(OSError):
                file.unlink()
        if isinstance(error, Exception):
            raise CheckpointError(f"the model could not be saved to {directory}: {error}") from error
        raise
    if old is not None:
        with contextlib.suppress(OSError):  # the new model is in place; an old file that stays does no harm
            old.unlink()


def load(directory: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read what `save` wrote. A model that timm, torchvision or the zoo built is rebuilt by name; for any other, give
    a new, unconverted `model` of the same class. The model comes in evaluation mode, on the CPU."""
    directory = Path(directory)
    description = _read_description(directory)
    try:
        plan = Plan.from_dict(description["plan"]) if description["plan"] else None
    except PlanError as error:
        raise CheckpointError(f"{directory / PLAN_FILE} holds a damaged plan: {error}") from error
    if model is None:
        model = _rebuild(description, directory, plan)
    elif plan is not None:
        model = convert(model, plan)
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


def _weights_in(directory: Path) -> Path | None:
    """The weights of the model that the directory holds now."""
    try:
        return directory / _read_description(directory)["weights"]
    except CheckpointError:
        return None


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Safetensors wants tensors that are contiguous and share no memory; tied weights are written twice."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return tensors


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / PLAN_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        hint = "a directory written by kernelwarehouse.save is wanted"
        raise CheckpointError(f"{path} cannot be read: {error}; {hint}") from error
    wanted = {"format", "weights", "class", "architecture", "plan"}
    if not isinstance(description, dict) or not wanted <= set(description):
        raise CheckpointError(f"{path} is not a description written by kernelwarehouse.save")
    if description["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {description['format']!r}; this library reads {FORMAT}")
    weights = description["weights"]
    if not isinstance(weights, str) or Path(weights).name != weights:
        raise CheckpointError(f"{path} names weights {weights!r}; a file beside it is wanted")
    return description


def _rebuild(description: dict[str, Any], directory: Path, plan: Plan | None) -> nn.Module:
    if description["architecture"] is None:
        raise CheckpointError(
            f"{directory} holds a {description['class']}, which no library builds by name; give a new one: "
            f"kernelwarehouse.load({str(directory)!r}, model={description['class']}(...))"
        )
    try:
        architecture = Architecture(**description["architecture"])
    except TypeError as error:
        raise CheckpointError(f"{directory / PLAN_FILE} has an architecture that is none: {error}") from error
    model = architecture.build()
    if architecture.library == "kernelwarehouse" or plan is None:
        return model
    return convert(model, plan)

"""The authors' released checkpoints, mapped onto our models."""

import argparse
import difflib
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.conversion import converted_layers
from kernelwarehouse.errors import CheckpointError, UnknownPresetError
from kernelwarehouse.saving.checkpoint import load_state
from kernelwarehouse.temperature import set_temperature
from kernelwarehouse.zoo import create_model, mobilenetv2, resnet

StateDict = Mapping[str, Tensor]

PUBLISHED = {preset.name: preset.name for preset in (*resnet.PRESETS, *mobilenetv2.PRESETS)} | {
    # The release calls the network that its code builds plain 1x; ours by that name is the paper's.
    "kw1x_convnext_tiny": "kw1x_convnext_tiny_published",
}
"""Published name -> preset."""
_WRAPPER_KEYS = ("model", "state_dict", "model_ema")
_WAREHOUSE = re.compile(r"warehouse_manager\.weights\.(\d+)")
_ATTENTION = {"fc1": "fc1", "norm1": "norm", "fc2": "fc2", "fc3": "basis"}


def load_published(name: str, source: str | os.PathLike[str] | Mapping[str, Any]) -> nn.Module:
    """A model of the authors' release, from its checkpoint file or state dict, at temperature 0 in evaluation mode.

    Files are read with `weights_only=True`: nothing in them is run.

    Arguments:
        name: the published one, such as `"kw1x_resnet18"`; `"kw1x_convnext_tiny"` is our
            `kw1x_convnext_tiny_published`.
        source: the path of a checkpoint, or its state dict, with or without a dictionary around it.

    Raises:
        UnknownPresetError: for a name that was not published.
        CheckpointError: for a file that is damaged, no checkpoint, or one of another network.
    """
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, PUBLISHED, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PUBLISHED)}"
        raise UnknownPresetError(f"no checkpoint named {name!r} was published; {hint}")
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise CheckpointError(f"source is {source!r}; the path of a checkpoint or its state dict is wanted")
    origin = "the state dict" if isinstance(source, Mapping) else os.fspath(source)
    content = source if isinstance(source, Mapping) else _read(origin)
    published = _state_dict(content, origin)
    model = create_model(PUBLISHED[name])
    state = model.state_dict()
    renamed = _rename(published, model, name, origin)
    # Beta and the temperature are not in the release: beta follows from the plan, trained models are at 0.
    extra = {key: value for key, value in state.items() if key.endswith(("attention.beta", "attention.temperature"))}
    shaped = {key: _fitted(key, value, state) for key, value in renamed.items()}
    load_state(model, extra | shaped, origin)
    set_temperature(model, 0.0)
    return model.eval()


def _read(path: str) -> Mapping[str, Any]:
    try:
        # The release keeps its command line in the file; a Namespace is a bag of values and runs no code.
        with torch.serialization.safe_globals([argparse.Namespace, PosixPath, PurePosixPath]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read as a PyTorch checkpoint: {reason}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a state dict or a dict around it is wanted")
    return content


def _state_dict(content: Mapping[str, Any], origin: str) -> StateDict:
    for key in _WRAPPER_KEYS:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    tensors = {str(key).removeprefix("module."): value for key, value in content.items()}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{origin} holds no state dict; keys are {', '.join(map(str, list(content)[:5]))}")
    return tensors


def _rename(published: StateDict, model: nn.Module, name: str, origin: str) -> dict[str, Tensor]:
    """Published names -> ours. Warehouses are numbered there in the order in which its modules first use them."""
    translate = next(function for family, function in _FAMILIES.items() if family in name)
    layers = converted_layers(model)
    keys = [key for key in model.state_dict() if key.endswith(".warehouse.cells")]
    key_of = {id(layers[key.removesuffix(".warehouse.cells")].warehouse): key for key in keys}
    numbered: dict[int, str] = {}  # our warehouses in published order, by identity
    renamed: dict[str, Tensor] = {}
    for key in sorted((key for key in published if not _WAREHOUSE.fullmatch(key)), key=_published_order):
        new = _our_name(key, translate)
        renamed[new] = published[key]
        if new.endswith(".attention.fc1.weight"):
            layer = layers.get(new.removesuffix(".attention.fc1.weight"))
            if layer is not None:
                numbered.setdefault(id(layer.warehouse), key_of[id(layer.warehouse)])
    places = list(numbered.values())
    for key, value in published.items():
        match = _WAREHOUSE.fullmatch(key)
        if match:
            number = int(match[1])
            if number >= len(places):
                raise CheckpointError(f"{origin} has a warehouse {key!r}; {name} has {len(places)} warehouses")
            renamed[places[number]] = value
    return renamed


def _published_order(key: str) -> list[tuple[int, int, str]]:
    """Sorts published names in the order of its modules, whatever order a dict has: numbers as numbers, heads last."""
    last = key.startswith(("classifier", "head", "fc"))
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
    return [(int(last), 0, ""), *parts]


def _our_name(key: str, translate: Callable[[str], str]) -> str:
    layer, attention, tensor = key.partition(".attention.")
    if not attention:
        return translate(key)
    prefix = translate(f"{layer}.bias").removesuffix(".bias")
    if tensor == "basis_bias":
        return f"{prefix}.attention.offset"
    part, _, leaf = tensor.partition(".")
    return f"{prefix}.attention.{_ATTENTION.get(part, part)}.{leaf}"


def _fitted(key: str, value: Tensor, state: StateDict) -> Tensor:
    """In the model's type and shape: the release keeps linear cells and scales with spatial axes of one."""
    if key in state:
        value = value.to(state[key].dtype)
    if key in state and value.shape != state[key].shape and value.numel() == state[key].numel():
        squeezed = [size for size in value.shape if size != 1]
        wanted = [size for size in state[key].shape if size != 1]
        if squeezed == wanted or key.endswith(".offset"):
            return value.reshape(state[key].shape)
    return value


def _resnet(key: str) -> str:
    return key


def _mobilenetv2(key: str) -> str:
    """torchvision's names, with blocks in one row, -> timm's, by stage and block."""
    key = re.sub(r"^classifier\.1\.(conv\.)?", "classifier.", key)
    head = {"features.0.0.": "conv_stem.", "features.0.1.": "bn1."}
    head |= {"features.18.0.": "conv_head.", "features.18.1.": "bn2."}
    for old, new in head.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    match = re.fullmatch(r"features\.(\d+)\.conv\.(\d+)\.(?:(\d)\.)?(.+)", key)
    if not match:
        return key
    block, position, inner, leaf = int(match[1]), int(match[2]), match[3], match[4]
    expanded = ("conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3")
    parts = ("conv_dw", "bn1", "conv_pw", "bn2") if block == 1 else expanded
    # Convolution and norm of a pair are `position.0` and `position.1`; the last pair is not nested.
    pairs = len(parts) // 2
    index = 2 * position + int(inner or 0) if position < pairs - 1 else 2 * (pairs - 1) + position - (pairs - 1)
    return f"blocks.{_mobilenet_block(block)}.{parts[index]}.{leaf}"


def _mobilenet_block(number: int) -> str:
    rows = (1, 2, 3, 4, 3, 3, 1)
    first = 1
    for row, count in enumerate(rows):
        if number < first + count:
            return f"{row}.{number - first}"
        first += count
    raise CheckpointError(f"MobileNetV2 has 17 blocks; the checkpoint has number {number}")


def _convnext(key: str) -> str:
    patterns = {
        r"downsample_layers\.0\.(\d)\.": r"stem.\1.",
        r"downsample_layers\.(\d)\.(\d)\.": r"stages.\1.downsample.\2.",
        r"stages\.(\d)\.(\d+)\.dwconv\.": r"stages.\1.blocks.\2.conv_dw.",
        r"stages\.(\d)\.(\d+)\.pwconv(\d)\.": r"stages.\1.blocks.\2.mlp.fc\3.",
        r"stages\.(\d)\.(\d+)\.(?!blocks)": r"stages.\1.blocks.\2.",
        r"norm\.": "head.norm.",
        r"head\.(?!norm|fc)": "head.fc.",
    }
    for old, new in patterns.items():
        changed, count = re.subn("^" + old, new, key)
        if count:
            return changed
    return key


_FAMILIES: dict[str, Callable[[str], str]] = {"resnet": _resnet, "mobilenetv2": _mobilenetv2, "convnext": _convnext}

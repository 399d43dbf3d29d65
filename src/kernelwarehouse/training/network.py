"""The network of a run: by name, with the recipe's regularisation, and with trained weights if asked for."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from kernelwarehouse.builder import builder_of, remember_builder
from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.errors import CheckpointError, TrainingError, UnknownPresetError
from kernelwarehouse.saving.checkpoint import load
from kernelwarehouse.training.recipe import Recipe


def build_network(
    name: str,
    recipe: Recipe,
    classes: int,
    *,
    seed: int,
    arguments: dict[str, Any] | None = None,
    weights: Path | None = None,
) -> nn.Module:
    """A new network of the zoo's or timm's, the same for the same seed; `weights` is a folder to start from."""
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "'kernelwarehouse zoo' and timm.list_models() list them"
        )
        raise UnknownPresetError(f"there is no network {name!r}; {hint}")
    regularisation = {"drop_rate": recipe.dropout, "drop_path_rate": recipe.drop_path}
    everything: dict[str, Any] = {"num_classes": classes} | {
        key: value for key, value in regularisation.items() if value
    }
    everything |= arguments or {}
    seed_generators(derive_seed("network", seed))
    try:
        model = timm.create_model(name, **everything)
    except TypeError as error:
        raise TrainingError(f"{name} does not take the arguments {everything}: {error}") from error
    if builder_of(model) is None:
        remember_builder(model, name, everything)
    if weights is not None:
        copy_weights(model, weights)
    return model


def copy_weights(model: nn.Module, folder: Path) -> None:
    """Take over what the network in `folder` has learnt. A classifier for other classes stays as it is, new."""
    state = load(folder).state_dict()
    own = model.state_dict()
    classifier = getattr(model, "default_cfg", {}).get("classifier") or ()
    heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    foreign = sorted(state.keys() ^ own.keys())
    wrong = [
        name
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape and not name.startswith(heads)
    ]
    if foreign or wrong:
        raise CheckpointError(
            f"{folder} holds another network than the one to train: {(foreign + sorted(wrong))[0]} is missing on one "
            "side or of another shape; --from wants the same network, with any number of classes"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape == state[name].shape:
                tensor.copy_(state[name])

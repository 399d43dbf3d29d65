"""The network of a run: by name, with the recipe's regularisation, and with trained weights if asked for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.attention import Attention
from kernelwarehouse.builder import builder_of, remember_builder
from kernelwarehouse.conversion import convert, plan_of
from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.drop_path import drop_evenly
from kernelwarehouse.errors import CheckpointError, ConfigError, ConvertError, PlanError, TrainingError
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.saving.checkpoint import load
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.zoo import build_by_name

# What the data decides, and no argument can change.
_DECIDED = {"num_classes": "as many as the data has", "in_chans": "3, since images are read as RGB"}


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
    for argument, reason in _DECIDED.items():
        if argument in (arguments or {}):
            raise ConfigError(f"{argument} is not to be chosen for a run: it is {reason}")
    regularisation = {"drop_rate": recipe.dropout, "drop_path_rate": recipe.drop_path}
    everything: dict[str, Any] = {"num_classes": classes} | {
        key: value for key, value in regularisation.items() if value
    }
    everything |= arguments or {}
    seed_generators(derive_seed("network", seed))
    model = build_by_name(name, **everything)
    if recipe.drop_path_rule == "even" and everything.get("drop_path_rate"):
        drop_evenly(model, everything["drop_path_rate"])
    if builder_of(model) is None:
        remember_builder(model, name, everything)
    if weights is not None and copy_weights(model, weights) and not recipe.tau_epochs:
        _refuse_forgetting(model, name)
    return model


@torch.no_grad()
def check_fits(model: nn.Module, name: str, *, image_size: int, classes: int) -> None:
    """Refuse a network that does not give one logit a class for an image of this size, before a run begins with it."""
    was_training = model.training
    try:
        output = model.eval()(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # a network can refuse an image in any way
        raise TrainingError(
            f"{name} cannot take images of {image_size} x {image_size} ({type(error).__name__}: {error}); use "
            "--set image_size=... for another size, or --model-arg img_size=... if the network is made for one size"
        ) from error
    finally:
        model.train(was_training)
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != (1, classes):
        raise TrainingError(
            f"{name} gives {found} for one image, but (1, {classes}) is wanted: one number for each class"
        )


def copy_weights(model: nn.Module, folder: Path) -> bool:
    """Take over what the network in `folder` has learnt. A classifier for other classes stays as it is, new.

    A static network is converted as the model was: its kernels become the model's cells. Whether that was so is
    returned.
    """
    source = load(folder)
    converted = _as_converted(source, plan_of(model), folder)
    state = converted.state_dict()
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
            "side or of another shape; --from wants the same network, with any number of classes, or the static one "
            "that it is made of"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape == state[name].shape:
                tensor.copy_(state[name])
    return converted is not source


def _refuse_forgetting(model: nn.Module, name: str) -> None:
    """At temperature 0, attentions that begin by it are new and random, whatever the cells hold."""
    if any(isinstance(module, Attention) and module.follows_temperature for module in model.modules()):
        raise ConfigError(
            f"{name} is made of a static network and begins by temperature, but tau_epochs is 0: what the static "
            "weights have learnt would be lost at once; use --model-arg begin=logits, or --set tau_epochs=1"
        )


def _as_converted(source: nn.Module, plan: Plan | None, folder: Path) -> nn.Module:
    if plan is None or plan_of(source) is not None:
        return source
    try:
        return convert(source, plan)
    except (PlanError, ConvertError) as error:
        raise CheckpointError(
            f"{folder} holds a static network that cannot be converted to the one to train ({error}); --from wants the "
            "same network, or the static one it is made of"
        ) from error

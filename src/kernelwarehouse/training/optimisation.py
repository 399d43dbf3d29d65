"""Optimiser, learning rate, loss and mixing of images, from the recipe. The parts are timm's and torch's."""

import warnings
from collections.abc import Callable
from typing import Any

from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models.convnext import ConvNeXtBlock
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import MultiStepLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from kernelwarehouse.attention import Attention
from kernelwarehouse.errors import KernelWarehouseWarning, RecipeError
from kernelwarehouse.step_sizes import divided, logit_parameters, matched_decay
from kernelwarehouse.training.recipe import EngineRecipe, Recipe

Loss = Callable[[Tensor, Tensor], Tensor]


def undecayed_parameters(model: nn.Module, recipe: EngineRecipe) -> set[str]:
    """Names of parameters without weight decay, beyond the norms and biases that timm leaves out by itself.

    The network's own wishes (position embeddings and the like), and, unless the recipe wants them decayed, the layers
    that make an attention's logits z: CAF uses only z / (sum|z| + 0.001), in which a factor on z cancels. Decay would
    therefore not restrain what the layer expresses; it would only shrink z until the 0.001 counts, and with it every
    kernel that is assembled. (It also keeps z from growing until no step turns it any more: `docs/training.md`.)
    """
    own = getattr(model, "no_weight_decay", None)
    names = set(own()) if callable(own) else set()
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            logits = logit_parameters(module)
            if recipe.decay_logits:
                logits = [name for name in logits if name == "offset"]  # biases, though in a table of two axes
            names |= {f"{path}.{name}" for name in logits}
    return names


def decay_groups(model: nn.Module, recipe: EngineRecipe) -> list[dict[str, Any]]:
    """The parameters in a group without weight decay and one with it."""
    groups: list[dict[str, Any]] = param_groups_weight_decay(
        model, recipe.weight_decay, no_weight_decay_list=undecayed_parameters(model, recipe)
    )
    if not recipe.decay_layer_scale or not recipe.weight_decay:
        return groups
    without, decayed = groups
    scales = {id(module.gamma) for module in model.modules() if isinstance(module, ConvNeXtBlock)}
    decayed["params"] += [parameter for parameter in without["params"] if id(parameter) in scales]
    without["params"] = [parameter for parameter in without["params"] if id(parameter) not in scales]
    return groups


def match_steps(groups: list[dict[str, Any]], model: nn.Module, optimizer: str) -> list[dict[str, Any]]:
    """The groups, divided by what their parameters' rates are to be multiplied by, with the decay that goes with it.

    timm's schedules multiply by `lr_scale`, and optimisers keep it in checkpoints: a run that goes on has its factors,
    which depend on the weights it started with.
    """
    grows, known = _steps_of(optimizer)
    matched = [
        group | {"params": members, "lr_scale": factor, "weight_decay": matched_decay(group["weight_decay"], factor)}
        for group in groups
        for factor, members in divided(group["params"], model, adaptive=not grows)
    ]
    if not known and any(group["lr_scale"] != 1 for group in matched):
        warnings.warn(  # and go on: a study may want just that
            f"matched_steps is true and optimizer is {optimizer!r}: the rates of cells and attentions are multiplied "
            f"by factors for {'SGD' if grows else 'Adam'}, which may not suit it; set matched_steps=false for one rate",
            KernelWarehouseWarning,
            stacklevel=3,
        )
    return matched


def _steps_of(optimizer: str) -> tuple[bool, bool]:
    """Whether its steps grow with the gradient, and whether factors are meant for it, by timm's name.

    Names that end in c decay by the square of the rate.
    """
    grows = "sgd" in optimizer or optimizer.startswith(("nesterov", "momentum"))
    alike = ("adam", "adan", "adopt", "adabelief", "laprop", "lion")
    adaptive = any(part in optimizer for part in alike) and "muon" not in optimizer
    return grows, (grows or adaptive) and not optimizer.endswith("c")


def make_optimizer(model: nn.Module, recipe: EngineRecipe) -> Optimizer:
    groups = decay_groups(model, recipe)
    if recipe.matched_steps:
        groups = match_steps(groups, model, recipe.optimizer)
    try:
        return create_optimizer_v2(
            groups, opt=recipe.optimizer, lr=recipe.learning_rate, weight_decay=0.0, momentum=recipe.momentum
        )
    except Exception as error:  # some need other packages or a GPU, and each says so in a way of its own
        raise RecipeError(
            f"optimizer (={recipe.optimizer!r}) cannot be used here ({type(error).__name__}: {error}); "
            "sgd, momentum, adamw and others of timm's need nothing beside torch"
        ) from error


def make_schedule(optimizer: Optimizer, recipe: EngineRecipe, steps_per_epoch: int) -> Scheduler:
    """Call `step_update(n)` when n steps are done."""
    drops = recipe.drops
    if recipe.schedule == "step" and isinstance(drops, tuple):
        return MultiStepLRScheduler(
            optimizer,
            decay_t=[epoch * steps_per_epoch + 1 for epoch in drops],  # timm's own count is one step ahead
            decay_rate=recipe.decay_factor,
            warmup_t=round(recipe.warmup_epochs * steps_per_epoch),
            warmup_lr_init=recipe.warmup_learning_rate,
            warmup_prefix=False,
            t_in_epochs=False,
        )
    after_warmup = recipe.schedule == "cosine" and recipe.cosine_after_warmup
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.schedule,
        num_epochs=recipe.epochs - after_warmup * recipe.warmup_epochs,  # type: ignore[arg-type]  # a part of an epoch is fine
        decay_epochs=drops if isinstance(drops, int) else 0,
        decay_rate=recipe.decay_factor,
        min_lr=recipe.min_learning_rate,
        warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]  # here as well
        warmup_lr=recipe.warmup_learning_rate,
        warmup_prefix=after_warmup,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return schedule


def make_mixing(recipe: Recipe, classes: int) -> Mixup | None:
    """Mixup and cutmix within a micro-batch, or nothing. Draws from NumPy's global generator."""
    if not recipe.mixes:
        return None
    return Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mix_probability,
        label_smoothing=recipe.label_smoothing,
        num_classes=classes,
    )


def make_loss(recipe: Recipe) -> Loss:
    if recipe.mixes:
        return SoftTargetCrossEntropy()
    return nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)

"""The attention branch in inference as one compiled call: its dozen tiny steps cost more to start than to do."""

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.context import forced, plain_inference
from kernelwarehouse.attention import Attention
from kernelwarehouse.attention_functions import NORMALISER_EPS, normaliser
from kernelwarehouse.temperature import TEMPERATURE_UNIT


def attend(attention: Attention, x: Tensor) -> Tensor:
    """What `attention(x)` gives, by the compiled call where it applies."""
    fused = None if hooked(attention) else fused_attention(attention, x)
    return attention(x) if fused is None else fused


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than run its forward: hooks want to see it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def coefficients(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a mixture of bases is made with: `[batch, h + 1]`, ending in 1, and the scale of every mixture."""
    fused = fused_coefficients(attention, x)
    if fused is not None:
        return fused
    hidden = attention.hidden(x)
    scale = 1 / normaliser(attention.logits(hidden)).squeeze(-1)
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1), scale


def fused_attention(attention: Attention, x: Tensor) -> Tensor | None:
    """What `attention(x)` gives, or `None` where the compiled call does not apply."""
    parts = _parts(attention, x) if forced() != "plain" else None
    return None if parts is None else weights(attention, x, parts)


def fused_coefficients(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The hidden vector with a 1 at its end, and 1 / normaliser of every mixture; or `None`, as above."""
    parts = _parts(attention, x)
    if parts is None:
        return None
    return torch.ops.kernelwarehouse.attention_coefficients(x, *parts, attention.shape.mixtures, NORMALISER_EPS)


def weights(attention: Attention, x: Tensor, parts: tuple[object, ...]) -> Tensor:
    """What `attention(x)` gives, by the compiled call, with its `compiled_parts`."""
    start = attention._buffers["beta"], attention._buffers["temperature"], TEMPERATURE_UNIT
    return torch.ops.kernelwarehouse.attention(x, *parts, attention.shape.mixtures, *start, NORMALISER_EPS)


def _parts(attention: Attention, x: Tensor) -> tuple[object, ...] | None:
    """What the compiled calls read, where they apply to this input here and now."""
    if not plain_inference(x):
        return None
    parts = compiled_parts(attention)
    if parts is None or x.dim() < 2 or x.shape[1] != attention.shape.in_channels or x.numel() == 0:
        return None  # the steps say what is wrong
    return parts if load_native() else None


def compiled_parts(attention: Attention) -> tuple[object, ...] | None:
    """What the compiled calls read of a branch that is as it was made and that nobody looks into.

    (A module's own look-up takes longer than what it finds.)
    """
    shape, modules, buffers = attention.shape, attention._modules, attention._buffers
    beta, temperature = buffers["beta"], buffers["temperature"]
    if temperature is None or temperature.dtype != torch.int64 or (beta is not None and beta.dtype != torch.bool):
        return None  # `Module.type` has cast them
    if shape.function != "caf" or shape.low_rank is not None or shape.own_cells_only:
        return None
    fc1, norm, fc2 = modules["fc1"], modules["norm"], modules["fc2"]
    if type(norm) is not nn.BatchNorm1d or type(fc1) is not nn.Linear or type(fc2) is not nn.Linear:
        return None
    for part in (fc1, norm, fc2):
        if hooked(part):
            return None
    first, scale, statistics, logits = fc1._parameters, norm._parameters, norm._buffers, fc2._parameters
    weight, mean = first.get("weight"), statistics.get("running_mean")  # replicas have their tensors elsewhere
    if norm.training or mean is None or weight is None or weight.dtype != torch.float32:
        return None
    if scale.get("weight") is None or logits.get("bias") is None or first.get("bias") is not None:
        return None  # not as they were made
    running = mean, statistics["running_var"], norm.eps
    return weight, scale["weight"], scale["bias"], *running, logits["weight"], logits["bias"]

"""The attention branch in inference as one compiled call: its dozen tiny steps cost more to start than to do."""

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.context import forced
from kernelwarehouse.attention import Attention
from kernelwarehouse.attention_functions import NORMALISER_EPS, normaliser


def attend(attention: Attention, x: Tensor) -> Tensor:
    """What `attention(x)` gives, by the compiled call where it applies."""
    # A module's call does nothing but run its hooks and its forward; with a hook there is more to do.
    fused = None if attention._forward_hooks or attention._forward_pre_hooks else fused_attention(attention, x)
    return attention(x) if fused is None else fused


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
    parameters = _parameters(attention, x) if forced() != "plain" else None
    if parameters is None:
        return None
    beta, tau = attention._buffers["beta"], attention.get_temperature()
    return torch.ops.kernelwarehouse.attention(*parameters, attention.shape.mixtures, beta, tau, NORMALISER_EPS)


def fused_coefficients(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The hidden vector with a 1 at its end, and 1 / normaliser of every mixture; or `None`, as above."""
    parameters = _parameters(attention, x)
    if parameters is None:
        return None
    return torch.ops.kernelwarehouse.attention_coefficients(*parameters, attention.shape.mixtures, NORMALISER_EPS)


def _parameters(attention: Attention, x: Tensor) -> tuple[object, ...] | None:
    """What the compiled calls begin with, where they apply (a module's own look-up takes longer than what it finds)."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    shape, modules = attention.shape, attention._modules
    if shape.function != "caf" or shape.low_rank is not None or shape.own_cells_only:
        return None
    fc1, norm, fc2 = modules["fc1"], modules["norm"], modules["fc2"]
    if type(norm) is not nn.BatchNorm1d or type(fc1) is not nn.Linear or type(fc2) is not nn.Linear:
        return None
    for part in (fc1, norm, fc2):
        if part._forward_hooks or part._forward_pre_hooks:  # somebody wants to see the steps
            return None
    first, scale, statistics, logits = fc1._parameters, norm._parameters, norm._buffers, fc2._parameters
    weight, mean = first.get("weight"), statistics.get("running_mean")  # replicas have their tensors elsewhere
    if norm.training or mean is None or weight is None or weight.dtype != torch.float32:
        return None
    if scale.get("weight") is None or logits.get("bias") is None:  # not as they were made
        return None
    if x.dim() < 2 or x.shape[1] != weight.shape[1] or x.numel() == 0:  # the steps say what is wrong
        return None
    if not load_native():
        return None
    running = mean, statistics["running_var"], norm.eps
    return x, weight, scale["weight"], scale["bias"], *running, logits["weight"], logits["bias"]

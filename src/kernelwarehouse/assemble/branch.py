"""The attention branch in inference as one compiled call: its dozen tiny steps cost more to start than to do."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.choose import forced

if TYPE_CHECKING:  # attention.py calls this module
    from kernelwarehouse.attention import Attention


def fused_attention(attention: "Attention", x: Tensor, epsilon: float) -> Tensor | None:
    """What `attention(x)` gives, or `None` where the compiled call does not apply."""
    if forced() not in (None, "native") or not _applies(attention, x):
        return None
    beta, tau = attention.beta, attention.get_temperature()
    return torch.ops.kernelwarehouse.attention(*_parameters(attention, x), attention.shape.mixtures, beta, tau, epsilon)


def fused_coefficients(attention: "Attention", x: Tensor, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """The hidden vector with a 1 at its end, and 1 / normaliser of every mixture; or `None`, as above."""
    if not _applies(attention, x):
        return None
    parameters = _parameters(attention, x)
    return torch.ops.kernelwarehouse.attention_coefficients(*parameters, attention.shape.mixtures, epsilon)


def _applies(attention: "Attention", x: Tensor) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    shape, modules = attention.shape, attention._modules  # a module's own look-up takes longer than what is looked up
    fc1, norm, fc2 = modules["fc1"], modules["norm"], modules["fc2"]
    if shape.function != "caf" or shape.low_rank is not None or shape.own_cells_only:
        return False
    if type(norm) is not nn.BatchNorm1d or type(fc1) is not nn.Linear or type(fc2) is not nn.Linear:
        return False
    if (
        norm.training or fc1._forward_hooks or fc2._forward_hooks or norm._forward_hooks
    ):  # somebody wants to see the steps
        return False
    if norm._buffers["running_mean"] is None or x.numel() == 0 or not load_native():
        return False
    weight = fc1._parameters["weight"]
    return weight is not None and weight.dtype == torch.float32


def _parameters(attention: "Attention", x: Tensor) -> tuple[object, ...]:
    modules = attention._modules
    fc1, norm, fc2 = modules["fc1"], modules["norm"], modules["fc2"]
    if not (isinstance(fc1, nn.Linear) and isinstance(norm, nn.BatchNorm1d) and isinstance(fc2, nn.Linear)):
        raise TypeError(f"{type(attention).__name__} has other layers than _applies has seen")
    scale, statistics, logits = norm._parameters, norm._buffers, fc2._parameters
    running = statistics["running_mean"], statistics["running_var"], norm.eps
    return x, fc1._parameters["weight"], scale["weight"], scale["bias"], *running, logits["weight"], logits["bias"]

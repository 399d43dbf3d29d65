"""The attention branch in inference as one compiled call: its dozen tiny steps cost more to start than to do."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.choose import forced

if TYPE_CHECKING:  # attention.py calls this module
    from kernelwarehouse.attention import Attention


def fused_attention(attention: "Attention", pooled: Tensor, epsilon: float) -> Tensor | None:
    """What `attention(pooled)` gives, or `None` where the compiled call does not apply."""
    if forced() not in (None, "native") or not _applies(attention, pooled):
        return None
    beta, tau = attention.beta, attention.get_temperature()
    return torch.ops.kernelwarehouse.attention(
        *_parameters(attention, pooled), attention.shape.mixtures, beta, tau, epsilon
    )


def fused_coefficients(attention: "Attention", pooled: Tensor, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """The hidden vector with a 1 at its end, and 1 / normaliser of every mixture; or `None`, as above."""
    if not _applies(attention, pooled):
        return None
    parameters = _parameters(attention, pooled)
    return torch.ops.kernelwarehouse.attention_coefficients(*parameters, attention.shape.mixtures, epsilon)


def _applies(attention: "Attention", pooled: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    norm, shape, fc1, fc2 = attention.norm, attention.shape, attention.fc1, attention.fc2
    if torch.is_grad_enabled() or norm.training or pooled.device.type != "cpu" or pooled.dtype != torch.float32:
        return False
    if shape.function != "caf" or shape.low_rank is not None or shape.own_cells_only:
        return False
    if type(norm) is not nn.BatchNorm1d or type(fc1) is not nn.Linear or type(fc2) is not nn.Linear:
        return False
    if fc1._forward_hooks or fc2._forward_hooks or norm._forward_hooks:  # somebody wants to see the steps
        return False
    if torch.is_autocast_enabled("cpu") or type(pooled) is not Tensor:
        return False
    return fc1.weight.dtype == torch.float32 and norm.running_mean is not None and len(pooled) > 0 and load_native()


def _parameters(attention: "Attention", pooled: Tensor) -> tuple[object, ...]:
    fc1, norm, fc2 = attention.fc1, attention.norm, attention.fc2
    statistics = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps
    return pooled, fc1.weight, *statistics, fc2.weight, fc2.bias

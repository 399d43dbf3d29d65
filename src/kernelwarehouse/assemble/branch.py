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
    norm = attention.norm
    if torch.is_grad_enabled() or norm.training or pooled.device.type != "cpu" or pooled.dtype != torch.float32:
        return None
    shape = attention.shape
    if (
        shape.function != "caf"
        or shape.low_rank is not None
        or shape.own_cells_only
        or type(norm) is not nn.BatchNorm1d
    ):
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or forced() not in (None, "native"):
        return None
    fc1, fc2 = attention.fc1, attention.fc2
    plain_modules = type(pooled) is Tensor and type(fc1) is nn.Linear and type(fc2) is nn.Linear
    if not plain_modules or fc1._forward_hooks or fc2._forward_hooks or norm._forward_hooks or not load_native():
        return None
    if fc1.weight.dtype != torch.float32 or norm.running_mean is None or pooled.shape[0] == 0:
        return None
    return torch.ops.kernelwarehouse.attention(
        pooled,
        fc1.weight,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        fc2.weight,
        fc2.bias,
        shape.mixtures,
        attention.beta,
        attention.get_temperature(),
        epsilon,
    )

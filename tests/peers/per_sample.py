"""The one thing all references need: every sample convolved with its own kernel, one at a time."""

import torch
from torch.nn import functional as F


def convolve_each(x, kernels, conv):
    """`kernels[b]` applied to `x[b]` with the stride, padding, dilation and groups of `conv`."""
    outputs = [
        F.conv2d(sample[None], kernel, None, conv.stride, conv.padding, conv.dilation, conv.groups)
        for sample, kernel in zip(x, kernels, strict=True)
    ]
    return torch.cat(outputs)


def linear(module, v):
    """`module` as a matrix product on one vector."""
    out = module.weight @ v
    return out if module.bias is None else out + module.bias


def normalise(norm, values):
    """A norm on running statistics, for values whose first axis is the channel."""
    shape = (-1,) + (1,) * (values.dim() - 1)
    mean, scale = norm.running_mean.view(shape), (norm.running_var.view(shape) + norm.eps).sqrt()
    return (values - mean) / scale * norm.weight.view(shape) + norm.bias.view(shape)


def shake(module, seed=0):
    """Random weights, norms included, so that no start value (0 or 1) can hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            value.data.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.4)
    for norm in module.modules():
        if hasattr(norm, "running_var"):
            norm.running_var.abs_().add_(0.5)
    return module

"""What the caller's surroundings ask for."""

from contextvars import ContextVar

import torch
from torch import Tensor

FORCED: ContextVar[str | None] = ContextVar("kernelwarehouse_forced_strategy", default=None)


def forced() -> str | None:
    """The strategy that a `with force(...)` around the caller asks for; compilers do not see it."""
    return None if torch.compiler.is_compiling() else FORCED.get()


def traced() -> bool:
    """Whether a compiler or a function transform follows what is done."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or recorded()


def recorded() -> bool:
    """Whether `torch.jit.trace` writes down what is done, with sizes that Python has looked at as constants."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined]


def plain_inference(x: Tensor) -> bool:
    """Whether a call computes in float32 on the CPU and does nothing else: nothing is recorded, cast or transformed."""
    return (
        type(x) is Tensor
        and x.dtype == torch.float32
        and x.is_cpu
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not traced()
    )

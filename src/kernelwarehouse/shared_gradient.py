"""The gradient of cells that several layers share, added up in one place.

autograd holds the sum of the gradients that have come so far while a layer makes the next one, as large as all cells of
the warehouse. Here a layer adds to the sum that is there, and hands on nothing.
"""

import sys
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from kernelwarehouse._heap import give_back


class Sum:
    """The gradient that the layers of one forward pass have made, in one run of backward at a time.

    What a run that failed has left behind keeps the place; then other runs go on as if there were none. So do layers on
    another of a GPU's streams, since autograd lets streams wait for each other only where gradients are handed on,
    layers of a backward that is compiled, and runs that do not want the gradient of the cells.
    """

    def __init__(self, cells: Tensor) -> None:
        self._device = cells.device
        self._stream = _stream(cells.device)
        self._run = _NO_RUN
        self._total: Tensor | None = None
        self._turn = Lock()

    def claimed(self, taker: Node) -> bool:
        """Whether this is for the run of backward that is going on, and the run will come to where it is taken."""
        if _compiled() or self._stream != _stream(self._device):
            return False
        run = torch._C._current_graph_task_id()
        if run == _NO_RUN or not torch._C._will_engine_execute_node(taker):
            return False
        with self._turn:
            if self._run == _NO_RUN:
                self._run = run
            return self._run == run

    def total_for(self, cells: Tensor) -> Tensor | None:
        """The sum so far, for strategies that add to it. Before the first, nothing; or zeros, where it has more digits
        than a gradient in the type of these cells: then sums over chunks need not be rounded to be handed over."""
        more = sum_dtype(cells.dtype)
        if self._total is None and more != cells.dtype:
            self._total = torch.zeros_like(cells, dtype=more, memory_format=torch.contiguous_format)
        return self._total

    def add(self, grad: Tensor) -> None:
        """The tensor is kept and changed where it is the first, so nobody else may hold it."""
        if self._total is None:
            self._total = grad.to(sum_dtype(grad.dtype))
        else:
            self._total.add_(grad)

    def take(self) -> Tensor | None:
        if self._run == _NO_RUN or self._run != torch._C._current_graph_task_id():
            return None
        total, self._total, self._run = self._total, None, _NO_RUN
        return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers are added up in: float32 where they have half its precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _stream(device: torch.device) -> object:
    """The stream of a GPU that work is put on. A fake tensor's device may not be there, and has none."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.current_stream(device) if on_gpu else None


def _compiled() -> bool:
    """Whether a compiler follows this backward: it adds up what is handed on, and has to see all of it."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")  # where nobody asked for it, it is not loaded
    flags = "in_compiled_autograd_region", "compiled_autograd_enabled"
    return any(getattr(compiler, flag, False) for flag in flags)  # another thread may be loading it


_NO_RUN = -1  # torch's number of the run while there is none

# Bytes of gradients from which on a run of backward tidies up: what is less does not show beside the activations of a
# batch that is worth its while. Then bytes that come between one time and the next, which takes a while itself.
_MUCH, _MORE = 64 << 20, 2 << 20
_handed_on = _NO_RUN, 0, 0  # by the newest run: so many bytes, and so many since it last tidied up


def _tidy_up(gradient: Tensor) -> None:
    """Hand memory back to the system where a run of backward has made large gradients on a CPU.

    They come to stay among activations that go, and below them the C library keeps what is free. A step's peak would be
    the sum of both. (Runs in several threads count each other's out, and tidy up later.)
    """
    global _handed_on
    if gradient.device.type != "cpu":
        return
    run, (latest, total, since) = torch._C._current_graph_task_id(), _handed_on
    total, since = (total, since) if latest == run else (0, 0)
    total, since = total + gradient.nbytes, since + gradient.nbytes
    if total > _MUCH and since > _MORE:
        give_back()
        since = 0
    _handed_on = run, total, since


class Shared(Function):
    """The cells as all layers of a forward pass get them; when all have been gone back through, the sum is handed on.

    `grad` is what came by autograd's own way, from layers whose every step it sees.
    """

    @staticmethod
    def forward(ctx: Any, cells: Tensor) -> Tensor:
        ctx.gradient, ctx.dtype = Sum(cells), cells.dtype
        ctx.set_materialize_grads(False)
        return cells.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        total = ctx.gradient.take()
        if total is None:
            return grad
        handed_on = (total if grad is None else total.add_(grad)).to(ctx.dtype)
        _tidy_up(handed_on)
        return handed_on


def place_of(cells: Tensor) -> Sum | None:
    """Where the gradient of these cells is added up, if they are shared."""
    place = getattr(cells.grad_fn, "gradient", None)
    return place if isinstance(place, Sum) else None  # others' functions may have one of that name

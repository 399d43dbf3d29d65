"""What a layer does to a GPU, counted where there is none: launches, bytes moved and bytes alive, on fake tensors.

FakeTensorMode follows shapes, types and memory formats of `cuda` tensors and computes nothing; it refuses `.item()` and
the like, which would wait for a GPU. Copies from and to the host are refused by `refuse_copies`. What a library does
inside one operator is not seen. torch's autograd does not run on such tensors: forward and backward of a strategy are
called as they are, and attention branches, which autograd differentiates, are counted on fake tensors of the CPU, where
they take the same steps.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.routing import Place
from kernelwarehouse.assemble import STRATEGIES, route
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.attention import Attention, AttentionShape, LowRank
from kernelwarehouse.shared_gradient import sum_dtype

_aten = torch.ops.aten
_MEMORY_ONLY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten._unsafe_view.default,
}


def refuse_copies(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise where numbers go from one device to another: that waits for a GPU, and FakeTensorMode lets it pass."""
    # A number on the host may be used on a GPU; it goes along with the launch.
    along = func is not _aten.copy_.default
    devices = {tensor.device.type for tensor in (*inputs, *outputs) if tensor.dim() > 0 or not along}
    if len(devices) > 1 or (outputs and inputs and outputs[0].device.type != inputs[0].device.type):
        raise RuntimeError(f"{func} goes from {[str(tensor.device) for tensor in inputs]} to another device")


class Count(TorchDispatchMode):
    """Counts what is done inside the `with` block, as if it were done on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []  # of operators that launch something
        self.moved = 0  # bytes that they read and write
        self.peak = 0  # bytes of the tensors made here that are alive at once
        self._alive = 0
        self._known: set[int] = set()  # tensors
        self._users: dict[int, int] = {}  # tensors of a memory

    @property
    def launches(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        # What is given is not made here.
        given = {tensor.untyped_storage()._cdata for tensor in inputs} - self._users.keys()
        made = func(*args, **kwargs)
        outputs = _tensors(made)
        refuse_copies(func, inputs, outputs)
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in given:
                self._watch(tensor)
        self.peak = max(self.peak, self._alive)
        if func.namespace != "prim" and not func.is_view and func not in _MEMORY_ONLY:
            # A convolution's backward is a launch for each gradient.
            several = len(outputs) if func is _aten.convolution_backward.default else 1
            self.names += several * [str(func)]
            different = {id(tensor): tensor for tensor in (*inputs, *outputs)}
            self.moved += sum(tensor.numel() * tensor.element_size() for tensor in different.values())
        return made

    def _watch(self, tensor: Tensor) -> None:
        if id(tensor) in self._known:
            return
        storage = tensor.untyped_storage()
        memory, size = storage._cdata, storage.nbytes()
        if memory not in self._users:
            self._alive += size
        self._users[memory] = self._users.get(memory, 0) + 1
        self._known.add(id(tensor))
        weakref.finalize(tensor, self._gone, id(tensor), memory, size).atexit = False

    def _gone(self, tensor: int, memory: int, size: int) -> None:
        self._known.discard(tensor)
        self._users[memory] -= 1
        if self._users[memory] == 0:
            del self._users[memory]
            self._alive -= size


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Row:
    """A layer, evaluated along its route."""

    layer: str
    kernel: tuple[int, ...]
    count: int  # of layers that are alike
    forward: str
    backward: str
    launches: tuple[int, int]  # forward and backward, without the attention branch
    branch: tuple[int, int]  # those of the attention branch, in float32; autocast adds casts
    moved: tuple[int, int]
    peak: int
    keeps_layout: bool


def count_layer(place: Place, batch: int, dtype: torch.dtype, last: bool) -> Row:
    """Forward and backward of one layer on fake tensors; call it inside FakeTensorMode."""
    geometry, shape = place.layer.geometry, place.layer.attention.shape
    linear = geometry.spatial_axes == 0
    space = (torch.Size(place.shape[:-1]).numel(), place.shape[-1]) if linear else place.shape
    x = torch.empty(batch, *space, device="cuda", dtype=dtype)
    if last and not linear:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    attention = x.new_empty(batch, shape.mixtures, shape.cells)
    cells = x.new_empty(shape.cells, *geometry.partition.cell_shape)
    way = route(x, cells, geometry, place.layer.attention, training=True, wants_input=True)
    forward, backward = STRATEGIES[way.forward], STRATEGIES[way.backward or way.forward]
    if backward.backward is None:
        raise RuntimeError(f"{place.name} goes by {backward.name!r}, which has no backward of its own")
    with torch.no_grad():
        with Count() as ahead:
            out = forward.forward(x, attention, cells, geometry)
        # As for a layer of a warehouse that others have gone back through before.
        grad, total = torch.empty_like(out), torch.empty_like(cells, dtype=sum_dtype(dtype))
        with Count() as back:
            grads = backward.backward(grad, x, attention, cells, geometry, True, *([total] if backward.adds else []))
            if not backward.adds:
                total.add_(grads[-1])  # type: ignore[arg-type]
    images = [tensor for tensor in (x, out, grads[0]) if tensor is not None and tensor.dim() > 3]
    return Row(
        place.name,
        geometry.partition.kernel_shape,
        place.count,
        forward.name,
        backward.name,
        (ahead.launches, back.launches),
        count_branch(place.layer.attention, linear),
        (ahead.moved, back.moved),
        max(ahead.peak, back.peak),
        len({channels_last(image) for image in images if image.shape[1] > 1}) <= 1,
    )


def count_branch(attention: Attention, linear: bool) -> tuple[int, int]:
    """Launches of the forward and of the backward of an attention branch in training; call it inside FakeTensorMode."""
    shape = attention.shape
    low_rank = shape.low_rank and LowRank(first=2, local=2, basis=16)
    small = replace(shape, in_channels=16, mixtures=4, cells=8, hidden=16, low_rank=low_rank)
    return _branch_launches(small, attention.beta is not None or attention._first_cells is not None, linear)


@lru_cache
def _branch_launches(shape: AttentionShape, starts: bool, linear: bool) -> tuple[int, int]:
    """Of a branch of this kind, whatever its sizes."""
    nothing = torch.zeros(shape.mixtures, shape.cells, dtype=torch.bool) if starts else None
    attention = Attention(shape, nothing, device="cpu").train()
    x = torch.empty(2, *((7, shape.in_channels) if linear else (shape.in_channels, 3, 3)), requires_grad=True)
    with torch.enable_grad():
        with Count() as ahead:
            out = attention(x.mean(1) if linear else x)
        with Count() as back:
            out.backward(torch.empty_like(out))
    return ahead.launches, back.launches


def count_network(found: Sequence[Place], batch: int, dtype: torch.dtype, last: bool) -> list[Row]:
    """All layers of a network that differ."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [count_layer(place, batch, dtype, last) for place in found]


def total(rows: Sequence[Row], value: Callable[[Row], int]) -> int:
    """Summed up over all layers, those that are alike too."""
    return sum(row.count * value(row) for row in rows)

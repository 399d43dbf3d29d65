"""Preparing a trained model for inference: spend memory on what does not depend on the input."""

from dataclasses import dataclass

import torch
from torch import nn

from kernelwarehouse.assemble.basis import Prepared, pays_back, suits_panels, whole_bits
from kernelwarehouse.assemble.rates import machine_rates
from kernelwarehouse.assemble.stored import stored_bytes
from kernelwarehouse.errors import KernelWarehouseError
from kernelwarehouse.layers import WarehouseLayer


@dataclass(frozen=True)
class Preparation:
    """What `prepare_inference` did: the layers that keep bases, and the memory that takes."""

    layers: tuple[str, ...]
    bytes: int
    batch: int
    compact: bool = False

    def __str__(self) -> str:
        kind = "compact bases" if self.compact else "bases"
        return f"{len(self.layers)} layers keep {kind} of {self.bytes / 1e6:.0f} MB, chosen for batches of {self.batch}"


def prepare_inference(
    model: nn.Module, memory_limit: float = 2e9, batch: int = 1, compact: bool = False
) -> Preparation:
    """Make inference with frozen weights faster, with at most `memory_limit` bytes more.

    Outputs stay the same, to within rounding: in bases of compiled layers, a number is off by at most 2^-23 of the
    largest one of its output channel.

    Layers mix through the hidden vector of their attention where that pays for batches of this size (larger ones gain
    more), those that save most for a byte first.

    `model.train()` undoes it. A layer compares the tensors that it holds with those that its basis was made from at
    every call, and computes anew without the basis when they differ: after changes in place, `load_state_dict` (with
    `assign=True` as well), parameters or modules that were replaced, `torch.func.functional_call`, a new temperature,
    and steps of any `torch.optim.Optimizer`, fused ones included. What torch counts nowhere cannot be noticed: writing
    through `parameter.data` or a NumPy view in place, changes in place of tensors made under
    `torch.inference_mode()`, and calls of torch's fused optimiser functions without an optimiser. Call
    `prepare_inference` again after those.

    Arguments:
        model: a trained model with converted layers, in evaluation mode.
        memory_limit: bytes that all bases together may take.
        batch: the number of samples that will usually come at once. Bases are chosen, and laid out, for it; batches of
            other sizes get the same outputs.
        compact: keep the bases that compiled kernels use (convolutions in float32 on a CPU) in 16 bits. They take half
            the memory of float32 and are read in half the time, which is most of the time of small batches. Outputs
            then differ in about the fifth digit. Otherwise they have 24 bits, or 32 where they are laid out for batches
            of 8 and more.

    Raises:
        KernelWarehouseError: for a model in training mode or without converted layers, for a limit or a batch that is
            no number of at least 1, and for `compact` that is neither true nor false.

    Example:
        >>> import kernelwarehouse as kw
        >>> model = kw.create_model("kw4x_resnet18", num_classes=10).eval()
        >>> preparation = kw.prepare_inference(model, memory_limit=1e9)
        >>> 0 < preparation.bytes <= 1e9
        True
    """
    if model.training:
        raise KernelWarehouseError("the model is in training mode; call model.eval() before prepare_inference")
    for name, value in (("memory_limit", memory_limit), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise KernelWarehouseError(f"{name} is {value!r}; a number of at least 1 is wanted")
    if not isinstance(compact, bool):
        raise KernelWarehouseError(f"compact is {compact!r}; True or False is wanted")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, WarehouseLayer)}
    if not layers:
        raise KernelWarehouseError(f"{type(model).__name__} has no converted layers; convert it first")
    panels = {name: suits_panels(layer.warehouse.cells, layer.geometry, batch) for name, layer in layers.items()}
    bits = {
        name: whole_bits(layer.warehouse.cells, layer.geometry, compact, panels[name]) for name, layer in layers.items()
    }
    gains = {name: _gain(layer, batch, bits[name]) for name, layer in layers.items()}
    for layer in layers.values():
        layer.prepared = None
    chosen, used = [], 0
    for name in sorted((name for name in layers if gains[name] > 0), key=lambda name: -gains[name]):
        layer = layers[name]
        cells = layer.warehouse.cells
        if used + stored_bytes(cells, layer.geometry, layer.attention.shape.units, bits[name]) <= memory_limit:
            prepared = Prepared.of(layer.attention, cells, layer.geometry, bits[name], panels[name])
            if used + prepared.stored.nbytes > memory_limit:  # numbers that are not finite stay as they are
                continue
            layer.prepared = prepared
            chosen.append(name)
            used += prepared.stored.nbytes
    return Preparation(tuple(chosen), used, batch, compact)


def _gain(layer: WarehouseLayer, batch: int, bits: int | None) -> float:
    cells = layer.warehouse.cells
    rates = machine_rates(cells.device, torch.get_num_threads())
    return pays_back(batch, layer.attention, cells, layer.geometry, rates, bits)

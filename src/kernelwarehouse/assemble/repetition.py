"""Inference on a CPU that is like the call before.

To find out how a layer is evaluated takes a hundred small steps. In a network, where each finds the processor's caches
full of other things, they take a tenth of a millisecond, as long as a small layer itself. Most calls are like the one
before: what was found out then is kept with what it depends on, and only that is looked at again.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from kernelwarehouse.assemble import route_table
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.branch import compiled_parts, hooked, weights
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.context import forced, plain_inference
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.registry import BASES, STRATEGIES
from kernelwarehouse.assemble.routing import Route
from kernelwarehouse.attention import Attention
from kernelwarehouse.warehouse import Warehouse


class Repetition(NamedTuple):
    """The route of a call, and what decided on it."""

    route: Route
    geometry: Geometry
    prepared: "weakref.ref[Prepared] | None"  # the layer alone keeps it alive
    shape: torch.Size  # of the input, as all that follows
    strides: tuple[int, ...]
    threads: int
    asked_at: int

    @staticmethod
    def of(x: Tensor, geometry: Geometry, prepared: Prepared | None, route: Route) -> "Repetition | None":
        """What a call that has been made leaves for the next one, where that can be told apart from others."""
        mixes = route.forward in BASES or STRATEGIES[route.forward].mixing == "weights"
        if not mixes or forced() is not None or not plain_inference(x) or x.numel() == 0 or not load_native():
            return None
        reference = None if prepared is None else weakref.ref(prepared)
        facts = x.shape, x.stride(), torch.get_num_threads(), route_table.changes()
        return Repetition(route, geometry, reference, *facts)

    def evaluate(
        self,
        x: Tensor,
        seen: Tensor,
        attention: Attention,
        warehouse: Warehouse,
        geometry: Geometry,
        prepared: Prepared | None,
    ) -> Tensor | None:
        """What `evaluate_layer` gives for a call like that one, or `None` for any other."""
        if (
            x.shape != self.shape
            or x.stride() != self.strides
            or geometry is not self.geometry
            or prepared is not (None if self.prepared is None else self.prepared())
            or forced() is not None
            or not plain_inference(x)
            or torch.get_num_threads() != self.threads
            or route_table.changes() != self.asked_at
        ):
            return None
        cells = warehouse._parameters.get("cells")
        if cells is None:  # they are computed
            return None
        if self.route.forward in BASES:
            if prepared is None or not prepared.usable(x, attention, cells):
                return None
            return prepared.evaluate(x, seen, geometry, self.route.forward)
        parts = None if hooked(attention) else compiled_parts(attention)
        if parts is None or cells.dtype != torch.float32:
            return None
        return STRATEGIES[self.route.forward].forward(x, weights(attention, seen, parts), cells, geometry)

"""Inference on a CPU that is like the call before.

To find out how a layer is evaluated takes many small steps, and in a network, where each finds the processor's caches
full of other things, as long as a small layer itself. Most calls are like the one before: what was found out then is
kept with what it depends on, and only that is looked at again.
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
    asked_at: int  # what `route_table.changes()` said when the call began
    geometry: Geometry
    prepared: "weakref.ref[Prepared] | None"  # the layer alone keeps it alive
    basis_usable: bool
    shape: torch.Size  # of the input
    strides: tuple[int, ...]
    threads: int

    @staticmethod
    def of(
        route: Route,
        asked_at: int,
        x: Tensor,
        attention: Attention,
        warehouse: Warehouse,
        geometry: Geometry,
        prepared: Prepared | None,
    ) -> "Repetition | None":
        """What a call that has been made leaves for the next one, if that can take the short way."""
        cells = warehouse._parameters.get("cells")
        if cells is None or forced() is not None or not plain_inference(x) or x.numel() == 0 or not load_native():
            return None
        strategy = STRATEGIES.get(route.forward)  # or one of the bases
        if strategy is not None and (strategy.mixing != "weights" or compiled_parts(attention) is None):
            return None
        reference = None if prepared is None else weakref.ref(prepared)
        usable = prepared is not None and prepared.usable(x, attention, cells)
        return Repetition(route, asked_at, geometry, reference, usable, x.shape, x.stride(), torch.get_num_threads())

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
        if prepared is not None:
            if prepared.usable(x, attention, cells) != self.basis_usable:
                return None
            if self.route.forward in BASES:
                return prepared.evaluate(x, seen, geometry, self.route.forward)
        parts = None if hooked(attention) else compiled_parts(attention)
        if parts is None:
            return None
        return STRATEGIES[self.route.forward].forward(x, weights(attention, seen, parts), cells, geometry)

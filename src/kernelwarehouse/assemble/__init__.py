"""How mixtures of cells become outputs: the plain definition, faster ways, and the route that chooses."""

from kernelwarehouse.assemble.dispatch import evaluate, evaluate_layer
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.plain import apply_kernels, assemble_kernels
from kernelwarehouse.assemble.registry import STRATEGIES
from kernelwarehouse.assemble.routing import Route, force, route

__all__ = [
    "STRATEGIES",
    "Geometry",
    "Route",
    "apply_kernels",
    "assemble_kernels",
    "evaluate",
    "evaluate_layer",
    "force",
    "route",
]

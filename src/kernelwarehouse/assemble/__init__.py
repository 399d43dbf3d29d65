"""How mixtures of cells become outputs: the plain definition, faster ways, and the rule that chooses."""

from kernelwarehouse.assemble.choose import STRATEGIES, force, mixes_through_hidden
from kernelwarehouse.assemble.dispatch import evaluate, evaluate_factored
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.plain import apply_kernels, assemble_kernels

__all__ = [
    "STRATEGIES",
    "Geometry",
    "apply_kernels",
    "assemble_kernels",
    "evaluate",
    "evaluate_factored",
    "force",
    "mixes_through_hidden",
]

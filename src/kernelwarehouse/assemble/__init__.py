"""How mixtures of cells become outputs."""

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.plain import apply_kernels, assemble_kernels, evaluate

__all__ = ["Geometry", "apply_kernels", "assemble_kernels", "evaluate"]

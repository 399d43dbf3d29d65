"""The strategy that suits a call, forward and backward, for whoever records the derivative himself."""

from torch import Tensor

from kernelwarehouse.assemble import depthwise, grouped, matmul, native, plain, pointwise
from kernelwarehouse.assemble.choose import choose
from kernelwarehouse.assemble.function import Strategy
from kernelwarehouse.assemble.geometry import Geometry

RECOMPUTING: dict[str, Strategy] = {
    "depthwise": depthwise,
    "grouped": grouped,
    "matmul": matmul,
    "native": native,
    "pointwise": pointwise,
}


def run_forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    name = choose(x, geometry).strategy
    if name == "plain":
        return plain.evaluate(x, attention, cells, geometry)
    return RECOMPUTING[name].forward(x, attention, cells, geometry)


def run_backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input (where wanted), attentions and cells."""
    # The plain definition has no backward of its own; `grouped` is the same convolution, a chunk of samples at a time.
    strategy = RECOMPUTING.get(choose(x, geometry).strategy, grouped)
    return strategy.backward(grad, x, attention, cells, geometry, wants_input)

"""All ways to evaluate a layer, by name."""

from kernelwarehouse.assemble import (
    depthwise,
    grouped,
    hidden,
    matmul,
    native,
    plain,
    planes,
    pointwise,
    rows,
    windows,
    winograd,
)
from kernelwarehouse.assemble.strategy import Strategy

BASIS, WINOGRAD_BASIS = BASES = ("basis", "winograd basis")
"""Ways to evaluate a layer by bases that are kept for it, see `basis.py`."""

STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (
        plain,
        depthwise,
        grouped,
        hidden,
        matmul,
        native,
        planes,
        pointwise,
        rows,
        windows,
        winograd,
    )
}

"""All ways to evaluate a layer, by name."""

from kernelwarehouse.assemble import depthwise, grouped, hidden, matmul, native, plain, pointwise, windows
from kernelwarehouse.assemble.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (plain, depthwise, grouped, hidden, matmul, native, pointwise, windows)
}

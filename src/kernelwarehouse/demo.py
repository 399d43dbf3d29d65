"""`make demo`: convert a network, show its plan, and check that at temperature 1 it still is the same network."""

import sys
from dataclasses import dataclass

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from kernelwarehouse.cli import console
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.convert import convert
from kernelwarehouse.planning import plan
from kernelwarehouse.temperature import set_temperature

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference, relative to the largest output, that rounding may make."""


@dataclass(frozen=True)
class Comparison:
    """The outputs of a static network and of its converted copy on the same images."""

    dtype: torch.dtype
    training: bool
    temperature: float
    difference: float

    @property
    def equal(self) -> bool:
        return self.difference <= LIMITS[self.dtype]


def main() -> int:
    out = console()
    torch.manual_seed(0)
    # timm starts the last norm of every residual block at 0, which would hide most converted layers from the outputs.
    static = timm.create_model("resnet18", zero_init_last=False)
    made = plan(static, WarehouseConfig(budget=1))
    out.print("1. What converting timm's resnet18 with budget 1 will do (m mixtures, n cells):\n")
    out.print(made)
    converted = convert(static, made)
    count = sum(parameter.numel() for parameter in converted.parameters())
    out.print(f"\n2. Converted: the copy has {count:,} parameters, the plan says {made.parameters_after:,}.")
    out.print("\n3. The same images through both networks:\n")
    comparisons = [
        compare(static, converted, dtype, training, temperature)
        for temperature in (1.0, 0.0)
        for dtype in LIMITS
        for training in (True, False)
    ]
    return show(out, comparisons) if count == made.parameters_after else 1


@torch.no_grad()
def compare(
    static: nn.Module, converted: nn.Module, dtype: torch.dtype, training: bool, temperature: float
) -> Comparison:
    """How far apart the two networks' outputs are, relative to the largest one."""
    images = torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    set_temperature(converted, temperature)
    wanted, found = (model.to(dtype).train(training)(images) for model in (static, converted))
    difference = (found - wanted).abs().max() / wanted.abs().max()
    return Comparison(dtype, training, temperature, float(difference))


def show(out: Console, comparisons: list[Comparison]) -> int:
    """Print the comparisons; 0 if the networks are equal at temperature 1 and differ at 0, as they must."""
    table = Table()
    for heading in ("temperature", "type", "mode", "relative difference", "rounding allows", "outputs"):
        table.add_column(heading, justify="right" if heading in ("relative difference", "rounding allows") else "left")
    for item in comparisons:
        kind, mode = str(item.dtype).removeprefix("torch."), "train" if item.training else "eval"
        verdict = "equal" if item.equal else "differ"
        limit = f"{LIMITS[item.dtype]:.0e}"
        table.add_row(f"{item.temperature:g}", kind, mode, f"{item.difference:.1e}", limit, verdict)
    out.print(table)
    if all(item.equal == (item.temperature == 1) for item in comparisons):
        out.print(
            "At temperature 1 every mixture is its own cell: the converted network is the static one.\n"
            "At temperature 0, where training ends, every image gets kernels mixed from all cells of a warehouse."
        )
        return 0
    out.print("The outputs are not what they must be: equal at temperature 1, different at 0.")
    return 1


if __name__ == "__main__":
    sys.exit(main())

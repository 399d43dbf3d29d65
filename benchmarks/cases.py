"""What is measured: networks, ways to evaluate them, and the cases of the project's targets."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.assemble import force

WAYS = ("static", "plain", "ours")
MODES = ("inference", "training")


@dataclass(frozen=True)
class Case:
    """One row: a network, a mode and a batch. `most` is the target for the ratio to the static network, if there is
    one, and `published` the ratio that the authors' code was measured at."""

    preset: str
    mode: str
    batch: int
    prepared: int | None = None  # the memory limit of prepare_inference, in bytes
    published: float | None = None
    most: float | None = None

    @property
    def name(self) -> str:
        prepared = ", prepared" if self.prepared else ""
        return f"{self.preset} {self.mode} batch {self.batch}{prepared}"

    def facts(self) -> dict[str, Any]:
        """What a file of results says of the case."""
        return {
            "name": self.name,
            "preset": self.preset,
            "mode": self.mode,
            "batch": self.batch,
            "published": self.published,
            "most": self.most,
        }

    @property
    def image(self) -> int:
        return 32 if self.preset.endswith("small_resnet") else 224


# The longest come last.
SPEED = (
    Case("kw1x_resnet18", "inference", 1, None, 1.9, 1.35),
    Case("kw1x_resnet18", "inference", 16, None, 2.9, 1.40),
    Case("kw4x_resnet18", "inference", 1, 2 * 10**9, 5.2, 1.6),
    Case("kw4x_resnet18", "inference", 16, 2 * 10**9, 3.5, 1.6),
    Case("kw1x_resnet50", "inference", 1, None, 3.5, 1.9),
    Case("kw1x_resnet50", "inference", 16, None, 2.4, 1.5),
    Case("kw4x_resnet50", "inference", 1, 4 * 10**9, 11.0, 2.0),
    Case("kw1x_mobilenetv2_100", "inference", 1, None, 2.5, 1.65),
    Case("kw4x_mobilenetv2_100", "inference", 1, None, 2.5, 1.65),
    Case("kw1x_mobilenetv2_100", "training", 16, None, 1.4, 1.40),
    Case("kw4x_mobilenetv2_100", "training", 16, None, 1.4, 1.40),
    Case("kw1x_small_resnet", "training", 128, None, 3.1, 1.7),
    Case("kw1x_resnet18", "training", 16, None, 2.8, 1.60),
    Case("kw1x_resnet50", "training", 16, None, 2.7, 1.9),
)
MEMORY = (
    Case("kw1x_resnet18", "training", 16, None, 2.36, 1.10),
    Case("kw4x_resnet18", "training", 16, None, 2.60, 1.50),
    Case("kw1x_resnet50", "training", 16, None, 1.84, 1.10),
    Case("kw4x_resnet50", "training", 16, None, 2.06, 1.50),
    Case("kw1x_mobilenetv2_100", "training", 16, None, 1.03, 1.05),
    Case("kw4x_mobilenetv2_100", "training", 16, None, 1.03, 1.05),
)


def static_network(preset: str) -> nn.Module:
    """The network that a preset converts."""
    if preset in kw.zoo.PRESETS:
        return timm.create_model(kw.zoo.PRESETS[preset].backbone)
    return timm.create_model(preset.split("_", 1)[1])


def converted_network(preset: str) -> nn.Module:
    """The network of a preset as it is after training: at temperature 0."""
    model = kw.create_model(preset) if preset in kw.zoo.PRESETS else timm.create_model(preset)
    kw.set_temperature(model, 0.0)
    return model


def step(model: nn.Module, mode: str, x: Tensor, target: Tensor) -> None:
    """One forward pass, or forward, loss and backward; no optimiser, which is the same for all."""
    if mode == "inference":
        with torch.inference_mode():
            model(x)
    else:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), target).backward()


def runner(model: nn.Module, way: str, mode: str, batch: int, image: int) -> Callable[[], None]:
    """A function that does one step of the model in this way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, image, image, generator=generator)
    target = torch.randint(1000, (batch,), generator=generator)
    if model.training != (mode == "training"):
        model.train(mode == "training")

    def run() -> None:
        if way == "plain":
            with force("plain"):
                step(model, mode, x, target)
        else:
            step(model, mode, x, target)

    return run


def add_arguments(parser: argparse.ArgumentParser, modes: Sequence[str], batches: Sequence[int]) -> None:
    """What `chosen_cases` and `chosen_ways` read, and where to write."""
    parser.add_argument("--preset", nargs="+", help="networks to measure instead of the target cases")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(modes))
    parser.add_argument("--batch", nargs="+", type=int, default=list(batches))
    parser.add_argument("--prepare", type=int, help="memory limit of prepare_inference in bytes, for inference")
    parser.add_argument("--only", help="target cases whose name contains this")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="static and ours always are")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results for all target cases")


def chosen_cases(chosen: argparse.Namespace, targets: Sequence[Case]) -> list[Case]:
    if not chosen.preset:
        return [case for case in targets if not chosen.only or chosen.only in case.name]
    return [
        Case(preset, mode, batch, chosen.prepare if mode == "inference" else None)
        for preset in chosen.preset
        for mode in chosen.mode
        for batch in chosen.batch
    ]


def chosen_ways(chosen: argparse.Namespace) -> list[str]:
    return [way for way in WAYS if way in chosen.ways or way in ("static", "ours")]

"""What is measured: networks, ways to evaluate them, and the cases of the project's targets."""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernelwarehouse as kw
from kernelwarehouse.assemble import force
from kernelwarehouse.layers import WarehouseLayer

WAYS = ("static", "plain", "ours")
MODES = ("inference", "training")


@dataclass(frozen=True)
class Case:
    """One row: a network, a mode and a batch.

    `most` has the targets for the ratio to the static network and `published` the ratios that the authors' code was
    measured at, each by the processor's kind of vector instructions. What is not in there has none.
    """

    preset: str
    mode: str
    batch: int
    prepared: int | None = None  # the memory limit of prepare_inference, in bytes
    most: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    side: int | None = None  # of the images; None: what the network is made for
    classes: int = 1000
    compact: bool = False  # what prepare_inference keeps, in 16 bits

    @property
    def name(self) -> str:
        size = f" at {self.side}x{self.side}" if self.side else ""
        prepared = (", prepared compact" if self.compact else ", prepared") if self.prepared else ""
        return f"{self.preset} {self.mode} batch {self.batch}{size}{prepared}"

    def facts(self, instructions: str | None = None) -> dict[str, Any]:
        """What a file of results says of the case; with the target for these vector instructions, or this machine's."""
        kind = instructions or torch.backends.cpu.get_cpu_capability()
        return {
            "name": self.name,
            "preset": self.preset,
            "mode": self.mode,
            "batch": self.batch,
            "image": self.image,
            "published": self.published.get(kind),
            "most": self.most.get(kind),
        }

    @property
    def image(self) -> int:
        return self.side or (32 if self.preset.endswith("small_resnet") else 224)

    def options(self) -> list[str]:
        """The arguments of a command that `chosen_cases` makes this case of, for a process of its own."""
        options = ["--preset", self.preset, "--mode", self.mode, "--batch", str(self.batch)]
        options += ["--image", str(self.image), "--classes", str(self.classes)]
        options += ["--prepare", str(self.prepared)] if self.prepared else []
        return options + (["--compact"] if self.compact else [])


def avx(avx2: float | None, avx512: float | None = None) -> dict[str, float]:
    """By vector instructions, as torch names them."""
    return {kind: figure for kind, figure in (("AVX2", avx2), ("AVX512", avx512)) if figure is not None}


# The longest come last. MobileNetV2 4x keeps its targets of before, which were for AVX2 only.
SPEED = (
    Case("kw1x_resnet18", "inference", 1, None, avx(1.30, 1.25), avx(1.9, 1.54)),
    Case("kw1x_resnet18", "inference", 16, None, avx(1.25, 1.35), avx(2.9, 3.34)),
    Case("kw4x_resnet18", "inference", 1, 2 * 10**9, avx(1.40, 1.80), avx(5.2)),
    Case("kw4x_resnet18", "inference", 1, 2 * 10**9, avx(1.40, 1.80), avx(5.2), compact=True),
    Case("kw4x_resnet18", "inference", 16, 2 * 10**9, avx(1.10, 1.30), avx(3.5)),
    Case("kw1x_resnet50", "inference", 1, None, avx(1.60, 1.90), avx(3.5, 2.59)),
    Case("kw1x_resnet50", "inference", 16, None, avx(1.20, 1.40), avx(2.4)),
    Case("kw1x_resnet50", "inference", 1, 2 * 10**9, published=avx(3.5, 2.59), compact=True),
    Case("kw4x_resnet50", "inference", 1, 4 * 10**9, avx(1.6, 2.2), avx(11.0)),
    Case("kw4x_resnet50", "inference", 1, 4 * 10**9, avx(1.6, 2.2), avx(11.0), compact=True),
    Case("kw1x_mobilenetv2_100", "inference", 1, None, avx(1.45, 1.55), avx(2.5)),
    Case("kw4x_mobilenetv2_100", "inference", 1, None, avx(1.65), avx(2.5)),
    Case("kw1x_mobilenetv2_100", "training", 16, None, avx(1.05, 1.10), avx(1.4)),
    Case("kw4x_mobilenetv2_100", "training", 16, None, avx(1.40), avx(1.4)),
    Case("kw1x_small_resnet", "training", 128, None, avx(1.6, 1.9), avx(3.1)),
    # What `make demo` trains: ten classes, images read as RGB.
    Case("kw1x_small_resnet", "training", 64, None, avx(1.9, 2.2), side=28, classes=10),
    Case("kw1x_resnet18", "training", 16, None, avx(1.35, 1.50), avx(2.8)),
    Case("kw1x_resnet50", "training", 16, None, avx(1.60, 1.75), avx(2.7)),
)
MEMORY = (
    Case("kw1x_resnet18", "training", 16, None, avx(1.08, 1.08), avx(2.36, 2.36)),
    Case("kw4x_resnet18", "training", 16, None, avx(1.40, 1.40), avx(2.60, 2.60)),
    Case("kw1x_resnet50", "training", 16, None, avx(1.08, 1.08), avx(1.84, 1.84)),
    Case("kw4x_resnet50", "training", 16, None, avx(1.40, 1.40), avx(2.06, 2.06)),
    Case("kw1x_mobilenetv2_100", "training", 16, None, avx(1.05, 1.05), avx(1.03, 1.03)),
    Case("kw4x_mobilenetv2_100", "training", 16, None, avx(1.05, 1.05), avx(1.03, 1.03)),
)


def static_network(preset: str, classes: int = 1000) -> nn.Module:
    """The network that a preset converts."""
    backbone = kw.zoo.PRESETS[preset].backbone if preset in kw.zoo.PRESETS else preset.split("_", 1)[1]
    return timm.create_model(backbone, num_classes=classes)


def converted_network(preset: str, classes: int = 1000) -> nn.Module:
    """The network of a preset as it is after training: at temperature 0."""
    create = kw.create_model if preset in kw.zoo.PRESETS else timm.create_model
    model = create(preset, num_classes=classes)
    kw.set_temperature(model, 0.0)
    return model


def way_taken(layer: WarehouseLayer) -> str:
    """How the last call of a layer was evaluated: forward and, where that is another way, backward."""
    if layer.route is None:
        return "not called"
    return "/".join(dict.fromkeys(filter(None, (layer.route.forward, layer.route.backward))))


def ways_taken(model: nn.Module) -> dict[str, int]:
    """How many layers of a model took which way in their last call."""
    layers = (layer for layer in model.modules() if isinstance(layer, WarehouseLayer))
    return dict(Counter(map(way_taken, layers)).most_common())


def step(model: nn.Module, mode: str, x: Tensor, target: Tensor) -> None:
    """One forward pass, or forward, loss and backward; no optimiser, which is the same for all."""
    if mode == "inference":
        with torch.inference_mode():
            model(x)
    else:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), target).backward()


@torch.no_grad()
def settle(model: nn.Module, image: int) -> None:
    """Give batch norms the statistics of what they see, as training does.

    A new network that is switched to inference normalises by the statistics it was born with, and its signal fades from
    layer to layer; numbers that are too small for a whole mantissa take some processors a hundred times as long.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(torch.randn(_SEEN, 3, image, image, generator=torch.Generator().manual_seed(1)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


_SEEN = 4  # images that statistics are taken of


def runner(model: nn.Module, way: str, mode: str, batch: int, image: int, classes: int = 1000) -> Callable[[], None]:
    """A function that does one step of the model in this way, always on the same RGB images.

    For inference the model is settled first.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, image, image, generator=generator)
    target = torch.randint(classes, (batch,), generator=generator)
    if mode == "inference":
        settle(model, image)
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
    parser.add_argument("--image", type=int, help="side of the images; default: what the network is made for")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--prepare", type=int, help="memory limit of prepare_inference in bytes, for inference")
    parser.add_argument("--compact", action="store_true", help="with --prepare: bases in 16 bits")
    parser.add_argument("--only", help="target cases whose name contains this")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="static and ours always are")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results for all target cases")


def chosen_cases(chosen: argparse.Namespace, targets: Sequence[Case]) -> list[Case]:
    if not chosen.preset:
        cases = [case for case in targets if not chosen.only or chosen.only in case.name]
        if not cases:
            names = "\n  ".join(case.name for case in targets)
            raise SystemExit(f"no case has {chosen.only!r} in its name; there are\n  {names}")
        return cases
    made = []
    for preset in chosen.preset:
        for mode in chosen.mode:
            prepared = chosen.prepare if mode == "inference" else None
            made += [
                Case(
                    preset,
                    mode,
                    batch,
                    prepared,
                    side=chosen.image,
                    classes=chosen.classes,
                    compact=chosen.compact and prepared is not None,
                )
                for batch in chosen.batch
            ]
    return made


def chosen_ways(chosen: argparse.Namespace) -> list[str]:
    return [way for way in WAYS if way in chosen.ways or way in ("static", "ours")]

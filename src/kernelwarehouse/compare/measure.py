"""What networks cost, measured beside their static backbone in one run."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kernelwarehouse._bfloat16 import require_computable
from kernelwarehouse.assemble import force
from kernelwarehouse.errors import ConfigError, KernelWarehouseError, MeasurementError
from kernelwarehouse.inference import prepare_inference
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.temperature import HasTemperature
from kernelwarehouse.zoo import EVERY_PRESET, build_by_name, check_name

# Beyond these a number is a mistake, and one that torch may answer with the end of the process.
_MOST = {"image_size": 8192, "batch_size": 65_536, "rounds": 10_000, "threads": 1024, "classes": 1_000_000}


@dataclass(frozen=True)
class Setting:
    """How to measure. `rounds` is how often a network and its backbone are timed in turn; with `prepare`, networks with
    warehouses are timed in inference after `prepare_inference` at its default memory limit."""

    image_size: int = 224
    batch_size: int = 16
    rounds: int = 7
    threads: int = 1
    classes: int = 1000
    prepare: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 and at most {most:,} is wanted")


QUICK = Setting(image_size=64, batch_size=4, rounds=3)


@dataclass(frozen=True)
class Times:
    """Seconds of one inference of one image, of a batch, and of one training step on a batch."""

    single: float
    batch: float
    training: float


@dataclass(frozen=True)
class Cost:
    """What one network costs. `relative` are its times as parts of its backbone's, taken in turn with them."""

    name: str
    backbone: str
    parameters: int
    macs: int
    times: Times
    relative: Times
    training_memory: int | None


STEPS_PER_NETWORK = 5
"""How often `measure` reports progress: after counting, three timings and the memory."""


def backbone_of(name: str) -> str:
    """The static network that a preset is built on; a static network is its own."""
    if name in EVERY_PRESET:
        return EVERY_PRESET[name].backbone
    check_name(name)
    return name


def build(name: str, setting: Setting) -> nn.Module:
    """A network as it is after training: temperature 0."""
    arguments: dict[str, Any] = {"num_classes": setting.classes}
    known = timm.get_pretrained_cfg(backbone_of(name))
    if known is not None and known.fixed_input_size:  # a transformer has positions for one size of image
        arguments["img_size"] = setting.image_size
    model = build_by_name(name, **arguments)
    for module in model.modules():
        if isinstance(module, HasTemperature):
            module.set_temperature(0.0)
    return model


def count_macs(model: nn.Module, setting: Setting) -> int:
    """Multiplications and additions for one image, by torch's counter; the mixing of kernels is among them.

    Counted on the plain definition, which is made of operations that the counter knows.
    """
    image = torch.zeros(1, 3, setting.image_size, setting.image_size)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), force("plain"), counter:
        model.eval()(image)
    return counter.get_total_flops() // 2


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def random_batch(setting: Setting) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (setting.batch_size, 3, setting.image_size, setting.image_size)
    labels = torch.randint(setting.classes, (setting.batch_size,), generator=generator)
    return torch.randn(size, generator=generator), labels


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _in_turn(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of every call in every round; the first, unmeasured round warms up."""
    for call in calls:
        call()
    return [[_seconds(call) for call in calls] for _ in range(rounds)]


def measure(name: str, setting: Setting, tick: Callable[[str], None] = lambda what: None) -> Cost:
    """Measure one network. `tick` is told after every step what was done."""
    require_computable(torch.device("cpu"), torch.float32)
    backbone = backbone_of(name)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        model = build(name, setting)
        macs = count_macs(model, setting)
        tick("counted")
        networks = [model] if name == backbone else [model, build(backbone, setting)]
        times, relative = _time(networks, setting, tick)
    except KernelWarehouseError:
        raise
    except Exception as error:  # a network can refuse images in any way, and the memory may not suffice
        raise MeasurementError(
            f"{name} cannot be measured on {setting.batch_size} images of {setting.image_size} x {setting.image_size} "
            f"({type(error).__name__}: {error}); choose another --image-size or --batch-size"
        ) from error
    finally:
        torch.set_num_threads(before)
    memory = training_memory(name, setting)
    tick("training memory")
    return Cost(name, backbone, sum(p.numel() for p in model.parameters()), macs, times, relative, memory)


def _time(networks: list[nn.Module], setting: Setting, tick: Callable[[str], None]) -> tuple[Times, Times]:
    """The first network's times, and their ratio to the last's (the backbone's): medians over the rounds."""
    images, labels = random_batch(setting)
    absolute, ratios = [], []
    for what in ("single", "batch", "training"):
        if what == "training":
            seconds = _in_turn([training_step(model, images, labels) for model in networks], setting.rounds)
        elif what == "batch":
            seconds = _inference_seconds(networks, images, setting.rounds, setting.prepare)
        else:  # one image is quick, and its time scatters the more
            seconds = _inference_seconds(networks, images[:1], 3 * setting.rounds, setting.prepare)
        absolute.append(statistics.median(row[0] for row in seconds))
        ratios.append(statistics.median(row[0] / row[-1] for row in seconds))
        tick(what)
    return Times(*absolute), Times(*ratios)


@torch.inference_mode()
def _inference_seconds(networks: list[nn.Module], images: Tensor, rounds: int, prepare: bool) -> list[list[float]]:
    for model in networks:
        model.eval()
        if prepare and any(isinstance(module, WarehouseLayer) for module in model.modules()):
            prepare_inference(model, batch=len(images))
    return _in_turn([partial(model, images) for model in networks], rounds)


def training_memory(name: str, setting: Setting) -> int | None:
    """Peak bytes of two training steps above what imports took, in a process of their own; `None` where the system
    does not tell."""
    arguments = [name, setting.image_size, setting.batch_size, setting.threads, setting.classes]
    command = [sys.executable, "-m", "kernelwarehouse.compare.memory", *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise MeasurementError(f"the process that measures the memory of {name} failed: {last[0]}")
    answer = child.stdout.strip()
    return int(answer) if answer else None

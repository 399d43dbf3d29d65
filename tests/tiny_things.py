"""Images that can be learnt in seconds, and networks that fit them."""

import numpy as np
import timm
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.builder import remember_builder

TINY_RESNET = {"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}


def striped_arrays(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """16x16 images of four classes: noise over stripes of four directions."""
    generator = np.random.default_rng(seed)
    labels = np.arange(images) % 4
    row, column = np.mgrid[:16, :16]
    patterns = np.stack([row, column, row + column, row - column]) % 4 * 40
    noise = generator.integers(0, 100, (images, 16, 16, 3))
    return (patterns[labels][..., None] + noise).astype(np.uint8), labels


def layer_norm_network() -> nn.Module:
    """A small ConvNeXt with warehouses and LayerNorm everywhere: no sample sees another one."""
    arguments = {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "output_stride": 8, "num_classes": 4}
    model = timm.create_model("convnext_tiny", **arguments)
    remember_builder(model, "convnext_tiny", arguments)
    config = kw.WarehouseConfig(norm="layer", exclude=("*.conv_dw",))
    return kw.convert(model, kw.plan(model, config))

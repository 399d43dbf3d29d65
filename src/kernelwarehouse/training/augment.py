"""From a decoded image to the network's input, by the recipe. The parts are timm's and torchvision's."""

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision import transforms

from kernelwarehouse.training.recipe import Recipe

Transform = Callable[[Image.Image], Tensor]

# All networks see images shifted and scaled alike, as timm's pretrained ones do.
MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def training_transform(recipe: Recipe, size: int) -> Transform:
    """Draws from the global generators; see `kernelwarehouse.data.seeds`."""
    crop, colours, to_tensor = create_transform(
        size,
        is_training=True,
        scale=(recipe.crop_min_area, 1.0),
        hflip=recipe.flip,
        color_jitter=recipe.color_jitter or None,  # type: ignore[arg-type]  # None: no such step at all
        auto_augment=recipe.auto_augment or None,
        interpolation=recipe.interpolation,
        mean=MEAN,
        std=STD,
        re_prob=recipe.random_erasing,
        re_mode="pixel",
        separate=True,
    )
    for policy in colours.transforms:
        for operation in getattr(policy, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    if recipe.crop != "resized":
        crop = _window(recipe, size)
    return transforms.Compose([crop, colours, to_tensor])


def _posterize(image: Image.Image, bits: int, **unused: Any) -> Image.Image:
    """At its strongest timm's RandAugment asks for 0 bits a colour, which new versions of Pillow refuse."""
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))


def _window(recipe: Recipe, size: int) -> Transform:
    """The whole image at `size`, or with 'padded' a random window of it; flipped or not."""
    interpolation = transforms.InterpolationMode(recipe.interpolation)
    parts: list[Callable[[Image.Image], Image.Image]] = [
        transforms.Resize(size, interpolation=interpolation),
        transforms.CenterCrop(size),
    ]
    if recipe.crop == "padded":
        parts.append(transforms.RandomCrop(size, padding=recipe.crop_padding))
    parts.append(transforms.RandomHorizontalFlip(recipe.flip))
    return transforms.Compose(parts)


def evaluation_transform(size: int, crop: float, interpolation: str) -> Transform:
    """Draws nothing: the same image always gives the same tensor."""
    return create_transform(size, is_training=False, interpolation=interpolation, mean=MEAN, std=STD, crop_pct=crop)

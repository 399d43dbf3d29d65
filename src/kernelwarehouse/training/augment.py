"""From a decoded image to the network's input, by the recipe. The parts are timm's and torchvision's."""

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision import transforms

from kernelwarehouse.errors import RecipeError
from kernelwarehouse.training.recipe import Recipe

Transform = Callable[[Image.Image], Tensor]

# All networks see images shifted and scaled alike, as timm's pretrained ones do.
MEAN, STD = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def training_transform(recipe: Recipe, size: int) -> Transform:
    """Draws from the global generators; see `kernelwarehouse.data.seeds`."""
    try:
        _refuse_what_timm_skips(recipe.auto_augment)
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
    except (AssertionError, ValueError, KeyError) as error:  # timm's ways to refuse a policy; the rest is checked
        raise RecipeError(
            f"auto_augment (={recipe.auto_augment!r}) is none of timm's policies ({error}); empty for none, or for "
            "instance 'rand-m9-mstd0.5-inc1', 'augmix-m5-w4-d2' or 'original'"
        ) from error
    for policy in colours.transforms:
        for operation in getattr(policy, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    if recipe.crop != "resized":
        crop = _window(recipe, size)
    return transforms.Compose([crop, colours, to_tensor])


def _refuse_what_timm_skips(policy: str) -> None:
    """timm passes over a setting without a number, though the only one of that kind is `t` of `rand`."""
    kind, *settings = policy.split("-")
    for setting in settings:
        if not any(sign.isdigit() for sign in setting) and not (kind == "rand" and setting.startswith("t")):
            raise ValueError(f"its setting {setting!r} has no number")


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
        if recipe.crop_padding > size:
            raise RecipeError(
                f"crop_padding (={recipe.crop_padding}) must be at most {size}, the side of the images: windows beyond "
                "it would show nothing of them"
            )
        parts.append(transforms.RandomCrop(size, padding=recipe.crop_padding))
    parts.append(transforms.RandomHorizontalFlip(recipe.flip))
    return transforms.Compose(parts)


def evaluation_transform(size: int, crop: float, interpolation: str) -> Transform:
    """Draws nothing: the same image always gives the same tensor."""
    return create_transform(size, is_training=False, interpolation=interpolation, mean=MEAN, std=STD, crop_pct=crop)

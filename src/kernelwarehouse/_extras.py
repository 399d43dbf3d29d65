"""What `pip install kernelwarehouse` leaves out: packages that only some rooms need, asked for by the extra's name."""

from importlib.util import find_spec
from typing import Literal

from kernelwarehouse.errors import MissingExtraError

Extra = Literal["train", "compare", "detection"]

EXTRAS: dict[Extra, tuple[str, ...]] = {
    "train": ("jinja2", "numpy", "PIL", "tensorboard"),
    "compare": ("matplotlib",),
    "detection": ("faster_coco_eval", "jinja2", "numpy", "PIL", "tensorboard"),
}
"""Extra, as in pyproject.toml -> the modules that it brings."""


def require(extra: Extra, what: str) -> None:
    """Refuse `what` where a module of the extra is not installed, and say how to install it."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"install with: pip install 'kernelwarehouse[{extra}]'"
        )

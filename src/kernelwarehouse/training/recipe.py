"""How to train, as data. The recipes lie in `recipes/*.toml`, each complete, each value explained and sourced there."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import filter as fitting
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_origin

import timm
from timm.optim import get_optimizer_info, list_optimizers

from kernelwarehouse.errors import RecipeError

CROPS = ("resized", "padded", "none")
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
PRECISIONS = ("float32", "bfloat16", "float16")
SCHEDULES = ("cosine", "step")
DROP_PATH_RULES = ("rising", "even")
# Beyond these a value is a mistake: no run ends, no image fits into memory, no rate into 32 bits.
MOST_EPOCHS = 1_000_000
MOST_IMAGE_SIZE = 8192
MOST_RATE = 1e30


@dataclass(frozen=True, kw_only=True)
class EngineRecipe(ABC):
    """What the engine itself reads of a recipe, whatever the task. Fields are as in the files.

    `exceptions` holds the fields that differ for some networks, by a pattern of their names; `for_model` resolves it.
    """

    summary: str

    epochs: int
    batch_size: int

    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    decay_logits: bool
    decay_layer_scale: bool
    matched_steps: bool
    clip_norm: float

    schedule: str
    min_learning_rate: float
    warmup_epochs: float
    warmup_learning_rate: float
    cosine_after_warmup: bool
    decay_factor: float

    tau_epochs: float

    ema_decay: float
    ema_warmup: bool

    precision: str
    sync_batch_norm: bool
    channels_last: bool
    compile: bool

    exceptions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_choice("schedule", SCHEDULES)
        self._check_choice("precision", PRECISIONS)
        self._check_choice("optimizer", _optimizers())
        self._check_range("epochs", above=0, most=MOST_EPOCHS)
        self._check_range("learning_rate", above=0, most=MOST_RATE)
        for name in ("batch_size", "decay_factor"):
            self._check_range(name, above=0)
        for name in ("weight_decay", "clip_norm", "min_learning_rate", "warmup_learning_rate"):
            self._check_range(name, most=MOST_RATE)
        for name in ("tau_epochs", "warmup_epochs"):
            self._check_range(name)
        for name in ("momentum", "ema_decay"):
            self._check_range(name, below=1)
        for name in ("tau_epochs", "warmup_epochs"):
            if getattr(self, name) > self.epochs:
                raise RecipeError(
                    f"{name} (={getattr(self, name):g}) is longer than the run of {self.epochs} epochs, which would "
                    f"end before it is through; override it as well, for instance --set {name}={self.epochs / 2:g}"
                )
        if self.schedule == "cosine" and self.cosine_after_warmup and self.warmup_epochs == self.epochs:
            raise RecipeError(
                f"warmup_epochs (={self.warmup_epochs:g}) leaves nothing of {self.epochs} epochs for the cosine after "
                f"it; override it as well, for instance --set warmup_epochs={self.epochs / 10:g}"
            )

    @property
    @abstractmethod
    def drops(self) -> int | tuple[int, ...]:
        """When 'step' lowers the rate: every so many epochs, or when these are over."""

    @property
    def mixes(self) -> bool:
        """Whether images of a micro-batch are mixed, in pairs."""
        return False

    def _check_types(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            if kind is float and type(value) is int:
                object.__setattr__(self, name, float(value))
            elif get_origin(kind) is tuple:
                if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
                    raise RecipeError(f"{name} (={value!r}) must be a list of whole numbers")
                object.__setattr__(self, name, tuple(value))
            elif type(value) is not kind:
                raise RecipeError(f"{name} (={value!r}) must be of type {kind.__name__}")

    def _check_choice(self, name: str, choices: Iterable[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise RecipeError(f"{name} (={value!r}) must be one of {', '.join(choices)}")

    def _check_range(
        self, name: str, *, above: float | None = None, most: float | None = None, below: float | None = None
    ) -> None:
        value = getattr(self, name)
        low_enough = (most is None or value <= most) and (below is None or value < below)
        if not isfinite(value) or not (value > above if above is not None else value >= 0) or not low_enough:
            bounds = [f"above {above}" if above is not None else "at least 0"]
            bounds += [f"at most {most}"] if most is not None else []
            bounds += [f"below {below}"] if below is not None else []
            raise RecipeError(f"{name} (={value}) must be {' and '.join(bounds)}")

    def for_model(self, name: str) -> Self:
        """The recipe of one network of timm's or the zoo's: with the exceptions that fit its name, the last ones
        winning, and with no exceptions left."""
        network, _, _ = name.partition(".")  # what follows is the tag of weights
        changes: dict[str, Any] = {}
        for pattern, values in self.exceptions.items():
            if fnmatchcase(network, pattern):
                changes |= values
        return replace(self, exceptions={}, **changes)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """A copy with some fields replaced, for all networks; a field that does not exist is an error."""
        _refuse_unknown(type(self), overrides, "recipe field")
        exceptions = {
            pattern: {name: value for name, value in values.items() if name not in overrides}
            for pattern, values in self.exceptions.items()
        }
        return replace(self, exceptions=exceptions, **overrides)

    def as_dict(self) -> dict[str, Any]:
        """The fields of one network's recipe. Exceptions are for others, and left out."""
        return {name: getattr(self, name) for name in _kinds(type(self))}


@dataclass(frozen=True, kw_only=True)
class Recipe(EngineRecipe):
    """One strategy to train for classification; `recipes/traditional.toml` is the one to read first."""

    decay_every: int

    image_size: int
    interpolation: str
    crop: str
    crop_min_area: float
    crop_padding: int
    flip: float
    color_jitter: float
    auto_augment: str
    random_erasing: float
    mixup: float
    cutmix: float
    mix_probability: float
    label_smoothing: float
    evaluation_crop: float

    dropout: float
    drop_path: float
    drop_path_rule: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("drop_path_rule", DROP_PATH_RULES)
        self._check_choice("crop", CROPS)
        self._check_choice("interpolation", INTERPOLATIONS)
        self._check_range("image_size", most=MOST_IMAGE_SIZE)
        self._check_range("evaluation_crop", above=0.1, most=1)
        self._check_range("decay_every", above=0)
        for name in ("crop_padding", "color_jitter", "mixup", "cutmix"):
            self._check_range(name)
        for name in ("flip", "random_erasing", "mix_probability", "label_smoothing", "crop_min_area"):
            self._check_range(name, most=1)
        for name in ("dropout", "drop_path"):
            self._check_range(name, below=1)
        if self.mixes and self.batch_size % 2:
            raise RecipeError(f"batch_size (={self.batch_size}) must be even, since mixup and cutmix pair the images")

    @property
    def drops(self) -> int:
        return self.decay_every

    @property
    def mixes(self) -> bool:
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)


RecipeKind = TypeVar("RecipeKind", bound=EngineRecipe)


OURS = files(__package__) / "recipes"


def recipe_names(folder: Traversable = OURS) -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or one of your own by the path of its `.toml` file."""
    return read_recipe(Recipe, name, OURS)


def read_recipe(kind: type[RecipeKind], name: str, folder: Traversable) -> RecipeKind:
    """A recipe of this kind, by its name in the folder or by the path of a `.toml` file."""
    if name in recipe_names(folder):
        text = (folder / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {name!r} cannot be read as text: {error}") from error
    else:
        known = ", ".join(recipe_names(folder))
        raise RecipeError(f"recipe {name!r} is unknown; there are {known}, or the path of a .toml")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name!r} is not valid TOML: {error}") from error
    exceptions = values.pop("exceptions", {})
    return _with_exceptions(make_recipe(kind, values, name), exceptions, name)


def recipe_from_dict(values: Mapping[str, Any], name: str) -> Recipe:
    """A recipe without exceptions, from what `as_dict` gave; `name` is for the error."""
    return make_recipe(Recipe, values, name)


def make_recipe(kind: type[RecipeKind], values: Mapping[str, Any], name: str) -> RecipeKind:
    """A recipe of this kind without exceptions, from what `as_dict` gave; `name` is for the error."""
    _refuse_unknown(kind, values, f"field of recipe {name!r}")
    missing = [field for field in _kinds(kind) if field not in values]
    if missing:
        raise RecipeError(
            f"recipe {name!r} does not say {', '.join(missing)}; a recipe is complete: start from a copy of one of ours"
        )
    return kind(**values)


def _with_exceptions(recipe: RecipeKind, exceptions: Any, name: str) -> RecipeKind:
    """The recipe with exceptions, each of which fits a network and makes a recipe that could be run."""
    tables = exceptions.values() if isinstance(exceptions, dict) else [exceptions]
    if not all(isinstance(values, dict) for values in tables):
        raise RecipeError(
            f"exceptions of recipe {name!r} are {exceptions!r}; a table for each network is wanted, of the fields that "
            'differ, as in [exceptions."kw1x_resnet*"]'
        )
    for pattern, values in exceptions.items():
        where = f"exception {pattern!r} of recipe {name!r}"
        _refuse_unknown(type(recipe), values, f"{where}: field")
        networks = timm.list_models()
        if not fitting(networks, pattern):
            near = get_close_matches(pattern, networks, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "'kernelwarehouse zoo' and timm.list_models() list them"
            raise RecipeError(f"{where} fits the name of no network; {hint}")
        try:
            replace(recipe, **values)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from error
    return replace(recipe, exceptions=exceptions)


def parse_override(text: str, kind: type[EngineRecipe] = Recipe) -> tuple[str, Any]:
    """`field=value` from the command line; the value as in TOML, with quotes around text optional."""
    name, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"override {text!r} must look like field=value")
    _refuse_unknown(kind, {name: value}, "recipe field")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _optimizers() -> list[str]:
    """timm's, but for those that need gradients of gradients, which no step here computes."""
    return [str(name) for name in list_optimizers() if not get_optimizer_info(str(name)).second_order]


@cache
def _kinds(kind: type[EngineRecipe]) -> dict[str, type]:
    """The fields that a recipe of this kind is made of and their types."""
    return {field.name: cast(type, field.type) for field in fields(kind) if field.name != "exceptions"}


def _refuse_unknown(kind: type[EngineRecipe], values: Mapping[str, Any], what: str) -> None:
    known = list(_kinds(kind))
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise RecipeError(f"{what} {name!r} is unknown; {hint}")

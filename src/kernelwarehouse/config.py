"""What a user asks for: frozen, validated settings that round-trip through JSON."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self, get_args

from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS, START_OBSTACLES
from kernelwarehouse.errors import ConfigError

AttentionFunction = str
"""A name in `ATTENTION_FUNCTIONS`."""
Norm = Literal["batch", "layer"]
Sharing = Literal["stage", "layer", "none", "same_shape"]
Start = Literal["one_to_one", "all_to_one", "many_to_one", "one_to_many", "none"]
Begin = Literal["temperature", "logits"]

MOST_BUDGET = 1024.0
"""Budgets beyond this are mistakes: a hundred times more cells than any published network has."""


def parse_number(value: object, what: str) -> float:
    """A finite number from a float, a `Fraction` or text such as `"1/2"`."""
    if isinstance(value, str):
        try:
            value = float(Fraction(value))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ConfigError(f"{what} is {value!r}; a number such as 1, 0.5 or '1/2' is wanted") from None
    try:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"{what} is {value!r}; a finite number such as 1, 0.5 or '1/2' is wanted")


def exact(value: float) -> Fraction:
    """The simple fraction a float stands for, so that 1/3 of 3 cells is one cell and not none."""
    return Fraction(value).limit_denominator(1_000_000)


def check_choice(value: object, what: str, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{what} is {value!r}; one of {', '.join(choices)} is wanted")


def check_positive(value: float, what: str, most: float = math.inf) -> None:
    if not 0 < value <= most:
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{what} is {value:g}; it must be above 0{limit}")


def check_begin(begin: Begin | None, attention: AttentionFunction | None, start: Start | None, where: str) -> None:
    """Refuse to begin at logits that cannot say which cells a mixture starts from."""
    if begin != "logits":
        return
    obstacle = None if attention is None else START_OBSTACLES.get(attention, "is not known to give single cells")
    if obstacle is not None:
        able = " or ".join(repr(name) for name, reason in START_OBSTACLES.items() if reason is None)
        raise ConfigError(
            f"{where}begin is 'logits' and attention is {attention!r}, which {obstacle}; attention {able}, or begin "
            "'temperature', is wanted"
        )
    if start == "none":
        raise ConfigError(
            f"{where}begin is 'logits' and start is 'none', which gives a mixture no cells to begin from; another "
            "start, or begin 'temperature', is wanted"
        )


@dataclass(frozen=True)
class Override:
    """Other settings for the layers or warehouses whose name matches `pattern`; `None` leaves a setting as it is.

    Arguments:
        pattern: shell-style; it must match a layer, a module that holds layers, or a warehouse.
        budget: as in `WarehouseConfig`; so are `in_ratio`, `out_ratio`, `spatial_partition`, `start`, `reduction`,
            `norm`, `attention`, `low_rank` and `begin`.

    Raises:
        ConfigError: for a value that makes no sense, and for an override that changes nothing.
    """

    pattern: str
    budget: float | None = None
    in_ratio: float | None = None
    out_ratio: float | None = None
    spatial_partition: bool | None = None
    start: Start | None = None
    reduction: float | None = None
    norm: Norm | None = None
    attention: AttentionFunction | None = None
    low_rank: float | None = None
    begin: Begin | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError(f"the pattern of an override is {self.pattern!r}; a layer or warehouse name is wanted")
        _normalise_settings(self, f"override {self.pattern!r}: ")
        if not self.changes():
            raise ConfigError(f"override {self.pattern!r} changes nothing; give it a setting such as budget")

    def changes(self) -> dict[str, Any]:
        """The settings that it changes."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "pattern")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}


@dataclass(frozen=True)
class WarehouseConfig:
    """How a model becomes a KernelWarehouse model.

    Patterns are shell-style (`layer4.*`) and match a layer's full name or the name of a module that holds it.

    - `budget`: the paper's b, cells per mixture. Numbers, fractions and text such as `"1/2"` are taken.
    - `in_ratio`, `out_ratio`: cell width as a part of the layers' greatest common divisor. By default, as in the
      paper, 1 for budgets of one and more, and 1/2 below (where the divisor is even).
    - `spatial_partition`: cells are 1 wide on spatial axes; off, they are as wide as the kernels.
    - `start`: which cells a mixture starts from.
    - `reduction`, `norm`, `attention`, `low_rank`: the attention branch; `low_rank` is the ratio of its low-rank form.
    - `begin`: what holds a mixture to those cells at first: the paper's `"temperature"`, which is lowered during
      training, or the `"logits"` that the attention starts with, at temperature 0. For `"caf"` only.
    - `sharing`: layers that draw on one warehouse: a stage, one layer, same-shaped kernels of a stage, or
      `"none"`, where every mixture has cells of its own.
    - `groups`: explicit warehouses, name -> patterns, instead of `sharing`. Layers in no group then stay static.
    - `exclude`: patterns of layers that stay static.
    - `static_stem`, `static_classifier`: leave the first convolution on an image and the last linear layer alone.
    - `max_layers`: a stage of more layers than this is shared in equal parts (`None`: never). The attention of a
      layer grows with its warehouse, so this bounds the cost of very deep networks.
    - `overrides`: other settings for some layers or warehouses; later ones win.

    Raises:
        ConfigError: for a value that makes no sense for any model; it names the setting, its value and what is wanted.

    Example:
        >>> import kernelwarehouse as kw
        >>> config = kw.WarehouseConfig(budget="1/2", overrides=[kw.Override("layer4", budget=1)])
        >>> kw.WarehouseConfig.from_dict(config.to_dict()) == config
        True
    """

    budget: float = 1.0
    in_ratio: float | None = None
    out_ratio: float | None = None
    spatial_partition: bool = True
    start: Start = "one_to_one"
    reduction: float = 1 / 16
    norm: Norm = "batch"
    attention: AttentionFunction = "caf"
    low_rank: float | None = None
    begin: Begin = "temperature"
    sharing: Sharing = "stage"
    groups: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    static_stem: bool = True
    static_classifier: bool = True
    max_layers: int | None = 32
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        _normalise_settings(self, "")
        check_choice(self.sharing, "sharing", get_args(Sharing))
        for name in ("static_stem", "static_classifier"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; True or False is wanted")
        count = self.max_layers
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"max_layers is {self.max_layers!r}; a count of at least 1, or None, is wanted")
        object.__setattr__(self, "exclude", _texts(self.exclude, "exclude"))
        if not isinstance(self.groups, Mapping):
            raise ConfigError(f"groups is {self.groups!r}; a mapping of warehouse name to layer patterns is wanted")
        groups = {name: _texts(patterns, f"group {name!r}") for name, patterns in self.groups.items()}
        for group, patterns in groups.items():
            if not isinstance(group, str) or not group:
                raise ConfigError(f"a group is named {group!r}; non-empty text is wanted")
            if not patterns:
                raise ConfigError(f"group {group!r} has no patterns; name at least one layer")
        object.__setattr__(self, "groups", groups)
        if groups and self.sharing != "stage":
            raise ConfigError(
                f"sharing is {self.sharing!r}, and groups say who shares as well; give one of them (with groups, "
                "sharing stays 'stage')"
            )
        if not isinstance(self.overrides, Iterable):
            raise ConfigError(f"overrides is {self.overrides!r}; a list of kernelwarehouse.Override is wanted")
        object.__setattr__(self, "overrides", tuple(_as_override(item) for item in self.overrides))

    def __hash__(self) -> int:
        return hash((self.budget, self.sharing, tuple(self.groups.items()), self.exclude, self.overrides))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` reads it back."""
        fields = dataclasses.asdict(self)
        fields["groups"] = {name: list(patterns) for name, patterns in self.groups.items()}
        fields["exclude"] = list(self.exclude)
        fields["overrides"] = [{"pattern": item.pattern, **item.changes()} for item in self.overrides]
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` made.

        Raises:
            ConfigError: for a setting that is unknown or makes no sense.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"a configuration is {data!r}; a mapping of settings is wanted")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**data)


def _as_override(item: object) -> Override:
    if isinstance(item, Override):
        return item
    if isinstance(item, Mapping):
        try:
            return Override(**item)
        except TypeError as error:
            raise ConfigError(f"override {dict(item)!r}: {error}") from None
    raise ConfigError(f"override is {item!r}; a kernelwarehouse.Override is wanted")


def _texts(value: object, what: str) -> tuple[str, ...]:
    # A bare string would be read letter by letter: the mistake behind a bug of the published code.
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{what} is {value!r}; a list of patterns is wanted")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{what} contains {item!r}; patterns are non-empty text")
    return items


def _normalise_settings(config: WarehouseConfig | Override, prefix: str) -> None:
    """Check the settings that configurations and overrides share, and turn texts such as '1/2' into numbers."""
    limits = {"budget": MOST_BUDGET, "in_ratio": 1.0, "out_ratio": 1.0, "reduction": 16.0, "low_rank": 1.0}
    for name, most in limits.items():
        value = getattr(config, name)
        if value is not None:
            number = parse_number(value, prefix + name)
            check_positive(number, prefix + name, most)
            object.__setattr__(config, name, number)
    partition = config.spatial_partition
    if not isinstance(partition, bool) and not (partition is None and isinstance(config, Override)):
        raise ConfigError(f"{prefix}spatial_partition is {partition!r}; True or False is wanted")
    choices = {
        "start": get_args(Start),
        "norm": get_args(Norm),
        "attention": tuple(ATTENTION_FUNCTIONS),
        "begin": get_args(Begin),
    }
    for name, known in choices.items():
        value = getattr(config, name)
        if value is not None or isinstance(config, WarehouseConfig):
            check_choice(value, prefix + name, known)
    check_begin(config.begin, config.attention, config.start, prefix)
    for name in ("budget", "reduction"):
        if isinstance(config, WarehouseConfig) and getattr(config, name) is None:
            raise ConfigError(f"{name} is None; a number is wanted")

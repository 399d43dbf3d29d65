"""A study as data: a TOML file, checked as it is read."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

from kernelwarehouse.errors import KernelWarehouseError, StudyError
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.zoo import check_name

Phase = Literal["trial", "base", "final"]
"""A run to choose settings by, one that others are upgraded from, and one whose network is tested."""

DECIDED = ("epochs", "learning_rate", "weight_decay")
"""Fields of the recipe that the study itself decides on."""

Table = TypeVar("Table")


@dataclass(frozen=True)
class Tuning:
    """What is tried for each method: every rate with every decay. A trial is as long as `epochs`; 0: as a final run."""

    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    seed: int
    epochs: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rates", "weight_decays"):
            values = _list(getattr(self, name), f"tuning: {name}")
            if not all(type(value) in (int, float) and isfinite(value) and value >= 0 for value in values):
                raise StudyError(f"tuning: {name} (={list(values)}) must be numbers from 0 on")
            _refuse_twice(values, f"tuning: {name}")
            object.__setattr__(self, name, tuple(float(value) for value in values))
        _whole(self.seed, "tuning: seed")
        _whole(self.epochs, "tuning: epochs")

    @property
    def grid(self) -> list[tuple[float, float]]:
        """The settings to try, as rate and decay."""
        return [(rate, decay) for rate in self.learning_rates for decay in self.weight_decays]


@dataclass(frozen=True)
class Method:
    """A row of the study's table.

    With `upgrade_from`, the network of that method is trained for `upgrade_after` epochs, becomes this one's, and goes
    on for the rest of the study's epochs. `paper` is the accuracy, in per cent, that the paper prints for the nearest.
    Without seeds it is only tried, for what its trials show.
    """

    name: str
    model: str
    seeds: tuple[int, ...]
    model_args: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    upgrade_from: str = ""
    upgrade_after: int = 0
    paper: float | None = None

    def __post_init__(self) -> None:
        _text(self.name, "the name of a method")
        where = f"method {self.name!r}"
        _text(self.model, f"{where}: model")
        try:
            check_name(self.model)
            json.dumps(self.model_args)
        except (KernelWarehouseError, TypeError) as error:
            raise StudyError(f"{where}: {error}") from error
        for name in ("model_args", "overrides"):
            if not isinstance(getattr(self, name), Mapping):
                raise StudyError(f"{where}: {name} (={getattr(self, name)!r}) must be a table")
        object.__setattr__(self, "seeds", _list(self.seeds, f"{where}: seeds", may_be_empty=True))
        for seed in self.seeds:
            _whole(seed, f"{where}: a seed")
        _refuse_twice(self.seeds, f"{where}: seeds")
        _whole(self.upgrade_after, f"{where}: upgrade_after")
        if not isinstance(self.upgrade_from, str) or bool(self.upgrade_from) != bool(self.upgrade_after):
            raise StudyError(
                f"{where}: upgrade_from (={self.upgrade_from!r}) and upgrade_after (={self.upgrade_after}) go "
                "together, a method and a number of epochs"
            )
        if self.paper is not None and type(self.paper) not in (int, float):
            raise StudyError(f"{where}: paper (={self.paper!r}) must be a number, in per cent")


@dataclass(frozen=True)
class Study:
    """Methods in the order in which they are run. `kept` training images are for choosing settings; `baseline` is the
    method that the others are compared with (by default the first), `paper_note` says what the paper's figures are of.
    """

    title: str
    data: str
    kept: int
    recipe: str
    epochs: int
    tuning: Tuning
    methods: tuple[Method, ...]
    split_seed: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = ""
    paper_note: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "data", "recipe"):
            _text(getattr(self, name), name)
        for name, least in (("kept", 1), ("epochs", 1), ("split_seed", 0)):
            _whole(getattr(self, name), name, least)
        if not isinstance(self.overrides, Mapping) or not isinstance(self.paper_note, str):
            raise StudyError(f"overrides (={self.overrides!r}) must be a table, paper_note (={self.paper_note!r}) text")
        names = [method.name for method in self.methods]
        _refuse_twice(names, "names of methods")
        object.__setattr__(self, "baseline", self.baseline or names[0])
        if self.baseline not in names:
            raise StudyError(f"baseline (={self.baseline!r}) must be one of the methods, {', '.join(names)}")
        if self.tests and not self.method(self.baseline).seeds:
            raise StudyError(
                f"baseline (={self.baseline!r}) must have seeds, since others that have are compared with it"
            )
        for method in self.methods:
            self._check_method(method)

    def _check_method(self, method: Method) -> None:
        where = f"method {method.name!r}"
        if self.tuning.seed in method.seeds:
            raise StudyError(
                f"{where}: seed {self.tuning.seed} is that of the tuning; settings are chosen by it, so results need "
                "others"
            )
        if method.upgrade_from:
            source = {each.name: each for each in self.methods}.get(method.upgrade_from)
            if source is None or source.upgrade_from:
                raise StudyError(
                    f"{where}: upgrade_from (={method.upgrade_from!r}) must be a method that is no upgrade itself"
                )
            shares = [total * method.upgrade_after / self.epochs for total in (self.epochs, self.length("trial"))]
            if not method.upgrade_after < self.epochs or not all(share.is_integer() for share in shares):
                raise StudyError(
                    f"{where}: upgrade_after (={method.upgrade_after}) must be less than the {self.epochs} epochs, and "
                    f"the same part of the {self.length('trial')} epochs of a trial must be a whole number"
                )
        for changes, whose in ((self.overrides, "overrides"), (method.overrides, f"{where}: overrides")):
            decided = [name for name in DECIDED if name in changes]
            if decided:
                raise StudyError(f"{whose}: {decided[0]} is not to be overridden; the study decides on it")
        phases: tuple[Phase, ...] = ("trial", "final")
        try:
            for (rate, decay), (before, after) in product(
                self.tuning.grid, [self.parts(method, phase) for phase in phases]
            ):
                self.recipe_of(method, after, rate, decay)
                if before:
                    self.recipe_of(self.method(method.upgrade_from), before, rate, decay)
        except KernelWarehouseError as error:
            raise StudyError(f"{where}: {error}") from error

    @property
    def tests(self) -> bool:
        """Whether any network is tested, or all are only tried."""
        return any(method.seeds for method in self.methods)

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)

    def length(self, phase: Phase) -> int:
        """Epochs of a whole run, those before an upgrade included."""
        return (self.tuning.epochs or self.epochs) if phase == "trial" else self.epochs

    def parts(self, method: Method, phase: Phase) -> tuple[int, int]:
        """Epochs before the upgrade, and from there on."""
        before = self.length(phase) * method.upgrade_after // self.epochs
        return before, self.length(phase) - before

    def recipe_of(self, method: Method, epochs: int, rate: float, decay: float) -> Recipe:
        decided = {"epochs": epochs, "learning_rate": rate, "weight_decay": decay}
        changes = {**self.overrides, **method.overrides, **decided}
        # Exceptions for the network come first, for a run is given fields without them.
        return load_recipe(self.recipe).for_model(method.model).with_overrides(changes)


def load_study(path: Path) -> Study:
    """Read and check a study's file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"study {path} cannot be read as TOML: {error}") from error
    try:
        methods = values.get("methods")
        if not isinstance(methods, list) or not methods:
            raise StudyError(f"methods (={methods!r}) must be tables, as in [[methods]]; at least one is wanted")
        made = {
            "tuning": _from_table(Tuning, values.get("tuning"), "tuning"),
            "methods": tuple(
                _from_table(Method, table, f"method {number}") for number, table in enumerate(methods, start=1)
            ),
        }
        return _from_table(Study, {**values, **made}, "the study")
    except StudyError as error:
        raise StudyError(f"study {path}: {error}") from error


def _from_table(kind: type[Table], table: Any, where: str) -> Table:
    """A dataclass from a table of exactly its fields."""
    if not isinstance(table, dict):
        raise StudyError(f"{where} (={table!r}) must be a table")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise StudyError(f"{where}: {name!r} is unknown; {hint}")
    for name, each in known.items():
        if name not in table and each.default is MISSING and each.default_factory is MISSING:
            raise StudyError(f"{where} does not say {name!r}")
    return kind(**table)


def _text(value: Any, what: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise StudyError(f"{what} (={value!r}) must be text")


def _whole(value: Any, what: str, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise StudyError(f"{what} (={value!r}) must be a whole number, {least} or more")


def _list(value: Any, what: str, *, may_be_empty: bool = False) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not (value or may_be_empty):
        raise StudyError(f"{what} (={value!r}) must be a list" + ("" if may_be_empty else " of at least one"))
    return tuple(value)


def _refuse_twice(values: Iterable[Any], what: str) -> None:
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise StudyError(f"{what}: {value!r} is there twice")
        seen.append(value)

"""What a run is: everything that has a say in its result, as `run.json` holds it."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kernelwarehouse.errors import RecipeError, TrainingError
from kernelwarehouse.training.recipe import EngineRecipe, Recipe, make_recipe

# 1 had neither this number nor the fingerprint of the data, 2 not all fields of recipes.
FORMAT = 3
# What runs did before recipes had a say in it.
_RECIPES_BEFORE_3 = {
    "decay_logits": False,
    "decay_layer_scale": False,
    "matched_steps": False,
    "cosine_after_warmup": False,
    "drop_path_rule": "rising",
    "ema_warmup": True,
}

_KINDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "arguments": dict,
    "weights": (str, type(None)),
    "data": str,
    "classes": list,
    "fingerprint": (dict, type(None)),
    "image_size": int,
    "seed": int,
    "recipe": dict,
}


CLASSIFICATION = "classification"
"""The task of runs whose settings name none."""


@dataclass(frozen=True)
class EngineSettings:
    """Compared when a run is started again. `fingerprint` is the data set's; old runs have none. Each task has a kind
    of its own, which knows the task's recipes."""

    task: ClassVar[str]
    recipe_kind: ClassVar[type[EngineRecipe]]

    model: str
    data: str
    classes: tuple[str, ...]
    image_size: int
    seed: int
    recipe: EngineRecipe
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    fingerprint: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As in `run.json`."""
        values = {name: getattr(self, name) for name in _KINDS}
        task = {} if self.task == CLASSIFICATION else {"task": self.task}
        return {"format": FORMAT} | task | values | {"classes": list(self.classes), "recipe": self.recipe.as_dict()}

    def to_json(self) -> str:
        try:
            return json.dumps(self.as_dict(), indent=1) + "\n"
        except TypeError as error:
            raise TrainingError(
                f"the arguments of {self.model}, {self.arguments}, cannot be stored as JSON ({error}); "
                "numbers, texts, lists and tables of these are possible"
            ) from error

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read and check what `to_json` wrote, also in older versions; `where` is for the error."""
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TrainingError(f"{where} is damaged: {error}") from error
        if not isinstance(values, dict):
            raise TrainingError(f"{where} is damaged: it holds {_short(values)}, not the settings of a run")
        number = values.get("format", 1)
        if type(number) is not int or number < 1:
            raise TrainingError(f"{where} is damaged: its format is {_short(number)}; a number from 1 on is wanted")
        if number > FORMAT:
            raise TrainingError(
                f"{where} has format {number}, and this version of kernelwarehouse knows formats up to {FORMAT}; "
                "a newer version wrote it: use that one"
            )
        task = values.get("task", CLASSIFICATION)
        if task != cls.task:
            raise TrainingError(f"{where} is that of a run for {_short(task)}; one for {cls.task!r} is wanted here")
        if number == 1:
            values.setdefault("fingerprint", None)
        for name, kind in _KINDS.items():
            if name not in values:
                raise TrainingError(f"{where} is damaged: it does not say {name!r}")
            if not isinstance(values[name], kind) or type(values[name]) is bool:
                raise TrainingError(f"{where} is damaged: {name} is {_short(values[name])}")
        if number < 3:
            values["recipe"] = _RECIPES_BEFORE_3 | values["recipe"]
        classes = values["classes"]
        if not classes or not all(isinstance(name, str) for name in classes) or values["image_size"] < 1:
            raise TrainingError(
                f"{where} is damaged: classes are {_short(classes)} and image_size is {values['image_size']}"
            )
        try:
            recipe = make_recipe(cls.recipe_kind, values["recipe"], "of the run")
        except RecipeError as error:
            raise TrainingError(f"{where} is damaged: {error}") from error
        known = {name: values[name] for name in _KINDS}
        return cls(**known | {"classes": tuple(classes), "recipe": recipe})

    def differences(self, stored: "EngineSettings") -> list[str]:
        """What is not as in the stored settings, the data's fingerprint aside."""
        theirs, ours = (json.loads(settings.to_json()) for settings in (stored, self))
        for settings in (theirs, ours):
            del settings["fingerprint"]
        return [f"{name}: there {_short(there)}, now {_short(here)}" for name, there, here in _unequal(theirs, ours)]

    def data_differences(self, stored: "EngineSettings") -> list[str]:
        """What is not as it was in the data; nothing if either run did not look."""
        if self.fingerprint is None or stored.fingerprint is None:
            return []
        found: list[str] = []
        for split in sorted(stored.fingerprint.keys() | self.fingerprint.keys()):
            there, here = (_table(settings.fingerprint, split) for settings in (stored, self))
            counts = [table.get("images", 0) for table in (there, here)]
            if counts[0] != counts[1]:
                found.append(f"{split} images: there {_short(counts[0])}, now {_short(counts[1])}")
                continue
            parts = {"labels": f"{split} labels differ", "content": f"{split} images differ"}
            found += [text for part, text in parts.items() if there.get(part) != here.get(part)]
        return found


@dataclass(frozen=True)
class RunSettings(EngineSettings):
    """Those of a run for classification."""

    task = CLASSIFICATION
    recipe_kind = Recipe

    recipe: Recipe


def _table(tables: dict[str, Any] | None, name: str) -> dict[str, Any]:
    table = (tables or {}).get(name)
    return table if isinstance(table, dict) else {}


def _unequal(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _unequal(there, here, f"{prefix}{name}.")
        elif there != here:
            found.append((f"{prefix}{name}", there, here))
    return found


def _short(value: object) -> str:
    """For a message: lists of a thousand classes are cut."""
    text = f"{value:,}" if type(value) is int else repr(value)
    return text if len(text) <= 100 else f"{text[:90]} ... ({len(text)} characters)"

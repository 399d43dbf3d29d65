"""The recipes say what the paper says, every field is explained, and nonsense is refused."""

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from kernelwarehouse.errors import RecipeError
from kernelwarehouse.training.recipe import Recipe, load_recipe, parse_override, recipe_names

PAPER = {
    "traditional": {
        "optimizer": "momentum",
        "epochs": 100,
        "batch_size": 256,
        "momentum": 0.9,
        "weight_decay": 0.0001,
        "learning_rate": 0.1,
        "schedule": "step",
        "decay_every": 30,
        "decay_factor": 0.1,
        "tau_epochs": 10,
    },
    "advanced": {
        "optimizer": "adamw",
        "epochs": 300,
        "batch_size": 4096,
        "weight_decay": 0.05,
        "learning_rate": 0.004,
        "schedule": "cosine",
        "min_learning_rate": 0,
        "warmup_epochs": 20,
        "tau_epochs": 20,
    },
    "mobilenetv2": {
        "optimizer": "momentum",
        "epochs": 150,
        "batch_size": 256,
        "weight_decay": 0.00004,
        "learning_rate": 0.1,
        "schedule": "cosine",
        "tau_epochs": 10,
    },
    "mobilenetv2_published": {"learning_rate": 0.05, "tau_epochs": 15},
    "finetune": {"tau_epochs": 0},
    "small": {"image_size": 0},
}


@pytest.mark.parametrize("name", PAPER)
def test_values_of_the_paper(name: str) -> None:
    recipe = load_recipe(name).as_dict()
    assert {field: recipe[field] for field in PAPER[name]} == PAPER[name]


def test_there_are_no_other_recipes() -> None:
    assert recipe_names() == sorted(PAPER)


def test_advanced_augments_as_the_paper_says() -> None:
    recipe = load_recipe("advanced")
    assert recipe.auto_augment.startswith("rand")
    assert min(recipe.mixup, recipe.cutmix, recipe.random_erasing, recipe.label_smoothing) > 0


@pytest.mark.parametrize("name", PAPER)
def test_every_field_is_explained_and_sourced(name: str) -> None:
    lines = (files("kernelwarehouse.training") / "recipes" / f"{name}.toml").read_text().splitlines()
    explained = {line.split(" = ")[0] for line in lines if " = " in line and "# [" in line}
    assert explained == {field.name for field in fields(Recipe)} - {"summary"}


def test_overrides_from_text() -> None:
    overrides = dict(map(parse_override, ["mixup=0", "compile=true", "auto_augment=rand-m5", "learning_rate=1e-3"]))
    recipe = load_recipe("advanced").with_overrides(overrides)
    assert (recipe.mixup, recipe.compile, recipe.auto_augment, recipe.learning_rate) == (0.0, True, "rand-m5", 0.001)
    assert recipe.weight_decay == load_recipe("advanced").weight_decay


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mixupp=1", "'mixupp' is unknown; did you mean 'mixup'"),
        ("mixup", "must look like field=value"),
        ("epochs=many", r"epochs \(='many'\) must be of type int"),
        ("epochs=0", r"epochs \(=0\) must be above 0"),
        ("learning_rate=nan", r"learning_rate \(=nan\) must be above 0"),
        ("flip=1.5", r"flip \(=1.5\) must be at least 0 and at most 1"),
        ("ema_decay=1.0", r"ema_decay \(=1.0\) must be at least 0 and below 1"),
        ("crop=square", "must be one of resized, padded, none"),
        ("optimizer=sgdd", r"optimizer \(='sgdd'\) must be one of"),
        ("tau_epochs=31", r"tau_epochs \(=31\) is longer than the run of 30 epochs"),
        ("compile=1", r"compile \(=1\) must be of type bool"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("small").with_overrides(dict([parse_override(override)]))


def test_odd_batches_cannot_be_mixed() -> None:
    with pytest.raises(RecipeError, match="must be even"):
        load_recipe("advanced").with_overrides({"batch_size": 33})


def test_recipe_of_ones_own(tmp_path: Path) -> None:
    text = (files("kernelwarehouse.training") / "recipes" / "small.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("epochs = 30 ", "epochs = 7 "))
    assert load_recipe(str(path)).epochs == 7
    path.write_text(text.replace("momentum = ", "momentun = "))
    with pytest.raises(RecipeError, match=r"mine\.toml' 'momentun' is unknown; did you mean 'momentum'"):
        load_recipe(str(path))
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("clip_norm")))
    with pytest.raises(RecipeError, match="does not say clip_norm"):
        load_recipe(str(path))
    path.write_text("epochs = = 3")
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(str(path))


def test_unknown_recipe_lists_those_there_are() -> None:
    with pytest.raises(RecipeError, match="'modern' is unknown; there are advanced, finetune"):
        load_recipe("modern")
    with pytest.raises(RecipeError, match=r"absent\.toml' cannot be read"):
        load_recipe("absent.toml")

"""The recipes say what the paper and the released code say, every field is explained, and nonsense is refused."""

from argparse import ArgumentParser
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from kernelwarehouse.commands.training import add_parsers, resolve_recipe
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
    "advanced_published": {"epochs": 300, "batch_size": 4096, "learning_rate": 0.004, "min_learning_rate": 1e-6},
    "mobilenetv2_published": {
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "min_learning_rate": 1e-6,
        "tau_epochs": 15,
        "decay_logits": True,
    },
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
    assert explained == {field.name for field in fields(Recipe)} - {"summary", "exceptions"}
    unexplained = [line for line in lines if " = " in line and "# [" not in line]
    assert [line.split(" = ")[0] for line in unexplained] == ["summary"]  # nor does an exception stand without a source


def test_advanced_is_the_same_for_all_networks_and_the_released_code_is_not() -> None:
    assert load_recipe("advanced").exceptions == {}
    recipe = load_recipe("advanced_published")
    drop_paths = {
        **dict.fromkeys(
            ("resnet18", "kw1d4x_resnet18", "kw1d2x_resnet18", "kw1d2x_resnet18_one_to_two"), (0.0, "even")
        ),
        **dict.fromkeys(("kw1x_resnet18", "kw2x_resnet18", "kw4x_resnet18", "kw1x_resnet18_softmax"), (0.1, "even")),
        **dict.fromkeys(("resnet50", "kw1d2x_resnet50", "kw1x_resnet50", "kw4x_resnet50"), (0.1, "even")),
        **dict.fromkeys(("kw1x_convnext_tiny", "kw1x_convnext_tiny_published"), (0.3, "rising")),
        "convnext_tiny": (0.1, "rising"),
    }
    for name, expected in drop_paths.items():
        resolved = recipe.for_model(name)
        assert (resolved.drop_path, resolved.drop_path_rule) == expected, name
        unmixed = name == "kw1d4x_resnet18"
        assert (resolved.mixup, resolved.cutmix) == ((0.0, 0.0) if unmixed else (0.8, 1.0)), name
        averaged = "convnext" in name
        assert (resolved.ema_decay, resolved.ema_warmup) == (0.9999 if averaged else 0.0, False), name
        assert resolved.decay_layer_scale == (averaged and name != "convnext_tiny"), name
        assert resolved.exceptions == {}


def test_label_smoothing_of_mobilenetv2_in_the_released_code() -> None:
    recipe = load_recipe("mobilenetv2_published")
    presets = [f"kw{budget}_mobilenetv2_{width}" for budget in ("1d2x", "1x", "4x") for width in ("050", "100")]
    smoothed = {name for name in (*presets, "mobilenetv2_100") if recipe.for_model(name).label_smoothing == 0.1}
    assert smoothed == {"kw1x_mobilenetv2_100", "kw4x_mobilenetv2_100", "kw4x_mobilenetv2_050"}


def test_exceptions_hold_for_the_networks_they_fit_and_overrides_for_all() -> None:
    recipe = load_recipe("advanced_published")
    assert recipe.for_model("convnext_tiny.fb_in1k").ema_decay == 0.9999  # with the tag of weights
    overridden = recipe.with_overrides({"drop_path": 0.2})
    for name in ("resnet18", "kw1x_resnet18", "kw1x_convnext_tiny"):
        assert overridden.for_model(name).drop_path == 0.2
    assert overridden.for_model("kw1x_convnext_tiny").ema_decay == 0.9999
    assert recipe.for_model("kw1d4x_resnet18").with_overrides({"mixup": 0.5}).mixup == 0.5
    assert "exceptions" not in recipe.as_dict()


def test_the_command_line_wins_over_exceptions() -> None:
    given = "train kw1d4x_resnet18 --data embedded --recipe advanced_published --output run --set cutmix=0.5"
    parser = ArgumentParser()
    add_parsers(parser.add_subparsers())
    recipe = resolve_recipe(parser.parse_args(given.split()))
    assert (recipe.mixup, recipe.cutmix, recipe.drop_path, recipe.exceptions) == (0.0, 0.5, 0.0, {})


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("exceptions = 3", r"exceptions of recipe '.*mine\.toml' are 3; a table for each network is wanted"),
        ('exceptions."resnet18" = 3', r"are \{'resnet18': 3\}; a table for each network is wanted"),
        (
            '[exceptions."resnet18"]\nmixupp = 0.1',
            r"'resnet18' of recipe.*'mixupp' is unknown; did you mean 'mixup'",
        ),
        ('[exceptions."resnet18"]\nexceptions = 1', r"field 'exceptions' is unknown"),
        (
            '[exceptions."resnet18"]\nflip = 2.0',
            r"exception 'resnet18'.*flip \(=2.0\) must be at least 0",
        ),
        ('[exceptions."kw1x_resnet81"]\nflip = 0.1', "fits the name of no network; did you mean 'kw1x_resnet18'"),
        ('[exceptions."*_wings"]\nflip = 0.1', r"exception '\*_wings'.*fits the name of no network"),
    ],
)
def test_bad_exceptions(tmp_path: Path, exception: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    text = (files("kernelwarehouse.training") / "recipes" / "small.toml").read_text()
    path.write_text(f"{text}\n{exception}\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(path))


def test_the_last_exception_that_fits_wins(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (files("kernelwarehouse.training") / "recipes" / "small.toml").read_text()
    path.write_text(f'{text}\n[exceptions."*resnet18"]\nflip = 0.1\nmixup = 0.2\n[exceptions."kw1x_*"]\nflip = 0.3\n')
    recipe = load_recipe(str(path))
    assert [recipe.for_model(name).flip for name in ("resnet50", "resnet18", "kw1x_resnet18")] == [0.5, 0.1, 0.3]
    assert recipe.for_model("kw1x_resnet18").mixup == 0.2


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
        ("drop_path_rule=steep", "must be one of rising, even"),
        ("exceptions=1", "'exceptions' is unknown"),
        ("compile=1", r"compile \(=1\) must be of type bool"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("small").with_overrides(dict([parse_override(override)]))


def test_a_cosine_after_the_warm_up_needs_time() -> None:
    recipe = load_recipe("small").with_overrides({"warmup_epochs": 30})
    with pytest.raises(RecipeError, match=r"warmup_epochs \(=30\) leaves nothing of 30 epochs for the cosine"):
        recipe.with_overrides({"cosine_after_warmup": True})
    assert recipe.with_overrides({"cosine_after_warmup": True, "schedule": "step"}).warmup_epochs == 30


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
    with pytest.raises(RecipeError, match="'modern' is unknown; there are advanced, advanced_published, finetune"):
        load_recipe("modern")
    with pytest.raises(RecipeError, match=r"absent\.toml' cannot be read"):
        load_recipe("absent.toml")

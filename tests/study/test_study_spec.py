"""Studies that make no sense are refused, with a line that says what would be right."""

import re
from pathlib import Path

import pytest
from small_studies import HEAD, STATIC, TWIN, UPGRADED, WHOLE, study_of, write_study

from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.jobs import plan_jobs
from kernelwarehouse.study.spec import load_study


def test_a_study_is_what_its_file_says(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert [method.name for method in study.methods] == ["static", "twin", "upgraded"]
    assert study.baseline == "static"
    assert study.tuning.grid == [(0.01, 0.0005), (0.05, 0.0005)]
    assert study.parts(study.method("static"), "trial") == (0, 2)
    assert study.parts(study.method("upgraded"), "trial") == (1, 1)
    assert study.parts(study.method("upgraded"), "final") == (2, 2)
    recipe = study.recipe_of(study.method("twin"), 3, 0.25, 0.125)
    assert (recipe.epochs, recipe.learning_rate, recipe.weight_decay, recipe.batch_size) == (3, 0.25, 0.125, 16)


def test_a_method_has_the_recipe_of_its_network_and_the_overrides_have_the_last_word(tmp_path: Path) -> None:
    text = (HEAD + STATIC + TWIN).replace('"small"', '"advanced_published"').replace("kw1x_", "kw1d4x_")
    study = study_of(tmp_path, text)
    recipes = {method.name: study.recipe_of(method, 4, 0.1, 0.0) for method in study.methods}
    assert {name: (recipe.mixup, recipe.cutmix) for name, recipe in recipes.items()} == {
        "static": (0.8, 1.0),
        "twin": (0.0, 0.0),
    }
    overridden = study_of(tmp_path, text.replace("flip = 0.0", "mixup = 0.2"))
    assert overridden.recipe_of(overridden.method("twin"), 4, 0.1, 0.0).mixup == 0.2


def test_trials_are_as_long_as_final_runs_by_default(tmp_path: Path) -> None:
    study = study_of(tmp_path, WHOLE.replace("seed = 9\nepochs = 2", "seed = 9"))
    assert study.length("trial") == study.length("final") == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Stripes"', "", "the study does not say 'title'"),
        ('title = "Stripes"', 'titel = "Stripes"', "the study: 'titel' is unknown; did you mean 'title'?"),
        ('title = "Stripes"', "title = 3", "title (=3) must be text"),
        ("kept = 16", "kept = 0", "kept (=0) must be a whole number, 1 or more"),
        ("kept = 16", "kept = true", "kept (=True) must be a whole number"),
        ("epochs = 4", "epochs = 0", "epochs (=0) must be a whole number, 1 or more"),
        ("epochs = 4", "epochs = 4\nsplit_seed = -1", "split_seed (=-1) must be a whole number, 0 or more"),
        ("epochs = 4", "epochs = 4\nbaseline = 'dynamic'", "baseline (='dynamic') must be one of the methods, static,"),
        ('recipe = "small"', 'recipe = "tiny"', "recipe 'tiny' is unknown"),
        ("flip = 0.0", "flop = 0.0", "recipe field 'flop' is unknown; did you mean"),
        ("flip = 0.0", "learning_rate = 0.1", "overrides: learning_rate is not to be overridden; the study decides"),
        (
            "warmup_epochs = 0.5",
            "warmup_epochs = 2.5",
            "method 'static': warmup_epochs (=2.5) is longer than",
        ),
        ("[tuning]", "[tunning]", "tuning (=None) must be a table"),
        ("learning_rates = [0.01, 0.05]", "learning_rates = []", "learning_rates (=[]) must be a list of at least one"),
        ("learning_rates = [0.01, 0.05]", "learning_rates = [0.01, nan]", "must be numbers from 0 on"),
        ("learning_rates = [0.01, 0.05]", "learning_rates = [0.1, 0.1]", "tuning: learning_rates: 0.1 is there twice"),
        ("learning_rates = [0.01, 0.05]", "learning_rates = [0.0]", "learning_rate (=0.0) must be above 0"),
        ("weight_decays = [0.0005]", "", "tuning does not say 'weight_decays'"),
        ("seed = 9", "seed = 1", "seed 1 is that of the tuning; settings are chosen by it, so results need others"),
        ("seed = 9\nepochs = 2", "seed = 9\nepochs = 3", "the same part of the 3 epochs of a trial must be a whole"),
        ('name = "twin"', 'name = "static"', "names of methods: 'static' is there twice"),
        ('name = "twin"', 'name = ""', "the name of a method (='') must be text"),
        ('name = "twin"', 'name = "twin"\nsize = 3', "method 2: 'size' is unknown; there are name, model, seeds"),
        ('model = "resnet18"', 'model = "resnet1"', "method 'static': there is no network 'resnet1'; did you mean"),
        ("seeds = [0, 1]\npaper = 74.5", "seeds = [0, 0]", "method 'twin': seeds: 0 is there twice"),
        ("seeds = [0, 1]\npaper = 74.5", "seeds = 3", "method 'twin': seeds (=3) must be a list"),
        ("seeds = [0, 1]\npaper = 74.5", "seeds = [0.5]", "method 'twin': a seed (=0.5) must be a whole number"),
        ("paper = 74.5", 'paper = "74.5%"', "method 'twin': paper (='74.5%') must be a number, in per cent"),
        ("paper = 74.5", "overrides = 3", "method 'twin': overrides (=3) must be a table"),
        ("paper = 74.5", "overrides = {epochs = 3}", "method 'twin': overrides: epochs is not to be overridden"),
        ('upgrade_from = "static"', "", "upgrade_from (='') and upgrade_after (=2) go together"),
        ('upgrade_from = "static"', 'upgrade_from = "stat"', "upgrade_from (='stat') must be a method that is no"),
        ('upgrade_from = "static"', 'upgrade_from = "upgraded"', "must be a method that is no upgrade itself"),
        ("upgrade_after = 2", "upgrade_after = 4", "upgrade_after (=4) must be less than the 4 epochs"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WHOLE
    path = write_study(tmp_path, WHOLE.replace(old, new, 1) if "74.5" not in old else WHOLE.replace(old, new))
    with pytest.raises(StudyError, match=rf"study .*stripes\.toml: .*{re.escape(message)}"):
        load_study(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"missing\.toml cannot be read as TOML: .*No such file"):
        load_study(tmp_path / "missing.toml")
    with pytest.raises(StudyError, match=r"stripes\.toml cannot be read as TOML"):
        load_study(write_study(tmp_path, "title = = 3"))
    with pytest.raises(StudyError, match=r"methods \(=None\) must be tables"):
        load_study(write_study(tmp_path, HEAD))
    with pytest.raises(StudyError, match=r"methods \(=3\) must be tables"):
        load_study(write_study(tmp_path, "methods = 3\n" + HEAD))
    with pytest.raises(StudyError, match=r"method 1 \(=3\) must be a table"):
        load_study(write_study(tmp_path, "methods = [3]\n" + HEAD))


def test_an_upgrade_may_come_before_what_it_is_made_of(tmp_path: Path) -> None:
    study = study_of(tmp_path, HEAD + UPGRADED + STATIC)
    assert study.baseline == "upgraded"


def test_methods_without_seeds_are_only_tried(tmp_path: Path) -> None:
    assert study_of(tmp_path).tests
    untested = re.sub(r"seeds = \[.+\]", "seeds = []", WHOLE)
    study = load_study(write_study(tmp_path, untested))
    assert not study.tests
    assert {job.phase for job in plan_jobs(study, {}).jobs} == {"trial"}
    with pytest.raises(StudyError, match=r"baseline \(='static'\) must have seeds"):
        load_study(write_study(tmp_path, WHOLE.replace("seeds = [0, 1]", "seeds = []", 1)))

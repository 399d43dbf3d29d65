import pytest

from kernelwarehouse import paper
from kernelwarehouse.paper.presets import ACCURACY_TABLES, RECIPES
from kernelwarehouse.training.recipe import load_recipe


def test_names_are_those_of_the_presets():
    names = {paper.preset_name(row) for row in paper.results()}
    assert {"resnet18", "deit_tiny_patch16_224", "kw1d2x_mobilenetv2_050", "kw3d4x_convnext_tiny"} <= names
    assert {"se_resnet18", "condconv8x_resnet18", "dy4x_mobilenetv2_100", "kwod4x_mobilenetv2_100"} <= names


def test_accuracy_is_told_apart_by_length_of_training():
    assert paper.published("kw1x_resnet18").top1 == {"100 epochs": 73.67, "300 epochs": 74.77}
    assert paper.published("kwod4x_mobilenetv2_100").top1 == {"150 epochs": 76.54}


def test_figures_come_from_all_tables_of_a_network():
    figures = paper.published("od4x_resnet50")
    assert (figures.params_millions, figures.fps, figures.training_memory_mb) == (90.67, 142.3, 31892)


def test_ablations_are_no_figures_of_the_preset():
    # "Same dimensioned kernels" at 26.95M is ResNet50 1x too, with a setting.
    assert paper.published("kw1x_resnet50").params_millions == 28.05


def test_a_network_that_the_paper_does_not_have():
    assert paper.published("vgg16") is None


@pytest.mark.parametrize(
    ("preset", "recipes"),
    [
        ("kw1x_resnet18", ["traditional", "advanced_published"]),
        ("resnet18", ["traditional", "advanced_published"]),
        ("kw1d4x_resnet18", ["advanced_published"]),
        ("kw1x_convnext_tiny_published", ["advanced_published"]),
        ("kw4x_mobilenetv2_050", ["mobilenetv2_published"]),
        ("kwod4x_mobilenetv2_100", ["mobilenetv2_published"]),
        ("se_resnet18", ["traditional"]),
        ("kw1x_deit_tiny", []),
        ("kw1x_small_resnet", []),
    ],
)
def test_recipes_that_made_the_papers_accuracies(preset, recipes):
    assert paper.recipes(preset) == recipes


def test_recipes_exist_and_are_as_long_as_the_paper_says():
    assert set(ACCURACY_TABLES) - set(RECIPES) == {"table:transformer"}
    for table, recipe in RECIPES.items():
        assert f"{load_recipe(recipe).epochs} epochs" == ACCURACY_TABLES[table]

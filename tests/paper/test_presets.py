from kernelwarehouse import paper


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

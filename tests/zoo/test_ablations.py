import pytest
import torch

import kernelwarehouse as kw
from kernelwarehouse import paper
from kernelwarehouse.attention import Attention
from kernelwarehouse.cli import main
from kernelwarehouse.zoo import ABLATIONS, EVERY_PRESET, Preset, preset_plan
from kernelwarehouse.zoo.ablations import ablations

COUNTS = {
    "kw1x_resnet18_no_partition": 11_776_974,
    "kw1x_resnet18_share_in_layer": 11_805_134,
    "kw1x_resnet18_no_sharing": 11_783_114,
    "kw1x_resnet50_same_shape": 26_949_052,
    "kw1x_resnet18_softmax": 11_932_148,
    "kw1x_resnet18_sigmoid": 11_932_148,
    "kw1x_resnet18_relu": 11_932_148,
    "kw4x_resnet18_softmax": 45_862_085,
    "kw1x_resnet18_all_to_one": 11_932_148,
    "kw1x_resnet18_no_start": 11_932_148,
    "kw4x_resnet18_four_to_one": 45_862_085,
    "kw1d2x_resnet18_one_to_two": 7_431_044,
    "dy4x_resnet18_caf": 45_472_052,
    "od4x_resnet18_caf": 44_901_640,
}


@pytest.fixture(scope="module", params=COUNTS)
def network(request):
    torch.manual_seed(0)
    return request.param, kw.create_model(request.param)


def test_parameters_are_those_of_the_definition(network):
    name, model = network
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name] == ABLATIONS[name].parameters


def test_forward_backward_and_a_step(network):
    _, model = network
    kw.set_temperature(model, 0.5)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    out = model.train()(torch.randn(2, 3, 32, 32))
    torch.nn.functional.cross_entropy(out, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert len(moved) > 0.9 * len(before)


def test_all_are_there():
    assert [name for name in ABLATIONS if "small_resnet" not in name] == list(COUNTS)


def test_every_row_of_the_papers_ablation_tables_has_a_preset():
    tables = [label for label in paper.table_labels() if "ablation" in label or label == "table:attention_function"]
    tables.remove("table:ablation_speed")
    rows = [row for label in tables for row in paper.results(label) if row.method is not None]
    listed = [ablation.published for ablation in ablations()]
    assert len(listed) == len(rows) == 28
    assert all(row in listed for row in rows)


def test_counts_are_the_printed_ones():
    for ablation in ablations():
        preset = EVERY_PRESET[ablation.preset]
        assert f"{preset.parameters / 1e6:.2f}" == f"{ablation.published.metrics['params_millions']:.2f}", ablation


def test_one_setting_is_changed_and_the_rest_is_the_base():
    base = EVERY_PRESET["kw1x_resnet18"].config.to_dict()
    for name, preset in ABLATIONS.items():
        if isinstance(preset, Preset) and name.startswith("kw1x_resnet18"):
            changed = {key for key, value in preset.config.to_dict().items() if value != base[key]}
            assert changed <= {"sharing", "spatial_partition", "attention", "start"}
            assert len(changed) == (2 if name.endswith("no_partition") else 1)


def test_without_partition_a_cell_is_a_whole_kernel():
    for warehouse in preset_plan(ABLATIONS["kw1x_resnet18_no_partition"]).warehouses:
        assert (warehouse.mixtures, warehouse.cells) == (1, 1)
        assert warehouse.cell_shape == warehouse.layers[0].spec.kernel_shape


def test_start_strategies_give_a_mixture_the_cells_of_their_name():
    def cells_per_mixture(name):
        model = kw.create_model(name, num_classes=2)
        return [module.beta.sum(1) for module in model.modules() if isinstance(module, Attention)]

    assert all((count == 4).all() for count in cells_per_mixture("kw4x_resnet18_four_to_one"))
    assert all((count == 1).all() for count in cells_per_mixture("kw1d2x_resnet18_one_to_two"))
    everything = cells_per_mixture("kw1x_resnet18_all_to_one")
    assert {int(value) for count in everything for value in count} == {56, 47, 27}
    model = kw.create_model("kw1x_resnet18_no_start", num_classes=2)
    kw.set_temperature(model, 1.0)
    assert kw.get_temperature(model) == 0


def test_the_listing_puts_counts_and_accuracies_beside_the_papers(capsys):
    assert main(["zoo", "--ablations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "kw1x_resnet18_share_in_layer" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "kw1x_resnet18_share_in_layer",
        "Within each layer",
        "11,805,134",
        "11.81M",
        "74.34",
        "+3.90",
    ]


def test_ablations_can_be_planned_by_name(capsys):
    assert main(["plan", "kw1x_resnet18_no_sharing"]) == 0
    assert "11,783,114" in capsys.readouterr().out


def test_compared_networks_are_listed_with_the_zoo(capsys):
    assert main(["zoo"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "condconv8x_resnet18" in line)
    assert "81,353,120" in row
    assert "81.35M" in row

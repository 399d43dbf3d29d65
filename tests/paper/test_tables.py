import json
from fractions import Fraction
from importlib import resources

import pytest

from kernelwarehouse import paper
from kernelwarehouse.errors import KernelWarehouseError

ROWS_PER_TABLE = {
    "table:ablation_function": 5,
    "table:ablation_initialization": 8,
    "table:ablation_partition": 3,
    "table:ablation_sharingscale": 4,
    "table:ablation_sharingshape": 3,
    "table:ablation_speed": 12,
    "table:ablation_temperature": 3,
    "table:attention_function": 9,
    "table:classification_cnn_300epoch": 17,
    "table:classification_mobilenetv2": 12,
    "table:classification_resnet_100epoch": 14,
    "table:detection": 13,
    "table:m_and_n": 16,
    "table:memory": 12,
    "table:odconv_kernelwarehouse": 4,
    "table:stage": 16,
    "table:transformer": 6,
}


def test_all_tables_are_there_and_every_row_names_its_table():
    found = {}
    for file in resources.files("kernelwarehouse.paper").iterdir():
        if file.name.endswith(".json"):
            table = json.loads(file.read_text(encoding="utf-8"))
            assert table["label"] == f"table:{file.name.removesuffix('.json')}"
            assert {row["table"] for row in table["rows"]} == {table["label"]}
            found[table["label"]] = len(table["rows"])
    assert found == ROWS_PER_TABLE
    assert paper.table_labels() == sorted(ROWS_PER_TABLE)


@pytest.mark.parametrize("metric", ["top1", "top5"])
def test_printed_gains_are_the_difference_to_the_backbone_of_the_table(metric):
    checked = 0
    for label in {row.table for row in paper.results()}:
        rows = paper.results(label)
        backbones = {row.backbone: row.metrics.get(metric) for row in rows if row.method is None}
        for row in rows:
            if f"{metric}_gain" in row.metrics:
                gain = row.metrics[metric] - backbones[row.backbone]
                assert gain == pytest.approx(row.metrics[f"{metric}_gain"], abs=0.0051), row
                checked += 1
    assert checked == {"top1": 82, "top5": 72}[metric]


def test_one_model_has_one_parameter_count_throughout():
    counts = {}
    for row in paper.results():
        if "params_millions" in row.metrics and row.setting is None:
            counts.setdefault((row.backbone, row.method, row.budget), set()).add(row.metrics["params_millions"])
    assert all(len(values) == 1 for values in counts.values())
    assert counts["ResNet18", "KW", Fraction(1, 2)] == {7.43}


def test_numbers_that_the_text_of_the_paper_repeats():
    by_model = {(r.backbone, r.method, r.budget): r.metrics for r in paper.results("table:classification_cnn_300epoch")}
    smaller = 1 - by_model["ResNet50", "KW", Fraction(1, 2)]["params_millions"] / 25.56
    assert round(100 * smaller, 2) == 30.99
    quarter = 1 - by_model["ResNet18", "KW", Fraction(1, 4)]["params_millions"] / 11.69
    assert round(100 * quarter, 2) == 65.10
    best, dyconv = by_model["ResNet50", "KW", Fraction(4)], by_model["ResNet50", "DY-Conv", Fraction(4)]
    assert round(best["top1"] - dyconv["top1"], 2) == 2.05


def test_detection_rows_have_box_and_mask_metrics():
    rows = paper.results("table:detection")
    assert all(len(row.metrics) == 12 and row.detector == "Mask R-CNN" for row in rows)
    best = next(row for row in rows if (row.backbone, row.method, row.budget) == ("ConvNeXt-Tiny", "KW", Fraction(1)))
    assert (best.metrics["box_ap"], best.metrics["mask_ap_large"]) == (44.8, 54.8)


def test_cells_follow_from_mixtures_and_budget():
    for row in paper.cell_counts():
        assert len(row.m) == len(row.n)
        mixed = row.budget == Fraction(3, 4) or (row.budget == Fraction(1, 2) and "Mobile" in row.backbone)
        budgets = (1, Fraction(1, 2)) if mixed else (row.budget,)
        assert all(n in [m * b for b in budgets] for m, n in zip(row.m, row.n, strict=True)), row


def test_reassigned_cells_are_the_common_divisors_of_their_stage():
    layers = paper.stage_layers()
    assert len(layers) == 16
    for stage in (1, 2, 3, 4):
        members = [layer for layer in layers if layer.reassigned_stage == stage]
        assert {layer.reassigned_cell for layer in members} == {(1, 1, *(min(x.kernel[2] for x in members),) * 2)}


def test_unknown_table_is_named_with_what_there_is():
    with pytest.raises(KernelWarehouseError, match=r"'table:nonsense'.*table:detection"):
        paper.results("table:nonsense")

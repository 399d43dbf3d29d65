import csv
import io
import json

import pytest

from kernelwarehouse.compare.measure import Cost, Setting, Times
from kernelwarehouse.compare.plot import check_plot, plot
from kernelwarehouse.compare.table import as_csv, as_json, as_markdown, as_text, make_rows
from kernelwarehouse.errors import MeasurementError

SETTING = Setting(rounds=3)
COSTS = [
    Cost("resnet50", "resnet50", 25_557_032, 4_000_000_000, Times(0.1, 1.0, 3.0), Times(1, 1, 1), 1 << 30),
    Cost("kw1x_resnet50", "resnet50", 28_052_310, 5_000_000_000, Times(0.2, 1.5, 6.0), Times(2, 1.5, 2), 1 << 30),
    Cost("od4x_resnet50", "resnet50", 90_670_888, 4_400_000_000, Times(0.3, 2.0, 9.0), Times(3, 2, 3), 3 << 30),
]


def test_rows_relate_costs_to_the_backbone_and_to_the_paper():
    static, warehouse, odconv = make_rows(COSTS)
    assert (static.parameters_ratio, static.macs_ratio, static.memory_ratio, static.paper_fps_ratio) == (1, 1, 1, 1)
    assert (warehouse.macs_ratio, warehouse.batch_ratio, warehouse.batch_ms) == (1.25, 1.5, 1500)
    assert warehouse.paper_fps_ratio == pytest.approx(265.4 / 647.0)
    assert warehouse.paper_top1 == {"300 epochs": 80.38}
    assert (odconv.memory_mb, odconv.memory_ratio) == (3072, 3)
    assert odconv.paper_memory_ratio == pytest.approx(31892 / 11084)


def test_a_network_that_the_paper_does_not_have():
    costs = [Cost("resnet34", "resnet34", 21_797_672, 10, Times(1, 1, 1), Times(1, 1, 1), None)]
    rows = make_rows(costs)
    assert (rows[0].paper_params_millions, rows[0].paper_top1, rows[0].memory_ratio) == (None, {}, None)
    assert "| resnet34 | 21.80 | - |" in as_markdown(rows, SETTING)


def test_markdown_and_text_show_the_same_cells():
    rows = make_rows(COSTS)
    markdown = as_markdown(rows, SETTING).splitlines()
    assert markdown[0].startswith("| network | params (M) | paper (M) | MACs (G) |")
    expected = [
        "kw1x_resnet50",
        "28.05",
        "28.05",
        "5.00",
        "1.25",
        "2.00",
        "1.50",
        "2.00",
        "1.00",
        "80.38",
        "0.41",
        "2.10",
    ]
    assert [cell.strip() for cell in markdown[3].strip("|").split("|")] == expected
    line = next(line for line in as_text(rows, SETTING, 160).splitlines() if "kw1x" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == expected


def test_the_legend_says_what_was_prepared():
    rows = make_rows(COSTS)
    assert "prepare_inference" in as_markdown(rows, Setting(prepare=True))
    assert "prepare_inference" not in as_markdown(rows, Setting())


def test_csv_and_json_read_back():
    rows = make_rows(COSTS)
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["name"] for row in read] == [cost.name for cost in COSTS]
    assert float(read[2]["paper_top1_300_epochs"]) == 80.62
    content = json.loads(as_json(rows, SETTING))
    assert content["setting"]["rounds"] == 3
    assert content["networks"][1]["training_ratio"] == 2
    assert "torch" in content["machine"]


def test_plot_is_a_picture(tmp_path):
    path = tmp_path / "costs.png"
    plot(make_rows(COSTS), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_that_cannot_be_written(tmp_path):
    with pytest.raises(MeasurementError, match=r"missing/costs.png cannot be written"):
        check_plot(tmp_path / "missing" / "costs.png")
    with pytest.raises(MeasurementError, match=r"costs.nonsense has no known format.*png"):
        check_plot(tmp_path / "costs.nonsense")
    with pytest.raises(MeasurementError, match=r"missing/costs.png cannot be written"):
        plot(make_rows(COSTS), tmp_path / "missing" / "costs.png")

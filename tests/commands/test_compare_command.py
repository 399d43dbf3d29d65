import argparse
import json

import pytest

from kernelwarehouse.commands.comparing import add_parser, networks
from kernelwarehouse.errors import MeasurementError, UnknownPresetError


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    chosen = parser.parse_args(["compare", *arguments])
    return chosen.run(chosen)


def test_every_network_comes_after_its_static_backbone():
    assert networks(["dy4x_resnet18", "kw1x_mobilenetv2_050", "resnet18", "kw1x_resnet18"]) == [
        "resnet18",
        "dy4x_resnet18",
        "kw1x_resnet18",
        "mobilenetv2_050",
        "kw1x_mobilenetv2_050",
    ]


def test_all_networks_on_a_backbone():
    names = networks([], ["resnet18"])
    assert names[:2] == ["resnet18", "se_resnet18"]
    assert {"condconv8x_resnet18", "kw4x_resnet18"} <= set(names)
    assert len(names) == len(set(names)) == 15


def test_nothing_to_compare():
    with pytest.raises(UnknownPresetError, match="nothing to compare"):
        networks([])
    with pytest.raises(UnknownPresetError, match=r"'vgg16'.*resnet18"):
        networks([], ["vgg16"])


def test_files_are_checked_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(MeasurementError, match="cannot be written"):
        run("kw4x_resnet50", "--output", str(tmp_path / "missing" / "costs.txt"))
    with pytest.raises(MeasurementError, match="no known form"):
        run("kw4x_resnet50", "--output", str(tmp_path / "costs.xls"))
    with pytest.raises(MeasurementError, match="no known format"):
        run("kw4x_resnet50", "--plot", str(tmp_path / "costs.doc"))
    assert "measuring" not in capsys.readouterr().err


def test_the_whole_command(tmp_path, capsys):
    table, markdown, picture = (tmp_path / f"costs.{suffix}" for suffix in ("json", "md", "png"))
    arguments = ["--quick", "--prepare", "--rounds", "1", "--image-size", "32", "--batch-size", "2", "--format", "csv"]
    status = run(
        "kw1x_mobilenetv2_050", *arguments, "--output", str(table), "--output", str(markdown), "--plot", str(picture)
    )
    assert status == 0
    content = json.loads(table.read_text())
    assert [network["name"] for network in content["networks"]] == ["mobilenetv2_050", "kw1x_mobilenetv2_050"]
    assert content["setting"]["prepare"]
    static, warehouse = content["networks"]
    assert static["training_ratio"] == 1
    assert warehouse["parameters"] == 2_854_522
    assert warehouse["macs_ratio"] > 1
    assert warehouse["paper_top1"] == {"150 epochs": 68.29}
    # Weights, gradients and momentum must fit at the least; two images of 32x32 are small beside them.
    assert 3 * 4 * warehouse["parameters"] < warehouse["memory_mb"] * 2**20 < 1 << 30
    assert min(warehouse[f"{what}_ratio"] for what in ("single", "batch", "training", "memory")) > 0
    assert picture.stat().st_size > 1000
    captured = capsys.readouterr()
    assert captured.out.startswith("name,backbone,parameters,")
    assert markdown.read_text().count("\n| ") == 2
    assert "measuring kw1x_mobilenetv2_050 (2 of 2)" in captured.err

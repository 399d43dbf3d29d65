"""The report of a real run, and the attention maps in it."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from browser import open_page
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.data import ArrayImages, DataSet, open_dataset
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.report.attention_maps import attention_maps
from kernelwarehouse.report.run import write_run_report
from kernelwarehouse.training.api import train
from kernelwarehouse.training.recipe import load_recipe
from kernelwarehouse.training.run import RunOptions

SMALL = {"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}


def test_report_of_a_run_in_a_browser(tmp_path: Path) -> None:
    whole = open_dataset("embedded")
    parts = [ArrayImages(s.pixels[:n], s.labels[:n], "part") for s, n in ((whole.train, 64), (whole.validation, 30))]
    recipe = load_recipe("small").with_overrides({"epochs": 2, "batch_size": 32, "tau_epochs": 0.5})
    options = RunOptions(workers=0, report_every=1)
    data = DataSet("part", whole.classes, *parts)
    folder = train("kw1x_resnet18", data, recipe, tmp_path / "run", options=options, arguments=SMALL)
    opened = open_page(write_run_report(folder, data), tmp_path / "profile")
    layers = sum(isinstance(module, WarehouseLayer) for module in kw.load(folder.path / "last").modules())
    assert opened.console == []
    assert opened.document.count("<polyline") == 6
    assert opened.document.count('alt="image of class') == 12
    assert opened.document.count('alt="attention map of') == layers == 12
    assert "<span>kw1x_resnet18 0</span>" in opened.document


def test_run_that_went_astray_has_a_report(tmp_path: Path) -> None:
    """Curves leave out what is not finite, and names that no encoding knows are escaped."""
    whole = open_dataset("embedded")
    parts = [ArrayImages(s.pixels[:n], s.labels[:n], "part") for s, n in ((whole.train, 64), (whole.validation, 30))]
    recipe = load_recipe("small").with_overrides({"epochs": 1, "batch_size": 32})
    data = DataSet("part", ("class \udcff", *whole.classes[1:]), *parts)
    folder = train("resnet18", data, recipe, tmp_path / "run", options=RunOptions(workers=0), arguments=SMALL)
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    astray = [line | {"loss": float("nan")} for line in lines]
    folder.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in astray))
    page = write_run_report(folder, data).read_text(encoding="utf-8")
    assert "Validation accuracy" in page
    assert '"Validation loss"' not in page
    assert "class \\udcff" in page


def test_maps_show_the_attention_that_the_layers_use() -> None:
    torch.manual_seed(0)
    network = timm.create_model("kw1x_resnet18", num_classes=3, **SMALL)
    images = torch.randn(5, 3, 32, 32)
    maps = {found.layer: found for found in attention_maps(network, images)}
    assert maps.keys() == {name for name, module in network.named_modules() if isinstance(module, WarehouseLayer)}
    assert network.training
    # At temperature 1 every mixture is its own cell, whatever the image.
    first = maps["layer1.0.conv1"]
    assert first.spread == 0
    np.testing.assert_array_equal(first.mean, np.eye(*first.mean.shape))

    kw.set_temperature(network, 0.0)
    learned = {found.layer: found for found in attention_maps(network, images)}["layer1.0.conv1"]
    network.eval()
    with torch.no_grad():
        pooled = network.maxpool(network.act1(network.bn1(network.conv1(images)))).mean((2, 3))
        expected = network.layer1[0].conv1.attention(pooled)
    np.testing.assert_allclose(learned.mean, expected.mean(0).numpy(), atol=1e-6)
    assert learned.spread == pytest.approx(float(expected.std(0, correction=0).mean()), rel=1e-4)


def test_static_network_has_no_maps() -> None:
    assert attention_maps(timm.create_model("resnet18", num_classes=3, **SMALL), torch.randn(2, 3, 32, 32)) == []


def test_converted_classifiers_have_maps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
    config = kw.WarehouseConfig(static_stem=False, static_classifier=False)
    maps = attention_maps(kw.convert(model, kw.plan(model, config)), torch.randn(2, 3, 8, 8))
    assert [found.layer for found in maps] == ["0", "3"]

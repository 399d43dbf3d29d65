"""The studies that come with the project: they can be run, quote the paper rightly, and their pages are in step."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from matplotlib.image import imread

from kernelwarehouse import paper
from kernelwarehouse.cli import main
from kernelwarehouse.study.jobs import by_key
from kernelwarehouse.study.results import read_results
from kernelwarehouse.study.spec import load_study
from kernelwarehouse.study.table import as_markdown, make_rows, placed

ROOT = Path(__file__).parents[2]
PATH = ROOT / "studies" / "cifar10.toml"
STUDY = load_study(PATH)
ALL = [(path.stem, method) for path in sorted(PATH.parent.glob("*.toml")) for method in load_study(path).methods]


def count(model: str, arguments: Any) -> int:
    with torch.device("meta"):
        network = timm.create_model(model, num_classes=10, **arguments)
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("method", [pytest.param(method, id=f"{study}: {method.name}") for study, method in ALL])
def test_every_method_can_be_built(method: Any) -> None:
    assert count(method.model, method.model_args) > 50_000


def test_the_wider_network_has_the_parameters_of_the_twin() -> None:
    wider, twin = STUDY.method("static, wider"), STUDY.method("KW 1x, temperature")
    counts = [count(method.model, method.model_args) for method in (wider, twin)]
    assert counts == [356_186, 357_588]


def test_figures_of_the_paper_are_the_printed_ones() -> None:
    assert STUDY.paper_note == "ResNet18 on ImageNet, 300 epochs"
    printed = {
        (row.method, row.budget): row.metrics["top1"]
        for row in paper.results("table:classification_cnn_300epoch")
        if row.backbone == "ResNet18"
    }
    ablations = {
        row.setting: row.metrics["top1"]
        for table in ("function", "sharingscale", "partition")
        for row in paper.results(f"table:ablation_{table}")
        if row.backbone == "ResNet18"
    }
    assert {method.name: method.paper for method in STUDY.methods if method.paper is not None} == {
        "static": printed[None, None],
        "KW 1x, temperature": printed["KW", Fraction(1)],
        "KW 1/2x": printed["KW", Fraction(1, 2)],
        "KW 4x": printed["KW", Fraction(4)],
        "DY-Conv 4x": printed["DY-Conv", Fraction(4)],
        "ODConv 4x": printed["ODConv", Fraction(4)],
        "KW 1x, softmax": ablations["Softmax"],
        "KW 1x, sigmoid": ablations["Sigmoid"],
        "KW 1x, max(z, 0)": ablations["max(z_ij, 0) / sum_p |z_ip|"],
        "KW 1x, layer sharing": ablations["Within each layer"],
        "KW 1x, no sharing": ablations["Without sharing"],
        "KW 1x, no partition": ablations["without kernel partition"],
    }


@pytest.mark.parametrize(
    ("study", "page"),
    [("cifar10", "study"), ("rates", "training"), ("rates_more", "training"), ("rates_adamw", "training")],
)
def test_the_page_shows_the_results_there_are(study: str, page: str) -> None:
    """`kernelwarehouse study table studies/cifar10.toml --markdown docs/study.md` puts them there."""
    path = PATH.with_stem(study)
    results = path.with_suffix(".jsonl")
    found = by_key(read_results(results)) if results.exists() else {}
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert placed(text, as_markdown(load_study(path), make_rows(load_study(path), found)), study) == text


@pytest.mark.parametrize(("study", "picture"), [("cifar10", "study.png"), ("rates", "images/rates.png")])
def test_the_picture_shows_the_results_there_are(study: str, picture: str, tmp_path: Path) -> None:
    """`kernelwarehouse study table studies/cifar10.toml --plot docs/study.png` draws it."""
    assert main(["study", "table", str(PATH.with_stem(study)), "--plot", str(tmp_path / "drawn.png")]) == 0
    drawn, kept = imread(tmp_path / "drawn.png"), imread(ROOT / "docs" / picture)
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 2e-4  # other processors may round a shade differently

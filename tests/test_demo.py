"""The demonstration, from its first step to its table, on a few dozen images."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

import kernelwarehouse as kw
from kernelwarehouse import demo
from kernelwarehouse.data import ArrayImages, DataSet, open_dataset
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.study.jobs import best_setting, by_key
from kernelwarehouse.study.results import read_results
from kernelwarehouse.study.spec import load_study
from kernelwarehouse.training.run import RunOptions
from kernelwarehouse.training.run_folder import RunFolder

# A static network and its upgrade are the same function; what is left is rounding in float32.
ROUNDING = 1e-4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """The demonstration's images, but few of them, for one epoch each time."""
    whole = open_dataset("embedded")

    def first(images: ArrayImages, count: int) -> ArrayImages:
        return ArrayImages(images.pixels[:count], images.labels[:count], images.origin)

    data = replace(whole, train=first(whole.train, 64), validation=first(whole.validation, 60))
    for name in ("FIRST", "MORE_STATIC", "MORE_UPGRADED"):
        monkeypatch.setattr(demo, name, getattr(demo, name) | {"epochs": 1, "learning_rate": 0.1})
    monkeypatch.setattr(demo, "LENGTHS", demo.LENGTHS | {"batch_size": 32})
    monkeypatch.setattr(demo, "RunOptions", partial(RunOptions, workers=0))
    monkeypatch.setattr(demo, "open_dataset", lambda _: data)
    return data


def printed(seeds: list[demo.Seed]) -> dict[str, list[str]]:
    """The table's cells by the name of their row."""
    table = demo.result_table(seeds)
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return {str(name): [str(cell) for cell in cells] for name, *cells in rows}


def test_it_upgrades_what_it_trained_and_tells_what_came_of_it(
    small: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path), "--seeds", "2"])
    assert demo.main() == 0
    told = capsys.readouterr().out
    differences = re.findall(r"they\s+differ\s+by\s+([\d.e+-]+\d)", told)
    assert len(differences) == 2
    assert all(float(difference) < ROUNDING for difference in differences)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    upgraded = kw.load(tmp_path / "seed0" / "upgraded" / "last")
    converted = [name for name, module in upgraded.named_modules() if isinstance(module, WarehouseLayer)]
    assert re.findall(r"Attention maps of ([\w-]+)", page) == ["upgraded"]
    shown = re.findall(r'src="data:image/png;base64,[^"]{100,}"[^>]* alt="attention map of ([^"]+)"', page)
    assert sorted(shown) == sorted(converted) != []
    assert "Sample predictions of static-goes-on" in page

    # The same again finds everything done, and so has the same figures.
    seeds = [demo.run_seed(seed, small, tmp_path / f"seed{seed}") for seed in range(2)]
    assert demo.upgrade_difference(RunFolder(tmp_path / "seed0" / "static"), small, 0) < ROUNDING
    for seed in seeds:
        assert [len(run.epochs) for run in (seed.first, seed.more, seed.upgraded)] == [1, 1, 1]
        assert seed.first.parameters == seed.more.parameters < seed.upgraded.parameters

    rows = printed(seeds)
    assert rows["parameters"] == [f"{run.parameters:,}" for run in (seeds[0].first, seeds[0].more, seeds[0].upgraded)]
    accuracies = [[run.epochs[-1]["top1"] for run in (seed.first, seed.more, seed.upgraded)] for seed in seeds]
    for cell, values in zip(rows["top-1 after the last epoch"], zip(*accuracies, strict=True), strict=True):
        assert cell.startswith(f"{fmean(values):.2%} ± ")
        assert cell in re.sub(r"\s+", " ", told)
    gains = [f"{100 * (upgraded - more):+.2f}" for _, more, upgraded in accuracies]
    assert rows["upgraded - static, in points"] == ["", "", ", ".join(gains)]


def test_one_seed_has_no_spread(small: DataSet, tmp_path: Path) -> None:
    rows = printed([demo.run_seed(3, small, tmp_path)])
    assert all(re.fullmatch(r"\d+\.\d\d%", cell) for cell in rows["top-1 after the last epoch"])


def test_no_seed_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--seeds", "0"])
    with pytest.raises(SystemExit):
        demo.main()
    assert "--seeds (=0) must be at least 1" in capsys.readouterr().err


def test_rates_are_the_best_of_their_study() -> None:
    studies = Path(__file__).parents[1] / "studies"
    study, found = load_study(studies / "demo.toml"), by_key(read_results(studies / "demo.jsonl"))
    for name, settings in (
        ("static", demo.FIRST),
        ("static, going on", demo.MORE_STATIC),
        ("upgraded", demo.MORE_UPGRADED),
    ):
        assert best_setting(study, study.method(name), found)[0] == settings["learning_rate"]

"""What is installed with what."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

import kernelwarehouse as kw
from kernelwarehouse import _extras
from kernelwarehouse.compare.plot import check_plot
from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import MissingExtraError
from kernelwarehouse.report.page import Page, Table, render
from kernelwarehouse.training.api import train
from kernelwarehouse.training.recipe import load_recipe

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE_OF = {"PIL": "pillow"}


def test_the_table_is_that_of_the_package() -> None:
    for extra, modules in _extras.EXTRAS.items():
        assert sorted(PACKAGE_OF.get(module, module) for module in modules) == PROJECT["optional-dependencies"][extra]


def test_version_is_the_installed_one() -> None:
    assert "version" in PROJECT["dynamic"]
    citation = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {kw.__version__}\n" in citation
    assert f"## [{kw.__version__}]" in changes


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing optional is installed."""
    optional = {module for modules in _extras.EXTRAS.values() for module in modules}
    found = importlib.util.find_spec
    monkeypatch.setattr(_extras, "find_spec", lambda name: None if name in optional else found(name))


@pytest.mark.usefixtures("bare")
def test_missing_extras_are_errors_that_say_how_to_install_them(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"a plot needs matplotlib.*pip install 'kernelwarehouse\[compare\]'"):
        check_plot(tmp_path / "plot.png")
    with pytest.raises(MissingExtraError, match=r"training needs .*tensorboard.*'kernelwarehouse\[train\]'"):
        train("resnet18", open_dataset("embedded"), load_recipe("small"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    nothing = Table([], [])
    with pytest.raises(MissingExtraError, match=r"jinja2.*pip install 'kernelwarehouse\[train\]'"):
        render(Page("", "", nothing, [], [], nothing))

"""What is installed with what."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kernelwarehouse as kw
from kernelwarehouse import _extras
from kernelwarehouse.cli import main
from kernelwarehouse.compare.plot import check_plot
from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import MissingExtraError
from kernelwarehouse.report.page import Page, Table, render
from kernelwarehouse.training.api import train
from kernelwarehouse.training.recipe import load_recipe

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE_OF = {"PIL": "pillow", "faster_coco_eval": "faster-coco-eval"}


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


WITHOUT_EXTRAS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("faster_coco_eval", "jinja2", "matplotlib", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import timm, torch
import kernelwarehouse as kw
from kernelwarehouse.cli import main

static = timm.create_model("test_resnet", num_classes=3)
converted = kw.convert(static, kw.plan(static))
converted(torch.ones(2, 3, 32, 32)).sum().backward()
converted.eval()
kw.save(converted, "saved")
kw.prepare_inference(kw.load("saved"))
kw.explain(converted, torch.ones(1, 3, 32, 32))
assert timm.create_model("kw1x_small_resnet", num_classes=3)
assert main(["plan", "test_resnet"]) == main(["zoo"]) == 0
"""


def test_layers_conversion_and_zoo_do_without_extras(tmp_path: Path) -> None:
    """In a process that really cannot import them."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("bare")
def test_training_asks_for_its_extra_before_it_opens_or_fetches_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "resnet18", "--data", "missing.npz", "--recipe", "small", "--output", str(tmp_path / "run")]
    assert main(command) == 2
    assert "pip install 'kernelwarehouse[train]'" in capsys.readouterr().err


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

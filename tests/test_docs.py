"""The documentation tells the truth: its code runs, prints what it says, and its links lead somewhere."""

import contextlib
import doctest
import inspect
import io
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from scripts.api_reference import page, public_objects

import kernelwarehouse
from reference import fill, read_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = [ROOT / "README.md", ROOT / "docs" / "api.md"]
PUBLISHED = "kw1x_resnet18"
MADE_BY_US = ("Plan", "Preparation")  # users are given these and do not make them


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block of Python; `line` is that of its first line in the page."""

    line: int
    code: str

    @property
    def printed(self) -> list[str]:
        """What the block says that it prints: comments that begin with `#> `."""
        return [line.removeprefix("#>").strip() for line in self.code.splitlines() if line.startswith("#>")]


def python_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield Block(text.count("\n", 0, match.start(1)) + 1, match[1])


@pytest.fixture
def published_checkpoint(tmp_path: Path) -> None:
    """A file with the names and shapes of the authors' release, which the pages load by its name."""
    keys = read_json("published_models.json")[PUBLISHED]["keys"]
    torch.save({"model": {key: fill(key, tuple(shape)) for key, shape in keys.items()}}, tmp_path / f"{PUBLISHED}.pth")


@pytest.mark.usefixtures("published_checkpoint")
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_code_runs_and_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(python_blocks(page))
    assert blocks
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks:
        # Empty lines in front make the line numbers of a traceback those of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        if block.printed:
            assert [line.strip() for line in out.getvalue().splitlines()] == block.printed, f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    files = [link.split("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    missing = [file for file in files if not (page.parent / file).exists()]
    assert not missing


# What the documentation of the first version told people to import.
OLD_PATHS = {
    "kernelwarehouse.layers": ("Conv1d", "Conv2d", "Conv3d", "Linear"),
    "kernelwarehouse.assemble": ("force",),
    "kernelwarehouse.zoo": ("PRESETS",),
    "kernelwarehouse.paper": ("results", "table_labels"),
    "kernelwarehouse.peers": ("dyconv", "odconv", "se"),
    "kernelwarehouse.demo": ("main",),
    "kernelwarehouse": ("plan", "convert", "explain", "load", "save", "create_model", "load_published", "plan_of"),
}


def test_paths_that_the_documentation_named_stay() -> None:
    for module, names in OLD_PATHS.items():
        assert all(hasattr(import_module(module), name) for name in names), module
    for name in ("plan", "convert", "explain"):  # once modules too
        assert inspect.isfunction(getattr(kernelwarehouse, name))
    assert kernelwarehouse.assemble.force is kernelwarehouse.force


def test_all_kinds_of_errors_are_public() -> None:
    kinds = {name for name, value in vars(kernelwarehouse.errors).items() if _is_error(value)}
    assert kinds <= set(kernelwarehouse.__all__)


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in kernelwarehouse.__all__ if f"`{name}" not in text and f"`kw.{name}" not in text]
    assert not missing


def public_functions_and_classes() -> dict[str, Any]:
    return {name: value for name, value in public_objects().items() if not _is_error(value)}


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


@pytest.mark.parametrize("name", public_functions_and_classes())
def test_docstrings_speak_of_every_argument_and_of_errors(name: str) -> None:
    value = public_functions_and_classes()[name]
    text = inspect.getdoc(value) or ""
    arguments = [
        parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if name not in MADE_BY_US:
        assert not [argument for argument in arguments if not re.search(rf"`?\b{argument}\b", text)]
        assert "Raises:" in text or name == "plan_of"  # which accepts whatever it is given
    mentioned = re.findall(r"^ {4}(\w+(?:Error|Warning)): ", text, re.MULTILINE)
    assert set(mentioned) <= set(kernelwarehouse.__all__)


@pytest.mark.parametrize("name", public_functions_and_classes())
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(recurse=False).find(public_functions_and_classes()[name], name, globs={})
    runner = doctest.DocTestRunner(verbose=False)
    for example in found:
        runner.run(example)
    assert runner.failures == 0


def test_reference_page_is_made_of_the_docstrings() -> None:
    """`make docs` writes it anew."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == page()


def test_method_picture_is_what_the_script_draws(tmp_path: Path) -> None:
    """A change of the method, or of the drawing, must reach the picture in the documentation (`make docs`)."""
    runpy.run_path(str(ROOT / "scripts" / "draw_method.py"))["draw"](tmp_path / "method.png")
    drawn, kept = imread(tmp_path / "method.png"), imread(ROOT / "docs" / "method.png")
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 5e-4  # other processors may round a shade differently

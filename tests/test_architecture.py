"""The house: which room may know which."""

import graphlib
import subprocess
import sys

from scripts.import_graph import ENTRANCES, PACKAGE, PICTURE, edges, floors, imported_modules, reachable, rooms

import kernelwarehouse as kw

AROUND = {"commands", "compare", "data", "report", "training"}
"""Rooms around the method, which layers, conversion and zoo must do without."""
METHOD = (
    "attention",
    "attention_functions",
    "assignment",
    "config",
    "conversion",
    "layers",
    "partition",
    "temperature",
    "warehouse",
)


def test_rooms_import_each_other_one_way_only() -> None:
    try:
        floors(rooms())
    except graphlib.CycleError as error:
        raise AssertionError(f"rooms import each other in a circle: {' -> '.join(error.args[1])}") from None


def test_a_circle_would_be_seen() -> None:
    graph = {"layers": {"planning"}, "planning": {"spec"}, "spec": {"layers"}}
    try:
        floors(graph)
    except graphlib.CycleError:
        return
    raise AssertionError("a circle went unnoticed")


def test_importing_the_library_leaves_training_reports_and_comparison_alone() -> None:
    assert not reachable(rooms(), "__init__") & AROUND


def test_the_method_stands_on_its_own() -> None:
    graph = rooms()
    for room in METHOD:
        assert not reachable(graph, room) & (AROUND | {"zoo", "peers", "saving", "paper"}), room


def test_entrances_are_imported_by_nobody() -> None:
    targets = {target for room, found in rooms().items() if room not in ENTRANCES for target in found}
    assert not targets & set(ENTRANCES)


def test_no_module_hides_behind_a_public_name() -> None:
    assert not set(rooms()) & set(kw.__all__)


def test_writing_files_has_one_place() -> None:
    """`os.replace` is what every careful writer ends with; only one room may."""
    writers = [path.name for path in PACKAGE.rglob("*.py") if "os.replace(" in path.read_text(encoding="utf-8")]
    assert writers == ["_files.py"]


def test_the_core_brings_in_no_extra() -> None:
    """What the extras install is not needed, and not even looked for, by `import kernelwarehouse`."""
    code = "import sys, kernelwarehouse; print(*{'jinja2', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # jinja2 may come with torch itself, which uses it for its compiler.
    assert set(found.stdout.split()) <= {"jinja2"}


def test_the_picture_shows_the_imports_there_are() -> None:
    """`make docs` draws it anew."""
    assert edges() in PICTURE.read_text(encoding="utf-8")


def test_imports_inside_functions_are_seen() -> None:
    assert "kernelwarehouse.planning.table.plan_table" in imported_modules(PACKAGE / "planning" / "plan.py")

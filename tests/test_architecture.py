"""The house: which room may know which."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
from scripts.import_graph import ENTRANCES, PACKAGE, PICTURE, ROOT, edges, floors, imported_modules, reachable, rooms

import kernelwarehouse as kw

AROUND = {"commands", "compare", "data", "detection", "report", "study", "training"}
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


WRITERS = {
    *("json.dump", "np.save", "os.rename", "os.replace", "torch.save"),
    *(f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "copytree", "move")),
}
WRITING_METHODS = {"rename", "save_file", "savefig", "savez", "savez_compressed", "write_bytes", "write_text"}

GIVE_NAMES = (
    "replacing",
    "new_folder",
    "written_aside",
)  # of `_files`, and of `compare.files`, which tells of failures


def unsafe_writes(source: str) -> list[str]:
    """Calls that write a file outside of a `with` block that gives a name for it."""
    return [ast.unparse(call) for call in calls_outside(ast.parse(source)) if writes(call)]


def calls_outside(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.With):
        given = " ".join(ast.unparse(item) for item in node.items)
        if any(f"{name}(" in given for name in GIVE_NAMES):
            return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from calls_outside(child)


def writes(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    name = called.rpartition(".")[2]
    if name == "open":
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        modes = [word.value for word in given if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return any(len(mode) <= 3 and set(mode) & set("wax+") for mode in modes)
    renames = name == "replace" and isinstance(call.func, ast.Attribute) and len(call.args) == 1 and not call.keywords
    return called in WRITERS or name in WRITING_METHODS or renames


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


def test_no_module_hides_behind_a_name_of_its_package() -> None:
    """What a package imports from its modules must leave these reachable: `package.module` is the module."""
    for path in sorted(PACKAGE.glob("*/*.py")):
        if path.stem != "__init__":
            package = import_module(f"kernelwarehouse.{path.parent.name}")
            import_module(f"{package.__name__}.{path.stem}")
            assert isinstance(getattr(package, path.stem), ModuleType), f"{path.parent.name}.{path.stem}"


def test_writing_files_has_one_place() -> None:
    """Whatever writes a file writes to a name that `_files` gave it. Only a log is appended to, in its place: of a line
    that was cut short, its reader knows. And what Linux is told under /proc is no file."""
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    found = {(path.relative_to(ROOT).as_posix(), call) for path in places for call in unsafe_writes(path.read_text())}
    assert {(path, call) for path, call in found if path != "src/kernelwarehouse/_files.py"} == {
        ("src/kernelwarehouse/training/metrics.py", "self._path.open('a', encoding='utf-8')"),
        ("src/kernelwarehouse/study/child.py", "session.write_text('19')"),
    }


@pytest.mark.parametrize(
    "call",
    [
        "open(path, 'w')",
        "path.open('wb')",
        "path.open(mode='x')",
        "path.write_text('')",
        "figure.savefig(path)",
        "np.savez(path, x=x)",
        "torch.save(x, path)",
        "json.dump(x, file)",
        "shutil.copy(one, other)",
        "os.replace(one, other)",
        "one.replace(other)",
    ],
)
def test_a_writer_would_be_seen(call: str) -> None:
    assert unsafe_writes(f"if True:\n    {call}") == [call]
    assert unsafe_writes(f"with replacing(path) as aside:\n    {call}") == []
    assert unsafe_writes("open(path); path.open('rb'); text.replace('a', 'b'); kw.save(model, folder)") == []


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

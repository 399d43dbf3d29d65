"""Which room of the package imports which: `python scripts/import_graph.py` draws docs/images/architecture.svg.

A room is a package directly below `kernelwarehouse`, or a module that lies open there. Imports inside functions and
those for type checking count like any other. `tests/test_architecture.py` holds what the picture shows: no cycles.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kernelwarehouse"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
ENTRANCES = ("__init__", "__main__", "cli", "demo")
"""What nothing else imports: they are the ways in."""
EVERYWHERE = ("_bfloat16", "_bfloat16_trial", "_extras", "_files", "_terminal", "_version", "errors")
WIDTH = 12

Graph = dict[str, set[str]]


def room_of(path: Path) -> str:
    """The room that a source file lies in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms() -> Graph:
    """Room -> the rooms that it imports."""
    graph: Graph = {room_of(path): set() for path in sorted(PACKAGE.rglob("*.py"))}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        for target in imported_modules(path):
            parts = target.split(".")
            if parts[0] == PACKAGE.name:
                found = parts[1] if len(parts) > 1 and parts[1] in graph else "__init__"
                graph[room] |= {found} - {room}
    return graph


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports; of `from a import b` both `a.b`, since b may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit(f"{path}:{node.lineno}: a relative import; the project writes whole names")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def reachable(graph: Graph, start: str) -> set[str]:
    """All rooms that an import of `start` may bring in."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        room = waiting.pop()
        waiting += graph[room] - found
        found |= graph[room]
    return found


def floors(graph: Graph) -> list[list[str]]:
    """Rooms by height: each imports only from floors below its own."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found.append(ready)
        sorter.done(*ready)
    return found


def without_shortcuts(graph: Graph) -> Graph:
    """Only the imports that no longer way goes around, which are what a picture can show."""
    return {
        room: {one for one in targets if not any(one in reachable(graph, other) for other in targets - {one})}
        for room, targets in graph.items()
    }


def edges() -> str:
    """All imports between rooms in one line, which the picture carries so that a test can see whether it is old."""
    return "; ".join(f"{room} imports {', '.join(sorted(targets))}" for room, targets in sorted(rooms().items()))


def places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Where each room is drawn: below all that import it, and near the middle of them."""
    importers: Graph = {room: {other for other, targets in graph.items() if room in targets} for room in graph}
    levels = floors(importers)
    found: dict[str, tuple[float, float]] = {}
    for depth, level in enumerate(levels):
        above = {room: [found[other][0] for other in importers[room]] or [WIDTH / 2] for room in level}
        ordered = sorted(level, key=lambda room: sum(above[room]) / len(above[room]))
        for index, room in enumerate(ordered):
            found[room] = ((index + 0.5) * WIDTH / len(level), float(len(levels) - depth))
    return found


def draw(path: Path) -> None:
    from matplotlib import pyplot as plt

    from kernelwarehouse._files import replacing

    plt.rcParams |= {"svg.hashsalt": "kernelwarehouse", "svg.fonttype": "none"}
    graph = {room: targets - set(EVERYWHERE) for room, targets in rooms().items() if room not in EVERYWHERE}
    at = places(graph)
    tallest = max(height for _, height in at.values())
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 * tallest))
    for room, targets in without_shortcuts(graph).items():
        for target in sorted(targets):
            (x, y), (to_x, to_y) = at[room], at[target]
            arrow = {"arrowstyle": "-|>", "color": "0.55", "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (to_x, to_y + 0.2), (x, y - 0.2), arrowprops=arrow)
    for room, (x, y) in at.items():
        package = (PACKAGE / room).is_dir()
        colour = "tab:orange" if room in ENTRANCES else "tab:blue" if package else "0.35"
        box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": colour, "lw": 1.4}
        axes.text(x, y, f"{room}/" if package else room, ha="center", va="center", fontsize=11, bbox=box)
    axes.text(WIDTH / 2, 0.1, f"not drawn, as any room may use them: {', '.join(EVERYWHERE)}", ha="center", fontsize=9)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, tallest + 0.5)
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"Date": None, "Description": edges()} if path.suffix == ".svg" else None
    with replacing(path) as aside:
        figure.savefig(aside, metadata=about, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)

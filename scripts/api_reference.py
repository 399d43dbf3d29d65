"""Writes docs/reference.md from the docstrings of the public names: `python scripts/api_reference.py`.

`tests/test_docs.py` holds that the page is up to date, and runs the examples in it.
"""

import ast
import inspect
import textwrap
from pathlib import Path

import kernelwarehouse as kw
from kernelwarehouse._files import write_file

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Reference

Every public name, from its docstring; [api.md](api.md) is the guide. `make docs` writes this page.
"""


def public_objects() -> dict[str, object]:
    """Functions and classes that `kernelwarehouse` offers, by name; functions first, then classes, then errors."""
    found = {name: getattr(kw, name) for name in kw.__all__ if not name.startswith("__")}
    return dict(sorted(found.items(), key=lambda item: (_kind(item[1]), item[0].lower())))


def _kind(value: object) -> int:
    if not inspect.isclass(value):
        return 0
    return 2 if issubclass(value, Exception) else 1


def methods(value: object) -> dict[str, object]:
    """The documented public methods and properties that a class has of its own."""
    if not inspect.isclass(value):
        return {}
    plain = {
        name: member.__func__ if isinstance(member, classmethod) else member for name, member in vars(value).items()
    }
    return {
        name: member
        for name, member in plain.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)) and member.__doc__
    }


def signature(name: str, value: object) -> str:
    """As it is written in the source, so that it does not depend on how a version of Python prints types."""
    if isinstance(value, property):
        return name
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))  # type: ignore[arg-type]
    node = tree.body[0]
    if isinstance(node, ast.ClassDef):
        initial = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if initial:
            return f"{name}({_arguments(initial[0])})"
        fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
        return f"{name}({', '.join(fields)})" if fields else name
    if not isinstance(node, ast.FunctionDef):
        raise SystemExit(f"{name} is neither a function nor a class")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{name}({_arguments(node)}){returns}"


def _arguments(node: ast.FunctionDef) -> str:
    text = ast.unparse(node.args)
    for first in ("self", "cls"):
        text = text.removeprefix(f"{first}, ") if text.startswith(f"{first}, ") else "" if text == first else text
    return text


def page() -> str:
    parts = [HEAD]
    for name, value in public_objects().items():
        parts.append(f"## `kw.{name}`\n\n{_entry(name, value)}")
        parts += [f"### `{name}.{inner}`\n\n{_entry(inner, member)}" for inner, member in methods(value).items()]
    return "\n".join(parts)


def _entry(name: str, value: object) -> str:
    lines = textwrap.wrap(signature(name, value), 110, subsequent_indent="    ", break_long_words=False)
    return "```\n" + "\n".join(lines) + "\n```\n\n" + _formatted(inspect.getdoc(value) or "") + "\n"


def _formatted(text: str) -> str:
    """Sections become bold words, their entries lists, and examples blocks of code."""
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        if line in ("Arguments:", "Raises:", "Returns:", "Example:"):
            section = line
            out += [f"**{line[:-1]}**", "", *(["```pycon"] if section == "Example:" else [])]
        elif section in ("Arguments:", "Raises:") and line.startswith("    ") and not line.startswith("      "):
            entry, _, rest = line.strip().partition(": ")
            out.append(f"- `{entry}`: {rest}")
        elif section in ("Arguments:", "Raises:") and line.strip():
            out.append(f"  {line.strip()}")
        elif section:
            out.append(line[4:])
        else:
            out.append(line)
    return "\n".join(out).rstrip() + ("\n```" if section == "Example:" else "")


if __name__ == "__main__":
    write_file(PAGE, page())

"""Shell-style patterns over layer names. A pattern that matches nothing is an error, not a surprise."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from kernelwarehouse.errors import PlanError


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern fits the name or a module that holds it: `layer4` fits `layer4.0.conv1`."""
    whole = name.split(":")[0]
    parts = whole.split(".")
    holders = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return fnmatchcase(name, pattern) or any(fnmatchcase(holder, pattern) for holder in holders)


class Patterns:
    """The names among `names` that any of the patterns fits; each pattern must fit at least one."""

    def __init__(self, patterns: Iterable[str], names: Sequence[str]) -> None:
        self.matches: set[str] = set()
        for pattern in patterns:
            found = {name for name in names if matches(pattern, name)}
            if not found:
                raise PlanError(no_match(pattern, names))
            self.matches |= found


def no_match(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = (
        f"; near it are {', '.join(near)}"
        if near
        else f"; layers are named like {', '.join(names[:3])}"
        if names
        else ""
    )
    return f"pattern {pattern!r} matches no layer{hint}"

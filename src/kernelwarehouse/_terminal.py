"""Where tables are printed."""

from rich.console import Console, RenderableType

WIDTH = 120
"""Wide enough for our tables, where there is no terminal that has a width."""


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or wide enough for our tables where there is none.

    Names of layers, classes and files are printed as they are: `[/red]` is a name like any other, not rich's markup.
    """
    found = Console(stderr=stderr, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = WIDTH
    return found


def printed(content: RenderableType) -> str:
    """What `console` would print, as plain text."""
    plain = Console(width=WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False)
    with plain.capture() as capture:
        plain.print(content)
    return capture.get().rstrip()

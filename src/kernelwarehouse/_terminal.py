"""Where tables are printed."""

from rich.console import Console, RenderableType

WIDTH = 120
"""Wide enough for our tables, where there is no terminal that has a width."""


def console() -> Console:
    """As wide as the terminal, or wide enough for our tables where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def printed(content: RenderableType) -> str:
    """What `console` would print, as plain text."""
    plain = Console(width=WIDTH, color_system=None, force_terminal=False)
    with plain.capture() as capture:
        plain.print(content)
    return capture.get().rstrip()

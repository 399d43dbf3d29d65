"""Where tables are printed."""

from rich.console import Console


def console() -> Console:
    """As wide as the terminal, or wide enough for our tables where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=120)

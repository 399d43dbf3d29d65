"""A real browser without a window."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Opened:
    """A page after its scripts ran: the document, and what they said on the console (errors go there too)."""

    document: str
    console: list[str]


def open_page(page: Path, profile: Path) -> Opened:
    browser = shutil.which("chromium")
    if browser is None:
        raise RuntimeError("chromium is not installed; 'make browser' sees to it")
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
    words = [browser, *options.split(), f"--user-data-dir={profile}", page.resolve().as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

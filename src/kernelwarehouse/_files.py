"""Files and folders that are whole or not there: written aside, synced, renamed. Every writer of the project is here.

A crash, a full disk or a kill leaves the old content or the new one, never half of it. At worst a hidden file with a
random name stays beside it. Files of lines that only grow are appended to, and the next line mends what was cut short.
What fails here is an `OSError`; callers say what it means to their user.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path`, with its suffix, to write a file to; it takes the place of `path` when the block ends well.

    The file gets the permissions that the process's umask gives to new files, whatever the writer chose.
    """
    path = Path(path)
    _refuse_other_than_files(path)
    aside = _beside(path)
    try:
        aside.open("xb").close()
        permissions = stat.S_IMODE(aside.stat().st_mode)
        yield aside
        aside.chmod(permissions)
        sync_file(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise the `OSError` that `replacing` would meet at its start, before work is spent on what it should hold."""
    path = Path(path)
    _refuse_other_than_files(path)
    aside = _beside(path)
    aside.open("xb").close()
    aside.unlink()


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file by this content in one step; text is written as UTF-8."""
    with replacing(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def append_line(path: str | os.PathLike[str], line: bytes, is_whole: Callable[[bytes], bool]) -> None:
    """Add a line to a file, and wait until it is on disk.

    What follows the end of the last line was cut short by a kill, and is taken away; unless `is_whole` finds that only
    its end is missing.
    """
    path = Path(path)
    _refuse_other_than_files(path)
    with path.open("ab+") as file:
        file.seek(0)
        rest = file.read().rpartition(b"\n")[2]
        if rest and is_whole(rest):
            line = b"\n" + line
        elif rest:
            file.truncate(file.tell() - len(rest))
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside `path`, to write files and folders into; it gets the name `path` when the block ends well.

    There may be nothing of that name but an empty folder: other folders cannot be replaced in one step.
    """
    path = Path(path)
    aside = _beside(path)
    aside.mkdir(parents=True)
    try:
        yield aside
        sync_tree(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, in one step where it is one already."""
    aside = _beside(link)
    try:
        aside.symlink_to(target)
        os.replace(aside, link)
        sync_folder(link.parent)
    finally:
        aside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{secrets.token_hex(4)}-{path.name}")


def _refuse_other_than_files(path: Path) -> None:
    """A device such as /dev/null would be renamed over like any file, and be gone for the whole machine."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, and a file is wanted", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, and a file is wanted", str(path))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder, and all that it holds, is on disk; links are not followed."""
    for parent, _, names in os.walk(folder, topdown=False):
        for file in (Path(parent, name) for name in names):
            if not file.is_symlink():
                sync_file(file)
        sync_folder(Path(parent))


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())

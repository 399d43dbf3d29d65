"""Where compiled kernels are kept: which library may be loaded, and how one is written.

A library is kept as `native-<fingerprint>-<sha256 of the file>.so`. As the checksum is in the name, both appear in one
rename: there is no moment at which a library stands beside a checksum that is missing or of another one. A file whose
content does not match its name (cut off, empty, altered) is never loaded; it is removed by the next build.

Loading a library runs its code, so neither the library nor its folder may belong to anybody but this user and root, or
be writable by everybody; nor may the folder lie in one where everybody can put another in its place. Writable by a
group is accepted: a umask of 002 gives that in the home of every user who has a group alone.

Whatever makes a folder unusable is raised as an `OSError`, so that the caller can take another one.
"""

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kernelwarehouse._files import replacing

_SCRATCH = "native-build-"
_PATIENCE = 10.0  # seconds to wait for another build without a word

_log = logging.getLogger("kernelwarehouse")


def usual_folder() -> Path:
    """Our folder where torch keeps compiled extensions. Links are followed here: what is checked is what is used."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(chosen or _caches() / "torch_extensions") / "kernelwarehouse").resolve()


def _caches() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home: {error}; set TORCH_EXTENSIONS_DIR") from error


def private_folder() -> Path:
    """A folder of this user alone among the temporary files, made where it is missing.

    Anybody can take the name before us, so only a real folder (no link) that is ours and closed to others will do.
    """
    folder = Path(tempfile.gettempdir()).resolve() / f"kernelwarehouse-{_user()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != _user() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone; remove it, or set TORCH_EXTENSIONS_DIR")
    return folder


def folder_for(name: str) -> Path:
    """Where a file that is written now and then is kept: in the usual folder, where that has it or can take it."""
    with suppress(OSError):
        folder = usual_folder()
        _make(folder)
        if (folder / name).exists() or os.access(folder, os.W_OK):
            return folder
    return private_folder()


def find(folder: Path, stem: str) -> Path | None:
    """The library `stem` in a folder where there is a whole one. A folder or library that cannot be trusted raises."""
    if not folder.exists():
        return None
    _check_folder(folder)
    for library in sorted(folder.glob(f"{stem}-*.so")):
        _check_library(library)
        if library.name == _name(stem, library):
            return library
    return None


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """One process at a time; the system ends the turn of one that is killed. The folder is made where it is missing."""
    _make(folder)
    lock = FileLock(folder / "build.lock")
    try:
        turn = lock.acquire(timeout=_PATIENCE)
    except Timeout:
        _log.warning("waiting for another process, which compiles kernels and holds %s", lock.lock_file)
        turn = lock.acquire(timeout=-1)
    with turn:
        yield


@contextmanager
def scratch(folder: Path, stem: str) -> Iterator[Path]:
    """A folder to compile in, during one's turn. Removes what killed builds and damage have left before."""
    # Nobody else is building, so nobody uses these. Libraries of other fingerprints stay: another torch may use them.
    for dead in [*folder.glob(f"{_SCRATCH}????????"), *folder.glob(".????????-native-*.so")]:
        if dead.is_dir() and not dead.is_symlink():
            shutil.rmtree(dead, ignore_errors=True)
        else:
            with suppress(OSError):
                dead.unlink()
    for damaged in sorted(folder.glob(f"{stem}-*.so")):
        damaged.unlink()
        _log.warning("%s was damaged; the kernels are compiled again", damaged)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def keep(built: Path, folder: Path, stem: str) -> None:
    """Move a compiled library from its scratch folder to its name, for good."""
    library = folder / _name(stem, built)
    with replacing(library) as aside:
        # Not a copy: it is loaded already, and NFS keeps the folder of a file that is removed while it is in use.
        shutil.move(built, aside)
    close_to_others(library)


def close_to_others(file: Path) -> None:
    """Take from everybody the right to write: with a umask of 0, what we have written would not be trusted."""
    file.chmod(stat.S_IMODE(file.stat().st_mode) & ~stat.S_IWOTH)


def check_trusted(file: Path) -> None:
    """Raise for a file of ours that somebody else could have written."""
    _check_library(file)
    _check_folder(file.parent)


def _name(stem: str, library: Path) -> str:
    with library.open("rb") as file:
        return f"{stem}-{hashlib.file_digest(file, 'sha256').hexdigest()}.so"


def _make(folder: Path) -> None:
    """Make a folder where it is missing; one that cannot be trusted raises."""
    for step in reversed([folder, *folder.parents]):
        if not step.exists():
            step.mkdir(mode=0o775, exist_ok=True)  # never writable by everybody, not even with a umask of 0
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    _check_writers(folder, folder.stat())
    above = folder.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        raise PermissionError(f"{folder.parent} can be written by everybody")


def _check_library(library: Path) -> None:
    facts = library.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise PermissionError(f"{library} is not a regular file")
    _check_writers(library, facts)


def _check_writers(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (_user(), 0):
        raise PermissionError(f"{path} belongs to another user (uid {facts.st_uid})")
    if facts.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{path} can be written by everybody")


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0

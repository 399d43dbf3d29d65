"""Writing files so that nothing is lost."""

import os
import stat
import threading
from pathlib import Path

import pytest

from kernelwarehouse import _files


def test_content_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    _files.write_file(path, "old")
    _files.write_file(path, "new: ü")
    assert path.read_text(encoding="utf-8") == "new: ü"
    _files.write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_block_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    _files.write_file(path, "old")

    def interrupted() -> None:
        with _files.replacing(path) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_disk_keeps_the_old_content(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    _files.write_file(path, "old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        _files.write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_synced_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        happened.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_sync(descriptor)

    def replace(old: Path, new: Path) -> None:
        happened.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    _files.write_file(tmp_path / "file.txt", "text")
    assert happened == ["file", "rename", "folder"]


def test_folders_are_synced_whole_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    def replace(old: Path, new: Path) -> None:
        assert {path.stat().st_ino for path in (old, *old.rglob("*"))} <= synced
        assert not Path(new).exists()
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with _files.new_folder(tmp_path / "folder") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("text")
        (aside / "other").write_text("text")
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "text"
    assert tmp_path.stat().st_ino in synced
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_half_a_folder_is_none(tmp_path: Path) -> None:
    def interrupted() -> None:
        with _files.new_folder(tmp_path / "folder") as aside:
            (aside / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_a_folder_with_content_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("old")

    def replaced() -> None:
        with _files.new_folder(tmp_path / "folder") as aside:
            (aside / "file").write_text("new")

    with pytest.raises(OSError, match=r"not empty|exists"):
        replaced()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "kept"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask_whatever_the_writer_does(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with _files.replacing(tmp_path / "file") as aside:
            aside.unlink()
            os.close(os.open(aside, os.O_CREAT | os.O_WRONLY, 0o600))  # as libraries that replace the file do
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_the_name_aside_keeps_the_suffix(tmp_path: Path) -> None:
    with _files.replacing(tmp_path / "plot.png") as aside:
        assert aside.suffix == ".png"
        assert aside.parent == tmp_path


def test_links_are_replaced_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    link = tmp_path / "link"
    _files.replace_link(link, Path("one"))
    broken: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            if (link / "content").read_text() not in ("one", "two"):
                broken.append("neither")

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(50):
        _files.replace_link(link, Path(("one", "two")[turn % 2]))
    done.set()
    reader.join()
    assert not broken
    assert link.is_symlink()
    assert {entry.name for entry in tmp_path.iterdir()} == {"one", "two", "link"}


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """A rename over a device would succeed for root, and the device would be gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in ((pipe, "device or a pipe"), (tmp_path, "folder"), (Path(), "folder")):
        for attempt in (_files.check_replaceable, lambda path: _files.write_file(path, "text")):
            with pytest.raises(OSError, match=message):
                attempt(path)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_replaceable_paths_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    _files.check_replaceable(path)
    assert not list(tmp_path.iterdir())
    path.write_text("old")
    _files.check_replaceable(path)
    assert path.read_text() == "old"
    for wrong in (tmp_path / "missing" / "file", path / "file"):
        with pytest.raises(OSError, match=r"missing|Not a directory"):
            _files.check_replaceable(wrong)
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_added_in_place_of_what_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for content, expected in (
        (None, b"new\n"),
        (b"", b"new\n"),
        (b"old\n", b"old\nnew\n"),
        (b"old\nhal", b"old\nnew\n"),
    ):
        if content is not None:
            path.write_bytes(content)
        _files.append_line(path, b"new", lambda rest: rest == b"whole")
        assert path.read_bytes() == expected
    path.write_bytes(b"old\nwhole")
    _files.append_line(path, b"new", lambda rest: rest == b"whole")
    assert path.read_bytes() == b"old\nwhole\nnew\n"
    with pytest.raises(IsADirectoryError):
        _files.append_line(tmp_path, b"new", lambda rest: True)

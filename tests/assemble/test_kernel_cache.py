"""What is loaded from a cache of compiled kernels, what is not, and what happens instead."""

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from kernel_processes import LOAD, names, run

from kernelwarehouse import _files
from kernelwarehouse.assemble import kernel_cache
from kernelwarehouse.assemble.build import fingerprint

# Python's own writes below a folder fail as on a read-only file system: for root, too, whom permissions do not stop.
READ_ONLY = """
import errno, os, sys
def refuse(event, arguments):
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")
    writes |= event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if writes and str(arguments[0]).startswith(os.environ["TORCH_EXTENSIONS_DIR"]):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))
sys.addaudithook(refuse)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled once for the suite. Without a compiler any library of torch shows what is loaded."""
    folder, stem = tmp_path_factory.mktemp("kernels"), f"native-{fingerprint()}"
    run(folder, TORCH_EXTENSIONS_DIR=os.environ["TORCH_EXTENSIONS_DIR"])
    found = kernel_cache.find(kernel_cache.usual_folder(), stem)
    shutil.copyfile(found or torch._C.__file__, folder / "built")
    kernel_cache.keep(folder / "built", folder, stem)
    (kept,) = folder.glob("native-*.so")
    return kept


@pytest.fixture
def usual(tmp_path: Path, library: Path) -> Path:
    return _copy(library, tmp_path / "cache" / "kernelwarehouse")


@pytest.fixture
def private(tmp_path: Path, library: Path) -> Path:
    copied = _copy(library, tmp_path / "tmp" / f"kernelwarehouse-{os.geteuid()}")
    copied.parent.chmod(0o700)
    return copied


def _copy(library: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, mode=0o755)
    return Path(shutil.copyfile(library, folder / library.name))


def _damage(library: Path, how: str) -> None:
    content = bytearray(library.read_bytes())
    match how:
        case "truncated":
            del content[len(content) // 2 :]
        case "empty":
            content.clear()
        case "altered":
            content[len(content) // 2] ^= 1
    library.write_bytes(content)


def test_whole_library_is_loaded_without_a_word(usual: Path, tmp_path: Path) -> None:
    assert run(tmp_path, CXX="no-such-compiler") == f"loaded True\nfrom {usual}\n"
    assert names(usual.parent) == {usual.name}  # not even a lock


@pytest.mark.parametrize("how", ["truncated", "empty", "altered"])
def test_damaged_library_is_not_loaded_but_compiled_again(how: str, usual: Path, tmp_path: Path) -> None:
    """That compiling comes to a good end is shown where a build is killed."""
    _damage(usual, how)
    found = run(tmp_path, CXX="no-such-compiler")
    assert found.startswith("loaded False\nfrom\n")
    assert f"LOG WARNING {usual} was damaged; the kernels are compiled again\n" in found
    assert "no C++ compiler 'no-such-compiler'" in found
    assert names(usual.parent) == {"build.lock"}


def test_library_without_a_checksum_is_not_loaded(usual: Path) -> None:
    usual.rename(usual.with_name(f"native-{fingerprint()}.so"))
    assert _find(usual) is None


def test_read_only_cache_is_used_as_it_is(usual: Path, tmp_path: Path) -> None:
    assert run(tmp_path, READ_ONLY + LOAD) == f"loaded True\nfrom {usual}\n"


def test_damage_in_a_read_only_cache_makes_way_for_the_private_folder(
    usual: Path, private: Path, tmp_path: Path
) -> None:
    _damage(usual, "truncated")
    found = run(tmp_path, READ_ONLY + LOAD, CXX="no-such-compiler")
    assert found.startswith(f"loaded True\nfrom {private}\n")
    assert found.count("LOG") == 1
    assert f"LOG WARNING compiled kernels are kept in {private.parent}, not in the usual cache" in found
    assert "Read-only file system" in found
    assert names(usual.parent) == {usual.name}


def test_private_folder_is_built_in_where_the_usual_one_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    found = run(tmp_path, CXX="no-such-compiler")
    assert found.startswith("loaded False\n")
    (folder,) = (tmp_path / "tmp").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert names(folder) == {"build.lock"}  # it got as far as looking for a compiler


def test_cache_that_everybody_can_write_to_is_passed_over(usual: Path, private: Path, tmp_path: Path) -> None:
    usual.parent.chmod(0o777)
    found = run(tmp_path, CXX="no-such-compiler")
    assert found.startswith(f"loaded True\nfrom {private}\n")
    assert found.count("LOG") == 1
    assert f"not in the usual cache: {usual.parent} can be written by everybody\n" in found


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_open_to_everybody_is_refused(mode: int, usual: Path) -> None:
    usual.parent.chmod(mode)
    with pytest.raises(PermissionError, match=r"kernelwarehouse can be written by everybody"):
        kernel_cache.find(usual.parent, "native")
    with pytest.raises(PermissionError, match="by everybody"), kernel_cache.building(usual.parent):
        pass
    assert names(usual.parent) == {usual.name}


def test_library_open_to_everybody_is_refused(usual: Path) -> None:
    usual.chmod(0o666)
    with pytest.raises(PermissionError, match=r"\.so can be written by everybody"):
        _find(usual)


def test_folder_that_everybody_can_exchange_is_refused(usual: Path) -> None:
    above = usual.parent.parent
    above.chmod(0o777)
    with pytest.raises(PermissionError, match=r"cache can be written by everybody"):
        _find(usual)
    above.chmod(0o1777)  # as temporary folders are: names belong to who made them
    assert _find(usual) == usual


def test_group_may_write_as_with_a_umask_of_002(usual: Path) -> None:
    for path, mode in ((usual, 0o664), (usual.parent, 0o775), (usual.parent.parent, 0o775)):
        path.chmod(mode)
    assert _find(usual) == usual


def test_only_this_user_and_root_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder and library goes through this check, as the tests of permissions show."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for uid in (0, 1000):
        kernel_cache._check_writers(Path("some.so"), os.stat_result((0o100644, 0, 0, 1, uid, 100, 0, 0, 0, 0)))
    with pytest.raises(PermissionError, match=r"some\.so belongs to another user \(uid 1001\)"):
        kernel_cache._check_writers(Path("some.so"), os.stat_result((0o100644, 0, 0, 1, 1001, 100, 0, 0, 0, 0)))


def test_link_is_no_library(usual: Path, tmp_path: Path) -> None:
    elsewhere = usual.rename(tmp_path / "elsewhere.so")
    usual.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is not a regular file"):
        _find(usual)


def _find(library: Path) -> Path | None:
    return kernel_cache.find(library.parent, f"native-{fingerprint()}")


@pytest.mark.parametrize("obstacle", ["link", "file", "open to the group", "of another user"])
def test_private_folder_that_is_not_ours_is_refused(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = kernel_cache.private_folder()
    assert kernel_cache.private_folder() == folder
    match obstacle:
        case "link":
            folder.rename(tmp_path / "real")
            folder.symlink_to(tmp_path / "real")
        case "file":
            folder.rmdir()
            folder.write_text("")
        case "open to the group":
            folder.chmod(0o750)
        case "of another user":
            stranger = os.geteuid() + 1
            folder.rename(tmp_path / f"kernelwarehouse-{stranger}")
            monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        kernel_cache.private_folder()


def test_usual_folder_is_torch_s_and_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert kernel_cache.usual_folder() == tmp_path / "home" / ".cache" / "torch_extensions" / "kernelwarehouse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache.usual_folder() == tmp_path / "xdg" / "torch_extensions" / "kernelwarehouse"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "link"))
    assert kernel_cache.usual_folder() == tmp_path / "real" / "kernelwarehouse"


def test_scratch_removes_what_is_dead_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "native-build-abcd_123" / "deep").mkdir(parents=True)
    (tmp_path / "native-build-abcd_123" / "deep" / "ops.o").write_text("")
    (tmp_path / ".01234567-native-fp-sum.so").write_text("half")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("")
    (tmp_path / "native-build-linklink").symlink_to(tmp_path / "outside")
    (tmp_path / "native-fp-damaged.so").write_text("half")
    others = {"native-other-sum.so", "build-abcdefgh", "native-build-notes.txt", "build.lock"}
    for name in others:
        (tmp_path / name).write_text("")
    with kernel_cache.scratch(tmp_path, "native-fp") as made:
        assert made.parent == tmp_path
        assert names(tmp_path) == {made.name, "outside", *others}
    assert names(tmp_path) == {"outside", *others}
    assert names(tmp_path / "outside") == {"file"}


def test_library_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for step in ("fsync", "replace"):
        original = getattr(os, step)

        def noted(*arguments: object, step: str = step, original=original) -> None:
            steps.append((step, sorted(names(tmp_path))))
            original(*arguments)

        monkeypatch.setattr(_files.os, step, noted)
    (tmp_path / "built").write_bytes(b"library")
    kernel_cache.keep(tmp_path / "built", tmp_path, "native-x")
    (kept,) = names(tmp_path)
    assert [step for step, _ in steps] == ["fsync", "replace", "fsync"]  # file, name, folder
    assert [kept in seen for _, seen in steps] == [False, False, True]
    assert kernel_cache.find(tmp_path, "native-x") == tmp_path / kept


def test_everybody_s_umask_does_not_make_the_cache_untrusted(tmp_path: Path) -> None:
    (tmp_path / "built").write_bytes(b"library")
    folder = tmp_path / "new" / "kernelwarehouse"
    before = os.umask(0)
    try:
        with kernel_cache.building(folder):
            kernel_cache.keep(tmp_path / "built", folder, "native-x")
    finally:
        os.umask(before)
    assert kernel_cache.find(folder, "native-x") is not None


def test_who_waits_for_another_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "_PATIENCE", 0.05)
    warned, built = threading.Event(), threading.Event()

    class Watch(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            warned.set()

    def build() -> None:
        with kernel_cache.building(tmp_path):
            built.set()

    log, watch = logging.getLogger("kernelwarehouse"), Watch()
    log.addHandler(watch)
    waiting = threading.Thread(target=build)
    try:
        with FileLock(tmp_path / "build.lock"):
            waiting.start()
            assert warned.wait(60)
            assert not built.is_set()
        assert built.wait(60)
    finally:
        log.removeHandler(watch)
        waiting.join()
    assert caplog.messages == [
        f"waiting for another process, which compiles kernels and holds {tmp_path / 'build.lock'}"
    ]

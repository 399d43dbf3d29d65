"""Compiled kernels are turned off, missing, or being built by a process that dies, without anything else changing."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_processes import LOAD, environment, names, run
from torch.utils import cpp_extension

from compiled_kernels import COMPILED
from kernelwarehouse.assemble import build, kernel_cache

LAYER = (
    LOAD
    + """
from kernelwarehouse.layers import Conv2d
torch.manual_seed(0)
layer = Conv2d(8, 8, 3)
out = [layer(torch.ones(2, 8, 5, 5)) for _ in range(2)]
print("shape", tuple(out[1].shape))
"""
)
STUCK_COMPILER = """#!/bin/sh
case "$*" in *ops.cpp*) echo $$ > "$0.pid.part"; mv "$0.pid.part" "$0.pid"; exec sleep 3600;; esac
echo 99.0.0
"""
# For a build whose code has to be right, and not fast: without optimisation it takes two thirds of the time.
HASTY_COMPILER = """#!/bin/sh
exec {compiler} "$@" -O0
"""


def test_turned_off(tmp_path: Path) -> None:
    assert run(tmp_path, LAYER, KERNELWAREHOUSE_NATIVE="0") == "loaded False\nfrom\nshape (2, 8, 3, 3)\n"
    assert names(tmp_path) == {"tmp"}


def test_without_a_compiler_one_line_is_logged(tmp_path: Path) -> None:
    found = run(tmp_path, LAYER, CXX="no-such-compiler")
    assert found.startswith("loaded False\nfrom\nshape (2, 8, 3, 3)\n")
    assert found.count("LOG") == 1
    assert "no C++ compiler 'no-such-compiler'" in found


@pytest.mark.parametrize("routes", ["rule", ""])
def test_width_that_there_is_not_is_named(routes: str, tmp_path: Path) -> None:
    """Once: choices of ways, which are kept beside the kernels, do without."""
    found = run(tmp_path, LAYER, KERNELWAREHOUSE_LANES="12", KERNELWAREHOUSE_ROUTES=routes)
    assert found.startswith("loaded False\nfrom\nshape (2, 8, 3, 3)\n")
    assert found.count("LOG") == 1
    assert "KERNELWAREHOUSE_LANES is '12', and has to be 8 or 16" in found


def test_a_trace_may_be_the_first_use_of_all() -> None:
    """In a process of its own: this one has loaded the kernels."""
    script = """
import torch
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.layers import Conv2d
layer, x = Conv2d(8, 16, 3, padding=1).eval(), torch.randn(2, 8, 6, 6)
with torch.no_grad():
    traced = torch.jit.trace(layer, x, check_trace=False)
    print(load_native(), torch.allclose(traced(x[:1]), layer(x[:1]), atol=1e-5))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == f"{COMPILED} True\n", done.stderr


def test_each_width_is_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stems = set()
    for width in ("", "8", "16"):
        monkeypatch.setenv("KERNELWAREHOUSE_LANES", width)
        stems.add(build.fingerprint())
    assert len(stems) == 3


def test_killed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernelwarehouse"
    usual = shutil.which(cpp_extension.get_cxx_compiler())
    works = usual is not None
    compiler, compiler_pid = tmp_path / "c++", tmp_path / "c++.pid"
    compiler.write_text(STUCK_COMPILER)
    compiler.chmod(0o755)
    hasty = tmp_path / "hasty-c++"
    if usual:
        hasty.write_text(HASTY_COMPILER.format(compiler=shlex.quote(usual)))
        hasty.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD],
        env=environment(tmp_path, CXX=str(compiler)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not compiler_pid.exists():
            assert process.poll() is None, "the build ended before the compiler ran"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:  # the compiler has a group of its own (ninja's doing): it is still there, with its scratch folder
        assert len(list(folder.glob("native-build-*"))) == 1
        found = run(tmp_path, LAYER, **({"CXX": str(hasty)} if works else {}))
    finally:
        os.kill(int(compiler_pid.read_text()), signal.SIGKILL)

    assert found.startswith(f"loaded {works}\n")
    assert "shape (2, 8, 3, 3)\n" in found
    libraries = {path.name for path in folder.glob("native-*.so")}
    assert names(folder) == {"build.lock", *libraries}
    assert len(libraries) == works
    if works:  # the next process loads what was kept, and needs neither compiler nor a word
        found = run(tmp_path, LAYER, CXX="no-such-compiler")
        assert found == f"loaded True\nfrom {folder / libraries.pop()}\nshape (2, 8, 3, 3)\n"


def test_kernels_that_cannot_be_kept_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(*, build_directory: str, **_: object) -> None:
        (Path(build_directory) / "kernelwarehouse_native.so").write_bytes(b"library")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp_extension, "load", compiled)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "sh")
    monkeypatch.setattr(kernel_cache, "keep", full)
    build._compile(tmp_path, "native-x")
    assert "could not be kept for the next time: [Errno 28] No space left" in caplog.text
    assert names(tmp_path) == set()

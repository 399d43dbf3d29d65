"""Building and loading the compiled kernels: on first use, once for a machine, and never in the way."""

import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from kernelwarehouse.assemble import kernel_cache

_SOURCES = Path(__file__).parent / "csrc"
# Contraction gives fused multiply-add. No fast-math: NaN and infinity stay what they are. Compilers warn of how vectors
# wider than the machine's are passed to functions, which matters to nobody outside.
_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"]
_WIDTHS = ("8", "16")
GRAIN = 8  # kGrain in csrc/tiles.h: compiled kernels take cells of multiples of so many channels

_log = logging.getLogger("kernelwarehouse")


@cache
def load_native() -> bool:
    """Whether `torch.ops.kernelwarehouse` can be used; builds it where needed. `KERNELWAREHOUSE_NATIVE=0` says no.

    Kernels are as wide as the machine's vectors, 8 or 16 numbers. `KERNELWAREHOUSE_LANES=16` (or 8) builds and uses
    those of that width, which are right on every machine and fast on some.

    The library is kept where torch keeps its extensions and is checked before every use; a damaged one is built again.
    A folder with a whole library need not be writable. One that can neither give a library nor take one (read-only, no
    space, mounted without the right to execute), or that others could have written to, is passed over with a warning:
    a folder of this user alone among the system's temporary files takes its place. Where that fails as well, or nothing
    can be compiled, a warning says why and pure PyTorch is used.
    """
    if os.environ.get("KERNELWAREHOUSE_NATIVE", "1") == "0":
        return False
    try:
        with _out_of_sight_of_tracers():
            _load()
            torch.ops.kernelwarehouse.ways_of_mixing()  # found out now, not in a layer's first run, which may be timed
    except (RuntimeError, OSError, ImportError) as error:
        _log.warning("compiled kernels are not used, pure PyTorch is: %s", _first_line(error))
        return False
    return True


def panel_width() -> int:
    """Output channels of a panel (`csrc/basis.h`), where `load_native` has found kernels."""
    return int(torch.ops.kernelwarehouse.panel_width())


@contextmanager
def _out_of_sight_of_tracers() -> Iterator[None]:
    """`torch.jit.trace` records every operator, and fails at one whose results are no tensors."""
    record, recording = torch._C._set_tracing_state, torch._C._get_tracing_state()  # type: ignore[attr-defined]
    record(None)
    try:
        yield
    finally:
        record(recording)


def _load() -> None:
    width = os.environ.get("KERNELWAREHOUSE_LANES")
    if width and width not in _WIDTHS:
        raise RuntimeError(f"KERNELWAREHOUSE_LANES is {width!r}, and has to be {' or '.join(_WIDTHS)}")
    stem = f"native-{fingerprint()}"
    try:
        _load_from(kernel_cache.usual_folder(), stem)
    except OSError as error:
        private = kernel_cache.private_folder()
        _log.warning("compiled kernels are kept in %s, not in the usual cache: %s", private, _first_line(error))
        _load_from(private, stem)


def _flags() -> list[str]:
    """What the compiler is told, with the width that the environment asks for, if it does.

    The narrow kernels are those of a processor without AVX-512, in every instruction.
    """
    width = os.environ.get("KERNELWAREHOUSE_LANES")
    if not width:
        return _FLAGS
    without = ["-mno-avx512f"] if width == "8" and platform.machine() in ("x86_64", "AMD64") else []
    return [*_FLAGS, *without, f"-DKERNELWAREHOUSE_LANES={width}"]


def _load_from(folder: Path, stem: str) -> None:
    library = kernel_cache.find(folder, stem)
    if library is None:
        with kernel_cache.building(folder):
            library = kernel_cache.find(folder, stem)  # another process may have been building it until now
            if library is None:
                _compile(folder, stem)
                return
    torch.ops.load_library(library)


def _compile(folder: Path, stem: str) -> None:
    """Build the library, load it, and keep it. A failure that another folder would not mend is a `RuntimeError`."""
    from torch.utils import cpp_extension  # slow to import, and it looks for CUDA with a log line

    with kernel_cache.scratch(folder, stem) as scratch, _ninja_on_path():
        compiler = cpp_extension.get_cxx_compiler()
        if shutil.which(compiler) is None:
            raise RuntimeError(f"there is no C++ compiler {compiler!r}")
        _log.info("compiling kernels for this machine, once (%s)", folder)
        cpp_extension.load(
            name="kernelwarehouse_native",
            sources=sorted(map(str, _SOURCES.glob("*.cpp"))),
            extra_cflags=_flags(),
            extra_ldflags=["-fopenmp"],
            build_directory=str(scratch),
            is_python_module=False,
        )
        try:
            (built,) = scratch.glob("*.so")  # a second build in one process gets another name from torch
            kernel_cache.keep(built, folder, stem)
        except OSError as error:
            _log.warning("compiled kernels are used, but could not be kept for the next time: %s", error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """An environment that is used without being activated has its ninja beside Python, but not on the path."""
    import ninja

    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def fingerprint() -> str:
    """Changes with sources, flags, torch and processor: code for one processor may not run on another."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(" ".join([torch.__version__, platform.machine(), *_flags()]).encode())
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        facts = {line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))}
        digest.update("\n".join(sorted(facts)).encode())
    return digest.hexdigest()[:16]

"""Building and loading the compiled kernels: on first use, once for a machine, and never in the way."""

import hashlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

_SOURCES = Path(__file__).parent / "csrc"
# Contraction gives fused multiply-add. No fast-math: NaN and infinity stay what they are.
_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp"]

_log = logging.getLogger("kernelwarehouse")


@cache
def load_native() -> bool:
    """Whether `torch.ops.kernelwarehouse` can be used; builds it where needed. `KERNELWAREHOUSE_NATIVE=0` says no."""
    if os.environ.get("KERNELWAREHOUSE_NATIVE", "1") == "0":
        return False
    try:
        _load()
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning("compiled kernels are not used, pure PyTorch is: %s", reason[0])
        return False
    return True


def _load() -> None:
    root = _cache() / "kernelwarehouse"
    library = root / f"native-{_fingerprint()}.so"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "build.lock"):  # released by the system even where a build is killed
        if not library.exists():
            from torch.utils import cpp_extension  # slow to import, and it looks for CUDA with a log line

            compiler = cpp_extension.get_cxx_compiler()
            if shutil.which(compiler) is None:
                raise OSError(f"there is no C++ compiler {compiler!r}")
            _log.info("compiling kernels for this machine, once (%s)", library)
            with tempfile.TemporaryDirectory(dir=root) as scratch, _ninja_on_path():
                cpp_extension.load(
                    name="kernelwarehouse_native",
                    sources=[str(_SOURCES / "ops.cpp")],
                    extra_cflags=_FLAGS,
                    extra_ldflags=["-fopenmp"],
                    build_directory=scratch,
                    is_python_module=False,
                )
                os.replace(Path(scratch) / "kernelwarehouse_native.so", library)
            return
    torch.ops.load_library(library)


def _cache() -> Path:
    """Where torch keeps compiled extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


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


def _fingerprint() -> str:
    """Changes with sources, torch and processor: code for one processor may not run on another."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(" ".join([torch.__version__, platform.machine(), *_FLAGS]).encode())
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        facts = {line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))}
        digest.update("\n".join(sorted(facts)).encode())
    return digest.hexdigest()[:16]

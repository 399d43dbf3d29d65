"""What runs gave: one line of JSON a run, in a file that only grows."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kernelwarehouse._files import append_line
from kernelwarehouse._version import __version__
from kernelwarehouse.errors import StudyError

_KINDS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "phase": str,
    "seed": int,
    "learning_rate": (int, float),
    "weight_decay": (int, float),
    "accuracies": list,
    "accuracy": (int, float, type(None)),
    "test_accuracy": (int, float, type(None)),
    "diverged": bool,
    "parameters": int,
    "seconds": (int, float),
    "commit": str,
    "machine": str,
    "data": str,
    "settings": dict,
}


@dataclass(frozen=True)
class Result:
    """A finished run. Accuracies are shares from 0 to 1: `accuracies` on the images kept apart, after every epoch, and
    `accuracy` the last of them; `test_accuracy`, of final runs only, on the test images. A run that `diverged` has
    neither of the latter. `seconds` are those of the training steps, `data` is the digest of the images."""

    method: str
    phase: str
    seed: int
    learning_rate: float
    weight_decay: float
    accuracies: tuple[float, ...]
    accuracy: float | None
    test_accuracy: float | None
    diverged: bool
    parameters: int
    seconds: float
    commit: str
    machine: str
    data: str
    settings: dict[str, Any]


def read_results(path: Path) -> list[Result]:
    """All lines; the last one not, if a kill cut it short."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StudyError(
            f"results {path} cannot be read ({error.strerror or error}); 'kernelwarehouse study run' writes them"
        ) from error
    results = [_parse(line, f"line {number} of {path}") for number, line in enumerate(lines, start=1) if line.strip()]
    return results + ([_parse(last, f"the last line of {path}")] if is_whole(last) else [])


def append_result(path: Path, result: Result) -> None:
    """Add a line, in place of what a kill may have left of one."""
    append_line(path, json.dumps(asdict(result)).encode(), is_whole)


def is_whole(line: bytes) -> bool:
    """Whether a line without its end is one for all that: an editor may have taken the last line's end away."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(line: bytes, where: str) -> Result:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{where} is damaged ({error}); remove the line to go on without it") from error
    for name, kind in _KINDS.items():
        value = values.get(name) if isinstance(values, dict) else None
        if not isinstance(values, dict) or name not in values or not isinstance(value, kind):
            raise StudyError(f"{where} is no result: its {name} is {value!r}; remove the line to go on without it")
    known = {each.name: values[each.name] for each in fields(Result)}
    return Result(**known | {"accuracies": tuple(values["accuracies"])})


def refuse_mixed_data(results: Iterable[Result], path: Path, digest: str | None = None) -> None:
    """Results of different images say nothing beside each other; `digest` is that of the images of runs to come."""
    digests = sorted({result.data for result in results} | ({digest} if digest else set()))
    if len(digests) > 1:
        here = f", and the data now is {digest}" if digest else ""
        raise StudyError(
            f"results {path} are not all of the same images (there are {', '.join(digests)}{here}); use the same data, "
            "or another --results"
        )


def commit() -> str:
    """What git says of this code, if it is a checkout; else the version."""
    folder = Path(__file__).parent
    for command in (["git", "ls-files", "--error-unmatch", __file__], ["git", "describe", "--always", "--dirty"]):
        try:
            said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return __version__
    return said.strip()


def machine() -> str:
    """The kind of machine, without its name."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}"

"""Choices: measured ones that are kept for the machine, those of a run that are kept with it, and those of a file.

`KERNELWAREHOUSE_ROUTES` names a file of choices: these are taken, and others by rule; nothing is measured and nothing
written. The value `rule` is such a file without any choice. Otherwise choices are measured once for a machine, in its
own file beside the compiled kernels. All files have one format, that of `to_json`.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from kernelwarehouse._files import write_file
from kernelwarehouse._version import __version__
from kernelwarehouse.assemble import build, kernel_cache
from kernelwarehouse.assemble.registry import BASES, STRATEGIES
from kernelwarehouse.errors import StrategyError

VARIABLE = "KERNELWAREHOUSE_ROUTES"
BY_RULE = "rule"
_FORMAT = 1
_PATIENCE = 10.0  # seconds that a choice waits to be written while another process writes

_log = logging.getLogger("kernelwarehouse")


@dataclass(frozen=True)
class Choice:
    """Names of strategies: for forward and, where a call is differentiated, for backward."""

    forward: str
    backward: str | None = None

    def __post_init__(self) -> None:
        for name in (self.forward, *([] if self.backward is None else [self.backward])):
            if name not in (*STRATEGIES, *BASES):
                raise StrategyError(f"there is no strategy {name!r}; there are {', '.join((*STRATEGIES, *BASES))}")
        if self.backward is None:
            return
        if {*BASES} & {self.forward, self.backward}:
            raise StrategyError(f"{self.forward!r} with {self.backward!r} for backward: a basis is for inference alone")
        if STRATEGIES[self.forward].mixing != STRATEGIES[self.backward].mixing:
            raise StrategyError(
                f"{self.forward!r} cannot have {self.backward!r} for backward: one mixes with attentions, the other "
                "with what they are products of; name the same for both"
            )


Choices = dict[str, Choice]


def to_json(choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Choices as they are written to files."""
    return {"format": _FORMAT, "routes": {key: asdict(choice) for key, choice in sorted(choices.items())}}


def from_json(data: Any, where: str) -> Choices:
    """The other way round; `where` they come from is named in errors."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("routes"), dict):
        raise StrategyError(f"{where} holds no routes of format {_FORMAT}")
    try:
        return {str(key): Choice(**choice) for key, choice in data["routes"].items()}
    except (TypeError, StrategyError) as error:
        raise StrategyError(f"{where} holds a route that cannot be taken: {error}") from error


def read(path: Path) -> Choices:
    """Choices from a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrategyError(f"routes cannot be read from {path}: {error}") from error
    return from_json(data, str(path))


_kept: list[Choices] = []  # by runs that are under way, the innermost last
_changes = 0


def changes() -> int:
    """Grows when choices that were asked for before may be others now."""
    return _changes


@contextmanager
def keeping(choices: Choices) -> Iterator[None]:
    """Take these choices before all others inside the `with` block, and add to them what else is chosen there."""
    global _changes
    _kept.append(choices)
    _changes += 1
    try:
        yield
    finally:
        # By what it is, not by what it holds: another run may have made the same choices.
        _kept[:] = [other for other in _kept if other is not choices]
        _changes += 1


def measures() -> bool:
    """Whether what is not known may be measured."""
    return not os.environ.get(VARIABLE)


def of_runs(key: str) -> Choice | None:
    """The choice for calls of this name that a run under way has made, the innermost first."""
    return next((choices[key] for choices in reversed(_kept) if key in choices), None)


def known(key: str) -> Choice | None:
    """The choice for calls of this name, wherever it is kept."""
    found = of_runs(key)
    if found is None:
        pinned = os.environ.get(VARIABLE)
        found = (_pinned(pinned) if pinned else _of_machine(_device(key))).get(key)
    return found


def remember(key: str, choice: Choice, lasting: bool = True) -> None:
    """Keep a choice for the runs under way, for this process and, where it is a lasting one, for the machine."""
    keep_with_runs(key, choice)
    _of_machine(_device(key))[key] = choice
    path = machine_file(_device(key))
    if path is None or not lasting:
        return
    try:
        with FileLock(path.with_suffix(".lock"), timeout=_PATIENCE):
            # Other processes may have measured something meanwhile, and anew what this one has read long ago.
            write_file(path, json.dumps(to_json({**_read_own(path), key: choice}), indent=1) + "\n")
            kernel_cache.close_to_others(path)
    except (OSError, NotImplementedError) as error:  # the latter of file systems without locks
        _log.info("the choice of strategies is not kept for the next time: %s", error)


def forget() -> None:
    """Measure anew in this process what the CPU's file has choices for; they take the place of the old ones."""
    global _changes
    _of_machine("cpu").clear()
    _changes += 1


def keep_with_runs(key: str, choice: Choice) -> None:
    """Keep a choice for the runs under way alone, as one that was made without measuring."""
    for choices in _kept:
        choices[key] = choice


@lru_cache(maxsize=8)
def _pinned(value: str) -> Choices:
    return {} if value == BY_RULE else read(Path(value))


def _device(key: str) -> str:
    """The kind of device that calls of this name run on, which is its first word."""
    return key.replace(",", " ").split(" ", 1)[0]


@cache
def _of_machine(device: str) -> Choices:
    path = machine_file(device)
    return {} if path is None else _read_own(path)


def _read_own(path: Path) -> Choices:
    """The machine's choices, of which a file that is damaged has none."""
    try:
        kernel_cache.check_trusted(path)
        return read(path)
    except FileNotFoundError:
        return {}
    except (OSError, StrategyError) as error:
        _log.warning("choices of strategies are measured again: %s", error)
        return {}


@cache
def machine_file(device: str = "cpu") -> Path | None:
    """Where the choices of this machine and version are for this kind of device, if there is a place.

    On a CPU, they are those of this set of compiled kernels and of ways to choose from; other devices do not use these
    kernels, and have none built.
    """
    if device == "cpu":
        ways = hashlib.sha256(" ".join((*STRATEGIES, *BASES)).encode()).hexdigest()[:8]
        name = f"routes-{__version__}-{build.fingerprint()}-{ways}{'' if build.load_native() else '-pure'}.json"
    else:
        name = f"routes-{__version__}-{device}-torch-{torch.__version__}.json"
    try:
        return kernel_cache.folder_for(name) / name
    except OSError as error:
        _log.info("choices of strategies are kept for this process alone: %s", error)
        return None

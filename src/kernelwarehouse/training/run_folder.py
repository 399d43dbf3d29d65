"""What a run leaves on disk, written so that a kill at any moment, or a full disk, loses nothing that was there.

    OUTPUT/run.json        what is trained, and how: the resolved recipe
    OUTPUT/metrics.jsonl   one line per report, one per epoch
    OUTPUT/last, best      the newest and the best network, readable by `kernelwarehouse.load`; in `last` also
                           training.pt, the rest of the state
    OUTPUT/report.html     when the run is through

`last` and `best` are symbolic links into `.versions`: a checkpoint is written and synced there under a name of its own,
and then the link is replaced in one step.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.saving.checkpoint import save

STATE_FILE = "training.pt"
VERSIONS = ".versions"
Slot = Literal["last", "best"]


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings_path = self.path / "run.json"
        self.metrics_path = self.path / "metrics.jsonl"

    def claim(self, settings: dict[str, Any]) -> None:
        """Take the folder for a run with these settings: a new run, or the same one again."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.settings_path.exists():
            write_aside(self.settings_path, json.dumps(settings, indent=1) + "\n")
            return
        different = [
            f"{name}: there {theirs!r}, now {ours!r}"
            for name, theirs, ours in _differences(self.read_settings(), json.loads(json.dumps(settings)))
        ]
        if different:
            raise TrainingError(
                f"{self.path} holds a run with other settings ({'; '.join(different)}); "
                "use the same settings to go on with it, or another --output"
            )

    def read_settings(self) -> dict[str, Any]:
        try:
            return json.loads(self.settings_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TrainingError(
                f"{self.path} is not the folder of a run: it has no {self.settings_path.name}"
            ) from error
        except json.JSONDecodeError as error:
            raise TrainingError(f"{self.settings_path} is damaged: {error}") from error

    def network(self) -> Path:
        """The best network if there is one, else the newest."""
        for slot in ("best", "last"):
            if (self.path / slot).exists():
                return self.path / slot
        raise TrainingError(f"{self.path} has no checkpoint yet: neither best nor last")

    def write(self, slot: Slot, step: int, network: nn.Module, state: dict[str, Any] | None = None) -> None:
        """Replace a slot by this network, and the state to resume from. The old content stays until the new is safe."""
        versions = self.path / VERSIONS
        version = versions / f"{slot}-{step:09d}-{time.time_ns()}"
        try:
            versions.mkdir(parents=True, exist_ok=True)
            save(network, version)
            if state is not None:
                torch.save(state, version / STATE_FILE)
            _sync(version)
            link = versions / f"{slot}.link"
            link.unlink(missing_ok=True)
            link.symlink_to(Path(VERSIONS) / version.name)
            os.replace(link, self.path / slot)
            _sync_folder(self.path)
        # Failed writes are OSErrors in Python, RuntimeErrors in torch.save and SafetensorErrors in safetensors.
        except (OSError, RuntimeError, SafetensorError, CheckpointError) as error:
            shutil.rmtree(version, ignore_errors=True)
            kept = (
                f"the one before is intact in {self.path / slot}"
                if (self.path / slot).exists()
                else "there is none yet"
            )
            free = shutil.disk_usage(self.path).free / 1e6
            raise TrainingError(
                f"the checkpoint of step {step} could not be written to {version} ({error}); {kept}. "
                f"{free:,.0f} MB are free there: make room and start the same command again"
            ) from error
        for old in versions.glob(f"{slot}-*"):
            if old != version:
                shutil.rmtree(old, ignore_errors=True)

    def read_state(self) -> dict[str, Any] | None:
        """The state to resume from, or nothing if the run has not got that far."""
        path = self.path / "last" / STATE_FILE
        if not path.exists():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load fails in many ways on a damaged file, and each means the same here
            raise CheckpointError(f"{path} is damaged ({error}); remove {path.parent} to start anew") from error


def write_aside(path: Path, text: str) -> None:
    """Write a file so that readers, and kills, see either the old or the new content."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{prefix}{name}.")
        elif there != here:
            found.append((f"{prefix}{name}", there, here))
    return found

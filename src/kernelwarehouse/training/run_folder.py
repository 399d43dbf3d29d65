"""What a run leaves on disk, written so that a kill at any moment, or a full disk, loses nothing that was there.

    OUTPUT/run.json        what is trained, and how: the settings of the run, with the resolved recipe
    OUTPUT/metrics.jsonl   one line per report, one per epoch
    OUTPUT/last, best      the newest and the best network, readable by `kernelwarehouse.load`; in `last` also
                           training.pt, the rest of the state
    OUTPUT/report.html     when the run is through

`last` and `best` are symbolic links into `.versions`: a checkpoint is written and synced there under a name of its own,
and then the link is replaced in one step. They are the only links: a folder in which anything else of the above is one
is refused, so that nothing outside is written to or removed.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, overload

import torch
from safetensors import SafetensorError
from torch import nn

from kernelwarehouse._files import replace_link, replacing, sync_folder, sync_tree, write_file
from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.saving.checkpoint import save
from kernelwarehouse.training.folder_lock import HOLDER_FILE, LOCK_FILE, locked
from kernelwarehouse.training.settings import EngineSettings, RunSettings

SETTINGS_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
STATE_FILE = "training.pt"
VERSIONS = ".versions"
Slot = Literal["last", "best"]
Settings = TypeVar("Settings", bound=EngineSettings)
SLOTS: tuple[Slot, ...] = get_args(Slot)


class RunFolder:
    """`starts_from` is the option that starts another run from the weights of this one, for errors to advise; it is
    empty for tasks that have none."""

    def __init__(self, path: str | Path, *, starts_from: str = "--from") -> None:
        self.path = Path(path)
        self._starts_from = starts_from
        self.settings_path = self.path / SETTINGS_FILE
        self.metrics_path = self.path / METRICS_FILE

    @contextmanager
    def claimed(self, settings: EngineSettings) -> Iterator[None]:
        """Have the folder to oneself for a run with these settings: a new run, or the same one again."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be made a folder for the run: {error}") from error
        self._refuse_links()
        with locked(self.path):
            self._store_or_compare(settings)
            yield

    def _store_or_compare(self, settings: EngineSettings) -> None:
        if not self.settings_path.exists():
            if any((self.path / slot).is_symlink() for slot in SLOTS):
                raise TrainingError(
                    f"{self.path} has checkpoints but no {SETTINGS_FILE}, so nobody can tell which run they belong to; "
                    f"put {SETTINGS_FILE} back, or use another --output{self._with_weights(self.path / 'last')}"
                )
            try:
                write_file(self.settings_path, settings.to_json())
            except OSError as error:
                raise TrainingError(f"{self.settings_path} cannot be written: {error}") from error
            return
        stored = self.read_settings(type(settings))
        different = settings.differences(stored)
        if different:
            raise TrainingError(
                f"{self.path} holds a run with other settings ({'; '.join(different)}); "
                "use the same settings to go on with it, or another --output"
            )
        different = settings.data_differences(stored)
        if different:
            raise TrainingError(
                f"{self.path} holds a run on other data, of the same name {settings.data} ({'; '.join(different)}); "
                "use the same data to go on with it, or another --output"
            )

    def _refuse_links(self) -> None:
        for name in (SETTINGS_FILE, METRICS_FILE, TENSORBOARD, VERSIONS, LOCK_FILE, HOLDER_FILE):
            if (self.path / name).is_symlink():
                raise TrainingError(
                    f"{self.path / name} is a symbolic link to {os.readlink(self.path / name)}; links are refused, "
                    "since a run writes and removes nothing outside its folder: use another --output"
                )
        for slot in SLOTS:
            link = self.path / slot
            target = os.readlink(link) if link.is_symlink() else None
            if target is None and not link.exists():
                continue
            if target is None or Path(target).parent != Path(VERSIONS) or not _is_version(Path(target).name, slot):
                what = f"a symbolic link to {target}" if target is not None else "no symbolic link"
                raise TrainingError(
                    f"{link} is {what}; a run leaves there a link to {VERSIONS}/{slot}-..., and goes on from nothing "
                    f"else: use another --output{self._with_weights(link)}"
                )

    def _with_weights(self, place: Path) -> str:
        return f" (with {self._starts_from} {place} to start from the weights)" if self._starts_from else ""

    @overload
    def read_settings(self) -> RunSettings: ...

    @overload
    def read_settings(self, kind: type[Settings]) -> Settings: ...

    def read_settings(self, kind: type[EngineSettings] = RunSettings) -> EngineSettings:
        """Those of a run for classification, or of another task's kind."""
        try:
            text = self.settings_path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise TrainingError(f"{self.path} is not the folder of a run: it has no {SETTINGS_FILE}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{self.settings_path} cannot be read: {error}") from error
        return kind.from_json(text, str(self.settings_path))

    def network(self) -> Path:
        """The best network if there is one, else the newest."""
        for slot in ("best", "last"):
            if (self.path / slot).exists():
                return self.path / slot
        raise TrainingError(f"{self.path} has no checkpoint yet: neither best nor last")

    def kept(self, slot: Slot = "last") -> str:
        """What an error can say about the checkpoint that there is."""
        path = self.path / slot
        return f"the last good checkpoint is kept in {path}" if path.exists() else "there is no checkpoint yet"

    def write(self, slot: Slot, step: int, network: nn.Module, state: dict[str, Any] | None = None) -> None:
        """Replace a slot by this network, and the state to resume from. The old content stays until the new is safe."""
        self._refuse_links()
        versions = self.path / VERSIONS
        version = versions / f"{slot}-{step:09d}-{time.time_ns()}"
        try:
            version.mkdir(parents=True)
            save(network, version)
            if state is not None:
                with replacing(version / STATE_FILE) as aside:
                    torch.save(state, aside)
            sync_tree(version)
            sync_folder(versions)
            replace_link(self.path / slot, Path(VERSIONS) / version.name)
        # Failed writes are OSErrors in Python, RuntimeErrors in torch.save and SafetensorErrors in safetensors.
        except (OSError, RuntimeError, SafetensorError, CheckpointError) as error:
            shutil.rmtree(version, ignore_errors=True)
            free = shutil.disk_usage(self.path).free / 1e6
            raise TrainingError(
                f"the checkpoint of step {step} could not be written to {version} ({error}); {self.kept(slot)}. "
                f"{free:,.0f} MB are free there: make room and start the same command again"
            ) from error
        for old in versions.iterdir():
            if old != version and _is_version(old.name, slot) and old.is_dir() and not old.is_symlink():
                shutil.rmtree(old, ignore_errors=True)

    def read_state(self) -> dict[str, Any] | None:
        """The state to resume from, or nothing if the run has not got that far."""
        last = self.path / "last"
        if not last.is_symlink() and not last.exists():
            return None
        path = last / STATE_FILE
        if not path.exists():
            missing = path if last.exists() else f"{last} points to {os.readlink(last)}, which"
            option = self._starts_from if last.exists() else ""
            weights = f"; {option} {last} with another --output starts from its weights" if option else ""
            raise CheckpointError(
                f"{missing} is missing, and without it the run cannot go on; put it back, or remove {last} to start "
                f"the run anew{weights}"
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load fails in many ways on a damaged file, and each means the same here
            raise CheckpointError(f"{path} is damaged ({error}); remove {last} to start the run anew") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} does not hold the state of a run; remove {last} to start the run anew")
        return state


def open_run(path: str | Path, kind: type[Settings]) -> tuple[Settings, Path]:
    """The settings of a run and its best network, or the one in `RUN/best` or `RUN/last`."""
    path = Path(path)
    folder = RunFolder(path.parent if path.name in SLOTS and not (path / SETTINGS_FILE).exists() else path)
    settings = folder.read_settings(kind)
    return settings, folder.network() if folder.path == path else path


def _is_version(name: str, slot: Slot) -> bool:
    return re.fullmatch(rf"{slot}-\d{{9,}}-\d+", name) is not None

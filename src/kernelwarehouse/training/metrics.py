"""What happened, as lines of JSON and as TensorBoard scalars."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelwarehouse._files import write_file
from kernelwarehouse.errors import TrainingError
from kernelwarehouse.training.run_folder import TENSORBOARD, RunFolder


class MetricsLog:
    """Appends to `metrics.jsonl` and `tensorboard/`. A resumed run first drops what lies after its checkpoint."""

    def __init__(self, folder: RunFolder, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra, which `train` has asked for

        self._path = folder.metrics_path
        kept = [line for line in read_metrics(self._path) if line["step"] <= resumed_at]
        with self._failures_told():
            write_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            self._board = SummaryWriter(str(folder.path / TENSORBOARD), purge_step=resumed_at + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        with self._failures_told():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step} | values) + "\n")
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        with self._failures_told():
            self._board.close()

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"the metrics cannot be written to {self._path} and {self._path.with_name(TENSORBOARD)} ({error}); put "
                "that right, and the same command goes on from the last checkpoint"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines. What follows the last line's end was cut short by a kill and is no line; nor is there one if
    there is no file."""
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    return [_parse(text, f"line {number} of {path}") for number, text in enumerate(whole, start=1) if text.strip()]


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:  # bytes that are no text, or text that is no JSON
        raise TrainingError(f"{where} is damaged ({error}); remove the line to go on without it") from error
    if not isinstance(line, dict) or type(line.get("step")) is not int or type(line.get("kind")) is not str:
        raise TrainingError(
            f"{where} is damaged: {text[:80].decode()} does not name the kind of the report and its step; remove the "
            "line to go on without it"
        )
    return line

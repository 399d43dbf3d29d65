"""What happened, as lines of JSON and as TensorBoard scalars."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from kernelwarehouse._files import write_file
from kernelwarehouse.training.run_folder import RunFolder


class MetricsLog:
    """Appends to `metrics.jsonl` and `tensorboard/`. A resumed run first drops what lies after its checkpoint."""

    def __init__(self, folder: RunFolder, resumed_at: int) -> None:
        self._path = folder.metrics_path
        kept = [line for line in read_metrics(self._path) if line["step"] <= resumed_at]
        write_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board = SummaryWriter(str(folder.path / "tensorboard"), purge_step=resumed_at + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step} | values) + "\n")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a line cut short by a kill is not one."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines

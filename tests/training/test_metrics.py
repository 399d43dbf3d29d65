"""Lines and scalars of a run."""

import json
from pathlib import Path

import pytest

from kernelwarehouse.errors import TrainingError
from kernelwarehouse.training.metrics import MetricsLog, read_metrics
from kernelwarehouse.training.run_folder import RunFolder


def test_metrics_after_the_checkpoint_are_dropped_on_resuming(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder, resumed_at=0)
    for step in range(1, 6):
        log.write("step", step, {"loss": 1 / step, "tau": None})
    log.close()
    with folder.metrics_path.open("a") as file:
        file.write('{"kind": "step", "st')
    log = MetricsLog(folder, resumed_at=3)
    log.write("step", 4, {"loss": 0.0, "tau": 0.5})
    log.close()
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3] == {"kind": "step", "step": 4, "loss": 0.0, "tau": 0.5}
    assert read_metrics(folder.metrics_path) == lines


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"5",
        b"null",
        b'{"kind": "step"}',
        b'{"kind": "step", "step": "2"}',
        b'{"step": 2}',
        b"\xff\x00\x01",
        b"{",
    ],
)
def test_damaged_metrics_are_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + line + b"\n")
    for use in (lambda: read_metrics(path), lambda: MetricsLog(RunFolder(tmp_path), resumed_at=3)):
        with pytest.raises(TrainingError, match=r"line 2 of .*metrics\.jsonl is damaged.*remove the line"):
            use()
    path.write_bytes(path.read_bytes()[:-1])  # without its end, a line was cut short by a kill
    assert read_metrics(path) == [{"kind": "step", "step": 1}]


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(RunFolder(tmp_path), resumed_at=0)
    log.write("epoch", 3, {"top1": 0.5, "tau": None})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["epoch/top1"]
    assert [(event.step, event.value) for event in events.Scalars("epoch/top1")] == [(3, 0.5)]


def test_metrics_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder, 0)
    folder.metrics_path.unlink()
    folder.metrics_path.mkdir()
    with pytest.raises(TrainingError, match=r"metrics.jsonl.*Is a directory.*the same command goes on"):
        log.write("step", 1, {"loss": 1.0})
    log.close()

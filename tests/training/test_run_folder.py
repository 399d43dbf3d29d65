"""What a run leaves on disk survives failed writes, and says what it is."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.training.metrics import MetricsLog, read_metrics
from kernelwarehouse.training.run_folder import RunFolder
from tiny_things import TINY_RESNET


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that is nearly full: the system itself refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("kw1x_resnet18", num_classes=4, **TINY_RESNET)


def test_networks_are_readable_and_only_the_newest_is_kept(tmp_path: Path, model: nn.Module) -> None:
    folder = RunFolder(tmp_path)
    folder.write("last", 1, model, {"step": 1})
    folder.write("best", 1, model)
    kw.set_temperature(model, 0.25)
    folder.write("last", 2, model, {"step": 2})
    assert kw.get_temperature(kw.load(tmp_path / "last")) == 0.25
    assert kw.get_temperature(kw.load(tmp_path / "best")) == 1
    assert folder.read_state() == {"step": 2}
    kept = sorted(path.name.split("-")[0] for path in (tmp_path / ".versions").iterdir())
    assert kept == ["best", "last"]


def test_static_network_is_readable_too(tmp_path: Path) -> None:
    static = timm.create_model("resnet18", num_classes=4)
    RunFolder(tmp_path).write("last", 1, static)
    torch.testing.assert_close(kw.load(tmp_path / "last").state_dict(), static.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("limit", [100_000, 1_500_000])
def test_full_disk_keeps_the_checkpoint_before(tmp_path: Path, model: nn.Module, limit: int) -> None:
    """The smaller limit stops the network's file, the larger one the state's."""
    folder = RunFolder(tmp_path)
    state = {"step": 1, "more": torch.zeros(500_000)}
    folder.write("last", 1, model, state)
    before = {path: path.read_bytes() for path in (tmp_path / "last").iterdir()}
    assert min(limit for path in before if path.stat().st_size > limit)
    with files_no_larger_than(limit), pytest.raises(TrainingError, match=r"step 2 could not.*before is intact in.*MB"):
        folder.write("last", 2, model, state)
    assert {path: path.read_bytes() for path in (tmp_path / "last").iterdir()} == before
    assert len(list((tmp_path / ".versions").glob("last-*"))) == 1
    folder.write("last", 2, model, state | {"step": 2})
    assert folder.read_state()["step"] == 2


def test_left_over_pieces_are_no_checkpoint_and_are_cleared_away(tmp_path: Path, model: nn.Module) -> None:
    folder = RunFolder(tmp_path)
    folder.write("last", 1, model, {"step": 1})
    piece = tmp_path / ".versions" / "last-000000002-123"
    piece.mkdir()
    (piece / "training.pt").write_bytes(b"half")
    (tmp_path / ".versions" / "last.link").symlink_to("nowhere")
    assert folder.read_state() == {"step": 1}
    folder.write("last", 3, model, {"step": 3})
    assert folder.read_state() == {"step": 3}
    assert not piece.exists()


def test_damaged_state_is_named(tmp_path: Path, model: nn.Module) -> None:
    folder = RunFolder(tmp_path)
    folder.write("last", 1, model, {"step": 1})
    (tmp_path / "last" / "training.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"training\.pt is damaged"):
        folder.read_state()


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    settings = {"model": "resnet18", "seed": 0, "recipe": {"epochs": 2, "mixup": 0.0}}
    folder.claim(settings)
    folder.claim(settings)
    changed = settings | {"recipe": {"epochs": 3, "mixup": 0.0}}
    with pytest.raises(TrainingError, match=r"other settings \(recipe\.epochs: there 2, now 3\)"):
        folder.claim(changed)
    assert folder.read_settings() == settings


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="is not the folder of a run"):
        RunFolder(tmp_path).read_settings()
    with pytest.raises(TrainingError, match="no checkpoint yet"):
        RunFolder(tmp_path).network()


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


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(RunFolder(tmp_path), resumed_at=0)
    log.write("epoch", 3, {"top1": 0.5, "tau": None})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["epoch/top1"]
    assert [(event.step, event.value) for event in events.Scalars("epoch/top1")] == [(3, 0.5)]

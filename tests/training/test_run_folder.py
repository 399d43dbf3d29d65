"""What a run leaves on disk survives failed writes, and says what it is."""

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import RunSettings
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
def settings(plain_recipe: Recipe) -> RunSettings:
    return RunSettings("resnet18", "striped", ("rows", "columns"), 16, 0, plain_recipe)


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
    with (
        files_no_larger_than(limit),
        pytest.raises(TrainingError, match=r"step 2 could not.*checkpoint is kept in.*MB"),
    ):
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


def test_other_settings_are_refused_by_name(tmp_path: Path, settings: RunSettings) -> None:
    folder = RunFolder(tmp_path / "run")
    for _ in range(2):
        with folder.claimed(settings):
            pass
    changed = replace(settings, recipe=settings.recipe.with_overrides({"epochs": 3}), classes=("c",) * 1000)
    with pytest.raises(TrainingError, match=r"other settings \(classes.*; recipe\.epochs: there 2, now 3\)") as caught:
        claim(folder, changed)
    assert len(str(caught.value)) < 1000
    assert folder.read_settings() == settings


def claim(folder: RunFolder, settings: RunSettings) -> None:
    with folder.claimed(settings):
        pass


def test_changed_data_are_refused_with_what_differs(tmp_path: Path, settings: RunSettings) -> None:
    folder = RunFolder(tmp_path)
    table = {"images": 45_000, "labels": "1", "content": "2"}
    claim(folder, replace(settings, fingerprint={"training": table, "validation": table}))
    for training, validation, message in (
        ({"images": 50_000, "labels": "9"}, {}, r"\(training images: there 45,000, now 50,000\)"),
        ({}, {"labels": "9"}, r"\(validation labels differ\)"),
        ({"content": "9"}, {"content": "9"}, r"\(training images differ; validation images differ\)"),
    ):
        other = replace(settings, fingerprint={"training": table | training, "validation": table | validation})
        with pytest.raises(
            TrainingError, match=rf"run on other data, of the same name striped {message}; use the same"
        ):
            claim(folder, other)


def test_runs_of_the_formats_before_go_on(tmp_path: Path, settings: RunSettings) -> None:
    old = settings.as_dict()
    new = ("decay_logits", "decay_layer_scale", "matched_steps", "cosine_after_warmup", "drop_path_rule", "ema_warmup")
    for field in new:
        del old["recipe"][field]
    (tmp_path / "run.json").write_text(json.dumps(old | {"format": 2}))
    # Recipe `small` still does what all did then, but for its rates.
    settings = replace(settings, recipe=settings.recipe.with_overrides({"matched_steps": False}))
    assert RunFolder(tmp_path).read_settings() == settings
    other = settings.recipe.with_overrides({"decay_logits": True, "drop_path_rule": "even"})
    with pytest.raises(TrainingError, match=r"recipe\.decay_logits: there False, now True; recipe\.drop_path_rule"):
        claim(RunFolder(tmp_path), replace(settings, recipe=other))
    del old["format"], old["fingerprint"]
    (tmp_path / "run.json").write_text(json.dumps(old))
    claim(RunFolder(tmp_path), replace(settings, fingerprint={"training": {"images": 3}}))
    assert RunFolder(tmp_path).read_settings() == settings


def test_newer_formats_are_refused(tmp_path: Path, settings: RunSettings) -> None:
    (tmp_path / "run.json").write_text(json.dumps(settings.as_dict() | {"format": 4, "unheard": 1}))
    for use in (RunFolder(tmp_path).read_settings, lambda: claim(RunFolder(tmp_path), settings)):
        with pytest.raises(TrainingError, match=r"run\.json has format 4.*formats up to 3; a newer version wrote it"):
            use()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"{", "is damaged"),
        (b"\xff\xfe\x00junk", "cannot be read"),
        (b"[" * 100_000, "is damaged"),
        (b"[1, 2]", r"holds \[1, 2\], not the settings of a run"),
        (b"null", "not the settings of a run"),
        ({"format": "two"}, "its format is 'two'"),
        ({"format": 0}, "its format is 0"),
        ({"image_size": True}, "image_size is True"),
        ({"image_size": -1}, "image_size is -1"),
        ({"classes": [1, 2]}, r"classes are \[1, 2\]"),
        ({"classes": []}, r"classes are \[\]"),
        ({"recipe": {"epochs": 1}}, "does not say summary"),
        ({"recipe": 7}, "recipe is 7"),
        ({"fingerprint": "x"}, "fingerprint is 'x'"),
        *[({name: None}, name) for name in ("model", "data", "seed", "arguments")],
    ],
)
def test_damaged_settings_are_named(
    tmp_path: Path, settings: RunSettings, damage: bytes | dict[str, Any], message: str
) -> None:
    content = damage if isinstance(damage, bytes) else json.dumps(settings.as_dict() | damage).encode()
    (tmp_path / "run.json").write_bytes(content)
    for use in (
        RunFolder(tmp_path).read_settings,
        lambda: claim(RunFolder(tmp_path), settings),
        lambda: open_trained(tmp_path),
    ):
        with pytest.raises(TrainingError, match=rf"run\.json.*{message}"):
            use()


def test_settings_without_a_key_are_named(tmp_path: Path, settings: RunSettings) -> None:
    for name in settings.as_dict().keys() - {"format"}:
        values = settings.as_dict()
        del values[name]
        (tmp_path / "run.json").write_text(json.dumps(values))
        with pytest.raises(TrainingError, match=rf"run\.json is damaged: it does not say '{name}'"):
            RunFolder(tmp_path).read_settings()


def test_damaged_fingerprints_differ(tmp_path: Path, settings: RunSettings) -> None:
    (tmp_path / "run.json").write_text(json.dumps(settings.as_dict() | {"fingerprint": {"training": 5}}))
    with pytest.raises(TrainingError, match="training images: there 0, now 3"):
        claim(RunFolder(tmp_path), replace(settings, fingerprint={"training": {"images": 3}}))


def test_checkpoints_without_settings_are_refused(tmp_path: Path, settings: RunSettings, model: nn.Module) -> None:
    RunFolder(tmp_path).write("last", 1, model, {"step": 1})
    with pytest.raises(TrainingError, match=r"has checkpoints but no run\.json.*--from"):
        claim(RunFolder(tmp_path), settings)
    assert not (tmp_path / "run.json").exists()


def test_arguments_that_are_no_json_are_refused(tmp_path: Path, settings: RunSettings) -> None:
    with pytest.raises(TrainingError, match=r"arguments of resnet18.*cannot be stored as JSON"):
        claim(RunFolder(tmp_path), replace(settings, arguments={"act_layer": nn.ReLU}))


def test_folders_that_cannot_be_used_are_named(tmp_path: Path, settings: RunSettings) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TrainingError, match=r"file.* cannot be made a folder for the run"):
            claim(RunFolder(path), settings)
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(TrainingError, match="cannot be locked for a run"):
        claim(RunFolder(tmp_path / "run"), settings)


@pytest.mark.parametrize(
    "name", [".versions", "run.json", "metrics.jsonl", "tensorboard", ".lock", ".lock-holder.json"]
)
def test_links_out_of_the_folder_are_refused(
    tmp_path: Path, settings: RunSettings, model: nn.Module, name: str
) -> None:
    outside, folder = tmp_path / "outside", RunFolder(tmp_path / "run")
    outside.mkdir()
    (outside / "last-000000001-1").mkdir()
    folder.path.mkdir()
    (folder.path / name).symlink_to(outside)
    uses = [lambda: claim(folder, settings), lambda: folder.write("last", 2, model, {"step": 2})]
    for use in uses:
        with pytest.raises(
            TrainingError, match=rf"{re.escape(name)} is a symbolic link to .*outside; links are refused"
        ):
            use()
    assert [path.name for path in outside.rglob("*")] == ["last-000000001-1"]
    assert [path.name for path in folder.path.iterdir()] == [name]


@pytest.mark.parametrize("target", ["../outside", ".versions", ".versions/../../outside", ".versions/best-000000001-1"])
def test_slots_that_lead_elsewhere_are_refused(
    tmp_path: Path, settings: RunSettings, model: nn.Module, target: str
) -> None:
    (tmp_path / "outside").mkdir()
    folder = RunFolder(tmp_path / "run")
    claim(folder, settings)
    (folder.path / "last").symlink_to(target)
    for use in (lambda: claim(folder, settings), lambda: folder.write("last", 1, model)):
        with pytest.raises(TrainingError, match=rf"last is a symbolic link to {re.escape(target)}; a run leaves there"):
            use()
    assert list((tmp_path / "outside").iterdir()) == []


def test_slots_that_are_folders_are_refused(tmp_path: Path, settings: RunSettings) -> None:
    folder = RunFolder(tmp_path)
    claim(folder, settings)
    (tmp_path / "best").mkdir()
    with pytest.raises(TrainingError, match=r"best is no symbolic link; a run leaves there a link to \.versions/best-"):
        claim(folder, settings)


def test_only_own_versions_are_cleared_away(tmp_path: Path, model: nn.Module) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write("last", 1, model, {"step": 1})
    versions, outside = folder.path / ".versions", tmp_path / "outside"
    outside.mkdir()
    (outside / "content").write_text("kept")
    (versions / "last-notes").mkdir()
    (versions / "last-000000007-7").symlink_to(outside)
    (versions / "last-000000008-8").write_text("a file")
    folder.write("last", 2, model, {"step": 2})
    assert (outside / "content").read_text() == "kept"
    names = {path.name for path in versions.iterdir()} - {(folder.path / "last").readlink().name}
    assert names == {"last-notes", "last-000000007-7", "last-000000008-8"}


def test_checkpoints_are_on_disk_before_the_link_is_replaced(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    happened: list[int | str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        happened.append(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    def replace_noted(old: Path, new: Path) -> None:
        happened.append(f"renamed to {Path(new).name}")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace_noted)
    folder.write("last", 1, model, {"step": 1})
    link = happened.index("renamed to last")
    for path in (*(tmp_path / "last").iterdir(), tmp_path / "last", tmp_path / ".versions"):
        assert path.stat().st_ino in happened[:link], path
    assert happened[link + 1 :] == [tmp_path.stat().st_ino]


def test_missing_state_is_no_new_run(tmp_path: Path, model: nn.Module) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_state() is None
    folder.write("last", 1, model, {"step": 1})
    (tmp_path / "last" / "training.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"last/training\.pt is missing.*remove .*last to start.*--from .*last with"
    ):
        folder.read_state()
    shutil.rmtree((tmp_path / "last").resolve())
    with pytest.raises(
        CheckpointError, match=r"last points to \.versions/last-.*, which is missing.*start the run anew$"
    ):
        folder.read_state()


def test_nobody_is_sent_to_an_option_that_there_is_not(tmp_path: Path, settings: RunSettings, model: nn.Module) -> None:
    folder = RunFolder(tmp_path, starts_from="")
    folder.write("last", 1, model)
    with pytest.raises(CheckpointError, match=r"training\.pt is missing.* remove .*last to start the run anew$"):
        folder.read_state()
    with pytest.raises(TrainingError, match=r"has checkpoints but no run\.json.* or use another --output$"):
        claim(folder, settings)
    (tmp_path / "best").mkdir()
    with pytest.raises(TrainingError, match=r"best is no symbolic link; .*: use another --output$"):
        claim(folder, settings)


def test_second_run_in_a_folder_is_told_who_is_there(tmp_path: Path, settings: RunSettings) -> None:
    folder = RunFolder(tmp_path)
    with folder.claimed(settings):
        with pytest.raises(TrainingError, match=rf"in use by process {os.getpid()} on .+ since 2\d\d\d-.* UTC; wait"):
            claim(RunFolder(tmp_path), settings)
        (tmp_path / ".lock-holder.json").write_text("[]")
        with pytest.raises(TrainingError, match="in use by another process"):
            claim(RunFolder(tmp_path), settings)
    claim(folder, settings)
    assert not (tmp_path / ".lock-holder.json").exists()


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="is not the folder of a run"):
        RunFolder(tmp_path).read_settings()
    with pytest.raises(TrainingError, match="no checkpoint yet"):
        RunFolder(tmp_path).network()

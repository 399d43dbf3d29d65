import argparse
import pickle
from pathlib import Path

import pytest
import torch

import kernelwarehouse as kw
from kernelwarehouse.saving.published import PUBLISHED
from reference import fill, read_arrays, read_json, relative_error, standard_normal

MODELS = read_json("published_models.json")
LOGITS = read_arrays("published_logits.npz")


def state_dict(name: str) -> dict[str, torch.Tensor]:
    return {key: fill(key, tuple(shape)) for key, shape in MODELS[name]["keys"].items()}


def test_all_published_names_are_known() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_maps_onto_the_model(name: str) -> None:
    published = state_dict(name)
    model = kw.load_published(name, published)
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name]["params"]
    assert kw.get_temperature(model) == 0
    assert not model.training
    # Cells keep their order and warehouses their numbers: the values of each appear exactly once.
    ours = [tensor for key, tensor in model.state_dict().items() if key.endswith("warehouse.cells")]
    theirs = [tensor for key, tensor in published.items() if key.startswith("warehouse_manager")]
    assert len(ours) == len(theirs)
    for cells in theirs:
        assert sum(cells.numel() == own.numel() and torch.equal(cells.flatten(), own.flatten()) for own in ours) == 1
    for tau in (0.0, 0.5):
        kw.set_temperature(model, tau)
        if f"{name}/tau={tau}" in LOGITS:
            with torch.no_grad():
                logits = model.double()(standard_normal(0, (2, 3, 64, 64)).double())
            assert relative_error(logits, LOGITS[f"{name}/tau={tau}"]) < 2e-5  # theirs are of float32


def test_order_of_the_dict_does_not_matter() -> None:
    published = state_dict("kw1x_mobilenetv2_050")
    shuffled = {key: published[key] for key in sorted(published)}
    model, other = (kw.load_published("kw1x_mobilenetv2_050", state) for state in (published, shuffled))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_release_file_with_its_command_line(tmp_path: Path) -> None:
    published = state_dict("kw1d2x_mobilenetv2_050")
    args = argparse.Namespace(model="kw1d2x_mobilenetv2_050", lr=0.05, nested={"epochs": 150})
    wrapped = {"model": {f"module.{key}": value for key, value in published.items()}, "args": args, "epoch": 149}
    torch.save(wrapped, tmp_path / "release.pth")
    model = kw.load_published("kw1d2x_mobilenetv2_050", tmp_path / "release.pth")
    assert torch.equal(model.state_dict()["conv_stem.warehouse.cells"], published["warehouse_manager.weights.0"])


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "evil.pth", "wb") as file:
        torch.save({"model": {}, "args": Evil()}, file, pickle_module=pickle)
    with pytest.raises(kw.CheckpointError, match=r"evil\.pth"):
        kw.load_published("kw1x_resnet18", tmp_path / "evil.pth")
    assert "code ran" not in capsys.readouterr().out


def test_foreign_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(state_dict("kw1d2x_mobilenetv2_050"), path)
    with pytest.raises(kw.CheckpointError, match="does not fit"):
        kw.load_published("kw1d2x_mobilenetv2_100", path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(kw.CheckpointError, match="cannot be read"):
        kw.load_published("kw1d2x_mobilenetv2_050", path)
    with pytest.raises(kw.CheckpointError, match="nowhere"):
        kw.load_published("kw1d2x_mobilenetv2_050", tmp_path / "nowhere.pth")
    with pytest.raises(kw.CheckpointError, match="no state dict"):
        kw.load_published("kw1x_resnet18", {"epoch": 3})
    with pytest.raises(kw.UnknownPresetError, match="kw1x_resnet18"):
        kw.load_published("kw1x_resnet81", {})

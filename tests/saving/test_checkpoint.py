import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.saving import checkpoint
from tiny_things import TINY_RESNET

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class Own(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))


def converted(model: nn.Module) -> nn.Module:
    return kw.convert(model, kw.plan(model, kw.WarehouseConfig(budget=2)))


def features() -> nn.Module:
    return kw.create_model("kw1x_mobilenetv2_050", features_only=True, out_indices=(1, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: converted(timm.create_model("resnet18", num_classes=7, drop_path_rate=0.1, drop_rate=0.2)),
    "torchvision": lambda: converted(torchvision.models.resnet18(num_classes=5)),
    "zoo": lambda: kw.create_model("kw1x_mobilenetv2_050", num_classes=3),
    "features": features,
    "static": lambda: timm.create_model("resnet18", num_classes=4),
}


def outputs(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model.eval()(X)
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    if name != "static":
        kw.set_temperature(model, 0.3)
    kw.save(model, tmp_path / "out")
    loaded = kw.load(tmp_path / "out")
    for one, other in zip(outputs(loaded), outputs(model), strict=True):
        assert torch.equal(one, other)
    assert kw.plan_of(loaded) == kw.plan_of(model)
    assert repr(loaded) == repr(model)
    if name != "static":
        assert kw.get_temperature(loaded) == 0.3
        assert kw.Plan.load(tmp_path / "out" / "plan.json") == kw.plan_of(model)


def test_own_models_are_given_to_load(tmp_path: Path) -> None:
    model = converted(Own())
    kw.save(model, tmp_path)
    with pytest.raises(kw.CheckpointError, match=r"model=Own\(\.\.\.\)"):
        kw.load(tmp_path)
    loaded = kw.load(tmp_path, model=Own())
    assert torch.equal(outputs(loaded)[0], outputs(model)[0])
    with pytest.raises(kw.PlanError, match="another model"):
        kw.load(tmp_path, model=nn.Sequential(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize("layer", [0, 2])
def test_another_stride_than_the_saved_one_is_told(layer: int, tmp_path: Path) -> None:
    model = converted(Own())
    model[layer].stride = (2, 2)
    kw.save(model, tmp_path)
    with pytest.warns(kw.KernelWarehouseWarning, match=rf"stride of layer '{layer}' was \[2, 2\].* is \[1, 1\]"):
        kw.load(tmp_path, model=Own())
    same = Own()
    same[layer].stride = (2, 2)
    assert torch.equal(outputs(kw.load(tmp_path, model=same))[0], outputs(model)[0])


def test_a_static_model_given_to_load_stays_as_it_is(tmp_path: Path) -> None:
    model, given = Own(), Own()
    kw.save(model, tmp_path)
    before = given[0].weight.clone()
    loaded = kw.load(tmp_path, model=given)
    assert given.training
    assert torch.equal(given[0].weight, before)
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_models_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    kw.save(converted(Own()), tmp_path)
    with torch.inference_mode():
        model = kw.load(tmp_path, model=Own())
    model.train()(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_models_without_memory_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(kw.CheckpointError, match=r"no memory for weights: '0.weight' is on the device meta"):
        kw.save(converted(Own()).to("meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_types_and_ties_come_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(x)))

    model = Tied()
    model = kw.convert(model, kw.plan(model)).to(torch.bfloat16)
    kw.save(model, tmp_path)
    loaded = kw.load(tmp_path, model=Tied())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_wrapped_models_are_saved_as_what_they_wrap(tmp_path: Path) -> None:
    model = converted(Own())
    kw.save(nn.DataParallel(torch.compile(model)), tmp_path)
    assert torch.equal(outputs(kw.load(tmp_path, model=Own()))[0], outputs(model)[0])


def test_saving_again_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    kw.save(converted(Own()), tmp_path)
    second = converted(Own())
    kw.save(second, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(outputs(kw.load(tmp_path, model=Own()))[0], outputs(second)[0])


@pytest.mark.parametrize(
    "step, call", [("save_file", 1), ("write_bytes", 1), ("replace", 1), ("replace", 2), ("fsync", 1), ("fsync", 3)]
)
def test_a_failed_save_leaves_the_old_files(
    step: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = converted(Own())
    kw.save(first, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    owner = {"save_file": checkpoint, "write_bytes": Path}.get(step, os)
    works, calls = getattr(owner, step), []

    def fail(*arguments: object, **keywords: object) -> object:
        calls.append(arguments)
        if len(calls) < call:
            return works(*arguments, **keywords)
        if step == "save_file":  # the disk fills up after the first bytes
            Path(str(arguments[1])).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        with pytest.raises(kw.CheckpointError, match="No space left"):
            kw.save(converted(Own()), tmp_path)
    assert len(calls) >= call
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert torch.equal(outputs(kw.load(tmp_path, model=Own()))[0], outputs(first)[0])


def test_files_of_others_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "model-00001-of-00002.safetensors"
    foreign.write_bytes(b"not ours")
    kw.save(converted(Own()), tmp_path)
    kw.save(converted(Own()), tmp_path)
    assert foreign.read_bytes() == b"not ours"
    with pytest.raises(kw.CheckpointError, match="could not be saved"):
        kw.save(converted(Own()), foreign)


def test_only_own_files_are_replaced(tmp_path: Path) -> None:
    kw.save(converted(Own()), tmp_path)
    description = json.loads((tmp_path / "plan.json").read_text())
    for name in ("thesis.safetensors", "notes.txt", "model-1234567.safetensors", "model-ABCDEF01.safetensors"):
        (tmp_path / name).write_text("years of work")
        (tmp_path / "plan.json").write_text(json.dumps(description | {"weights": name}))
        kw.save(converted(Own()), tmp_path)
        assert (tmp_path / name).read_text() == "years of work"


def test_a_plan_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    kw.plan(Own()).save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(kw.CheckpointError, match="overwritten"):
        kw.save(converted(Own()), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


def test_links_are_refused(tmp_path: Path) -> None:
    real, link, model = tmp_path / "real", tmp_path / "link", converted(Own())
    kw.save(model, real)
    link.symlink_to(real)
    whole = {file.name: file.read_bytes() for file in real.iterdir()}
    with pytest.raises(kw.CheckpointError, match=r"link is a symbolic link.*real"):
        kw.save(model, link)
    assert torch.equal(outputs(kw.load(link, model=Own()))[0], outputs(model)[0])  # reading through a link is fine
    for name in ("plan.json", next(name for name in whole if name.startswith("model-"))):
        (real / name).rename(tmp_path / "elsewhere")
        (real / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(kw.CheckpointError, match=f"{name} is a symbolic link"):
            kw.save(model, real)
        (real / name).unlink()
        (tmp_path / "elsewhere").rename(real / name)
    assert {file.name: file.read_bytes() for file in real.iterdir()} == whole


@pytest.mark.parametrize("mask, mode", [(0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        kw.save(converted(Own()), tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}


def test_weights_come_whatever_the_default_device(tmp_path: Path) -> None:
    model = kw.create_model("kw1x_resnet18", num_classes=4, **TINY_RESNET)
    kw.save(model, tmp_path)
    with torch.device("meta"):
        loaded, empty = kw.load(tmp_path), timm.create_model("resnet18", num_classes=4, **TINY_RESNET)
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}
    assert torch.equal(outputs(loaded)[0], outputs(model)[0])
    with pytest.raises(kw.CheckpointError, match=r"conv1\.weight.*meta"):
        kw.load(tmp_path, model=empty)


@pytest.mark.parametrize("library, name, changes", [
    ("kernelwarehouse", "kw1x_resnet18", {}),
    ("kernelwarehouse", "kw1x_resnet18", {"features_only": True, "out_indices": [1, 2]}),
    ("timm", "resnet18", {}),
])  # fmt: skip
def test_files_of_format_1_are_read(library: str, name: str, changes: dict[str, object], tmp_path: Path) -> None:
    arguments = {**TINY_RESNET, "num_classes": 4, **changes}
    model = kw.create_model("kw1x_resnet18", **arguments)
    plan = kw.plan_of(model)
    assert plan is not None
    save_file(model.state_dict(), tmp_path / "model-01234567.safetensors")
    description = {
        "format": 1,
        "weights": "model-01234567.safetensors",
        "class": type(model).__name__,
        "architecture": {"library": library, "name": name, "arguments": arguments},
        "plan": plan.to_dict(),
    }
    (tmp_path / "plan.json").write_text(json.dumps(description))
    for one, other in zip(outputs(kw.load(tmp_path)), outputs(model), strict=True):
        assert torch.equal(one, other)


def test_segmentation_models_are_rebuilt_without_downloads(tmp_path: Path) -> None:
    build = torchvision.models.segmentation.lraspp_mobilenet_v3_large
    model = build(weights=None, weights_backbone=None, num_classes=4)
    kw.save(kw.convert(model, kw.plan(model)), tmp_path)
    assert kw.load(tmp_path)(X)["out"].shape == (2, 4, 32, 32)


def test_damaged_and_foreign_directories(tmp_path: Path) -> None:
    with pytest.raises(kw.CheckpointError, match="nowhere"):
        kw.load(tmp_path / "nowhere")
    kw.save(converted(Own()), tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    whole, description = weights.read_bytes(), json.loads((tmp_path / "plan.json").read_text())
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(kw.CheckpointError, match="cannot be read"):
        kw.load(tmp_path, model=Own())
    weights.unlink()
    with pytest.raises(kw.CheckpointError, match=weights.name):
        kw.load(tmp_path, model=Own())
    weights.write_bytes(whole)
    broken = [
        ({"format": 9}, "format 9.*newer"),
        ({"format": "2"}, "format '2'"),
        ({"names": {"wing": "wing"}}, "names"),
        ({"names": {"2": "2", "3": "2"}}, "name of its own"),
        ({"weights": "../elsewhere.safetensors"}, "beside it"),
        ({"architecture": {"library": "pip", "name": "x"}}, "pip"),
        ({"architecture": {"library": "timm", "name": "resnet18", "arguments": {"wings": 2}}}, "wings"),
        ({"architecture": {"lib": "timm"}}, "none"),
        ({"plan": {"version": 1}}, "damaged plan"),
        ({"architecture": {"library": "timm", "name": "resnet18", "arguments": {}}, "plan": None}, "does not fit"),
    ]
    for change, message in broken:
        (tmp_path / "plan.json").write_text(json.dumps(description | change))
        with pytest.raises(kw.CheckpointError, match=message):
            kw.load(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(kw.CheckpointError, match=r"plan\.json"):
        kw.load(tmp_path)
    (tmp_path / "plan.json").write_text('{"a": 1}')
    with pytest.raises(kw.CheckpointError, match="not a description"):
        kw.load(tmp_path)

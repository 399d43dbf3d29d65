"""The files and folders that bad commands name: a small trained run, damaged copies of it, and data that is none."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from kernelwarehouse.cli import main

GOOD = "--data {data} --recipe small --output {out} --epochs 1 --batch-size 8 --workers 0 --device cpu"
TRAIN = f"train resnet18 {GOOD} --model-arg channels=[8,8,8,8] --model-arg layers=[1,1,1,1]"
"""A command that trains a network in a second, for one thing to be wrong with it."""


def make_places(root: Path) -> dict[str, Path]:
    """Everything by name, with `data` and `run` that are good."""
    places = {"data": root / "good.npz", "run": root / "run", "folder": root / "folder", "missing": root / "missing"}
    places["folder"].mkdir()
    save_npz(places["data"])
    words = TRAIN.format(data=places["data"], out=places["run"])
    assert main(words.split()) == 0
    _add_files(root, places)
    _add_arrays(root, places)
    _add_image_folders(root, places)
    for name, damage in DAMAGES.items():
        places[name] = root / name
        shutil.copytree(places["run"], places[name], symlinks=True)
        damage(places[name])
    return places


def save_npz(path: Path, **changes: object) -> None:
    """A small data set of four classes, with some arrays of it replaced; `None` leaves one out."""
    labels = np.arange(16) % 4
    pixels = (labels[:, None, None, None] * 60 + np.random.default_rng(0).integers(0, 50, (16, 16, 16, 3))).astype("u1")
    arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels, "y_test": labels, "classes": list("abcd")}
    np.savez(path, **{name: np.asarray(value) for name, value in (arrays | changes).items() if value is not None})


def _add_files(root: Path, places: dict[str, Path]) -> None:
    contents: dict[str, bytes] = {
        "empty.npz": b"",
        "empty.png": b"",
        "binary.toml": bytes(range(256)),
        "empty.toml": b"",
        "list.toml": b"[[epochs]]\n",
        "text.png": b"this is no picture",
        "text.npz": b"this is no archive",
        "file": b"a file in place of a folder",
    }
    for name, content in contents.items():
        places[name.replace(".", "_")] = root / name
        (root / name).write_bytes(content)
    places["picture"] = root / "picture.png"
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(places["picture"])
    places["cut_png"] = root / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(places["cut_png"])
    places["cut_png"].write_bytes(places["cut_png"].read_bytes()[:2000])
    places["bad_toml"] = root / "bad.toml"
    places["bad_toml"].write_text("epochs = = 3\n")
    places["markup_toml"] = root / "markup.toml"
    places["markup_toml"].write_text("'[/red]' = 3\n")
    places["pipe"] = root / "pipe.txt"
    os.mkfifo(places["pipe"])


def _add_arrays(root: Path, places: dict[str, Path]) -> None:
    labels, square = np.arange(16) % 4, np.zeros((16, 16, 16, 3), np.uint8)
    changes: dict[str, dict[str, object]] = {
        "scalar_classes": {"classes": "a"},
        "classes_2d": {"classes": [["a", "b"], ["c", "d"]]},
        "few_classes": {"classes": ["a", "b"]},
        "same_classes": {"classes": ["a", "a", "b", "c"]},
        "no_pixels": {"x_train": square[:, :0, :0], "x_test": square[:, :0, :0]},
        "no_images": {"x_train": square[:0], "y_train": labels[:0]},
        "no_validation": {"x_test": square[:0], "y_test": labels[:0]},
        "large_label": {"classes": None, "y_train": np.where(labels == 3, 10**9, labels)},
        "negative_label": {"y_train": labels - 1},
        "float_labels": {"y_train": labels + 0.5},
        "float_pixels": {"x_train": square / 2.0},
        "four_channels": {"x_train": np.zeros((16, 16, 16, 4), np.uint8)},
        "oblong": {"x_train": square[:, :8], "x_test": square[:, :8]},
        "fewer_labels": {"y_train": labels[:-1]},
        "no_test": {"x_test": None, "y_test": None},
        "test_only": {"x_train": None, "y_train": None},
        "x_only": {"y_train": None},
        "markup_classes": {"classes": ["[/red]", "[bold]", "b", "c"]},
        "one_class": {"classes": ["a"], "y_train": labels * 0, "y_test": labels * 0},
    }
    for name, change in changes.items():
        places[name] = root / f"{name}.npz"
        save_npz(places[name], **change)
    places["npy"] = root / "images.npy"
    np.save(places["npy"], square)
    places["pickled"] = root / "pickled.npz"
    np.savez(places["pickled"], x_train=np.array([{"a": 1}], dtype=object))
    places["cut_npz"] = root / "cut.npz"
    places["cut_npz"].write_bytes(places["data"].read_bytes()[:5000])
    places["foreign_npz"] = root / "foreign.npz"
    with zipfile.ZipFile(places["foreign_npz"], "w") as archive:
        archive.writestr("x_train.npy", b"not an array")
    places["broken_npz"] = root / "broken.npz"
    content = bytearray(places["data"].read_bytes())
    content[1000] ^= 255
    places["broken_npz"].write_bytes(bytes(content))


def _add_image_folders(root: Path, places: dict[str, Path]) -> None:
    def fill(folder: Path, count: int, names: tuple[str, ...] = ("a", "b")) -> None:
        for name in names:
            (folder / name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(np.full((16, 16, 3), 40 * number, np.uint8)).save(folder / name / f"{number}.png")

    for name in ("empty_classes", "few_images", "other_validation", "unreadable", "text_folder", "no_train"):
        places[name] = root / name
    fill(places["empty_classes"], 0)
    fill(places["few_images"], 3)
    fill(places["other_validation"] / "train", 3)
    fill(places["other_validation"] / "val", 3, ("a", "c"))
    fill(places["unreadable"] / "train", 4)
    fill(places["unreadable"] / "val", 1)
    for picture in (places["unreadable"] / "train").rglob("*.png"):
        picture.write_bytes(b"")
    (places["text_folder"] / "a").mkdir(parents=True)
    (places["text_folder"] / "a" / "notes.txt").write_text("no picture")
    fill(places["no_train"] / "val", 3, ("a", "b", "c", "d"))


def _edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


def _without(*names: str) -> Callable[[dict], dict]:
    return lambda content: {key: value for key, value in content.items() if key not in names}


def _weights(run: Path, slot: str = "best") -> Path:
    return next((run / slot).glob("*.safetensors"))


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap_weights(run: Path) -> None:
    """A safetensors file that is whole, of another network."""
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"fc.weight": zeros(3, 3)}, _weights(run))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "settings_missing": lambda run: (run / "run.json").unlink(),
    "settings_empty": lambda run: (run / "run.json").write_bytes(b""),
    "settings_binary": lambda run: (run / "run.json").write_bytes(bytes(range(256))),
    "settings_cut": lambda run: (run / "run.json").write_text((run / "run.json").read_text()[:200]),
    "settings_list": lambda run: (run / "run.json").write_text("[1, 2]"),
    "settings_number": lambda run: (run / "run.json").write_text("7"),
    "settings_folder": lambda run: _make_folder(run / "run.json"),
    "settings_without_recipe": lambda run: _edit_json(run / "run.json", _without("recipe")),
    "settings_without_classes": lambda run: _edit_json(run / "run.json", _without("classes")),
    "settings_without_size": lambda run: _edit_json(run / "run.json", _without("image_size")),
    "settings_bad_recipe": lambda run: _edit_json(run / "run.json", lambda content: content | {"recipe": 3}),
    "settings_bad_crop": lambda run: _edit_json(
        run / "run.json", lambda content: content | {"recipe": content["recipe"] | {"evaluation_crop": "x"}}
    ),
    "settings_bad_interpolation": lambda run: _edit_json(
        run / "run.json", lambda content: content | {"recipe": content["recipe"] | {"interpolation": "magic"}}
    ),
    "settings_bad_size": lambda run: _edit_json(run / "run.json", lambda content: content | {"image_size": "x"}),
    "settings_zero_size": lambda run: _edit_json(run / "run.json", lambda content: content | {"image_size": 0}),
    "settings_bad_classes": lambda run: _edit_json(run / "run.json", lambda content: content | {"classes": 4}),
    "settings_few_classes": lambda run: _edit_json(run / "run.json", lambda content: content | {"classes": ["a"]}),
    "no_checkpoints": lambda run: [(run / slot).unlink() for slot in ("best", "last")],
    "dangling": lambda run: shutil.rmtree(run / ".versions"),
    "plan_missing": lambda run: (run / "best" / "plan.json").unlink(),
    "plan_binary": lambda run: (run / "best" / "plan.json").write_bytes(bytes(range(256))),
    "plan_list": lambda run: (run / "best" / "plan.json").write_text("[]"),
    "plan_bad_architecture": lambda run: _edit_json(
        run / "best" / "plan.json", lambda content: content | {"architecture": {"library": "timm", "name": "zzz"}}
    ),
    "plan_odd_architecture": lambda run: _edit_json(
        run / "best" / "plan.json", lambda content: content | {"architecture": [1]}
    ),
    "plan_bad_plan": lambda run: _edit_json(run / "best" / "plan.json", lambda content: content | {"plan": {"a": 1}}),
    "plan_odd_plan": lambda run: _edit_json(run / "best" / "plan.json", lambda content: content | {"plan": [3]}),
    "weights_missing": lambda run: _weights(run).unlink(),
    "weights_empty": lambda run: _weights(run).write_bytes(b""),
    "weights_cut": lambda run: _weights(run).write_bytes(_weights(run).read_bytes()[:-100]),
    "weights_foreign": _swap_weights,
    "weights_folder": lambda run: _make_folder(_weights(run)),
    "state_missing": lambda run: (run / "last" / "training.pt").unlink(),
    "state_empty": lambda run: (run / "last" / "training.pt").write_bytes(b""),
    "state_cut": lambda run: (run / "last" / "training.pt").write_bytes(
        (run / "last" / "training.pt").read_bytes()[:3000]
    ),
    "state_text": lambda run: (run / "last" / "training.pt").write_text("no state"),
    "state_list": lambda run: __import__("torch").save([1, 2], run / "last" / "training.pt"),
    "state_folder": lambda run: _make_folder(run / "last" / "training.pt"),
    "metrics_missing": lambda run: (run / "metrics.jsonl").unlink(),
    "metrics_binary": lambda run: (run / "metrics.jsonl").write_bytes(bytes(range(256))),
    "metrics_list": lambda run: (run / "metrics.jsonl").write_text("[1]\n7\n"),
    "metrics_other": lambda run: (run / "metrics.jsonl").write_text('{"a": 1}\n'),
    "metrics_folder": lambda run: _make_folder(run / "metrics.jsonl"),
    "report_folder": lambda run: _make_folder(run / "report.html"),
    "tensorboard_file": lambda run: (shutil.rmtree(run / "tensorboard"), (run / "tensorboard").write_text("")),
}

"""A description that came from anywhere opens no connection and no file but its own."""

import builtins
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import kernelwarehouse as kw
from tiny_things import TINY_RESNET


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kw.save(kw.create_model("kw1x_resnet18", num_classes=3, **TINY_RESNET), tmp_path / "model")
    torch.save(timm.create_model("resnet18", num_classes=3, **TINY_RESNET).state_dict(), tmp_path / "other.pth")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    return tmp_path / "model"


@pytest.fixture
def reached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses and files that were asked for, but those in the folder and Python's own."""
    kw.load(folder)(torch.zeros(1, 3, 32, 32))  # sources of compiled kernels are read at their first use
    found: list[str] = []

    def connect(*arguments: object, **keywords: object) -> None:
        found.append(str(arguments))
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    works = builtins.open

    def watched(file: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            path = Path(os.fspath(file)).resolve()
            if folder not in path.parents and path.suffix != ".py":
                found.append(str(path))
        return works(file, *arguments, **keywords)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    return found


URL = "https://example.com/weights.pth"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "checkpoint_path": ({"arguments": {"checkpoint_path": "{outside}/other.pth"}}, "checkpoint_path"),
    "overlay": ({"arguments": {"pretrained": True, "pretrained_cfg_overlay": {"url": URL}}}, "pretrained_cfg_overlay"),
    "config": (
        {"arguments": {"pretrained": True, "pretrained_cfg": {"file": "{outside}/other.pth"}}},
        "pretrained_cfg",
    ),
    "cache_dir": ({"arguments": {"cache_dir": "{outside}"}}, "cache_dir"),
    "hub": ({"name": "hf-hub:timm/resnet18.a1_in1k"}, "plain name"),
    "hub, older": ({"name": "hf_hub:timm/resnet18.a1_in1k"}, "plain name"),
    "folder": ({"name": "local-dir:{outside}"}, "plain name"),
    "path": ({"name": "../resnet18"}, "plain name"),
    "number": ({"name": 18}, "plain name"),
    "unknown": ({"name": "resnet18_of_nobody"}, "plain name"),
    "address": ({"arguments": {"act_layer": URL}}, "example"),
    "file": ({"arguments": {"act_layer": "{outside}/other.pth"}}, "act_layer"),
    "dict": ({"arguments": {"block_args": {"attn_layer": "se"}}}, "block_args"),
    "nested": ({"arguments": {"layers": [1, [{"a": 1}]]}}, "layers"),
    "no arguments": ({"arguments": [1]}, "arguments"),
    "weights": ({"library": "torchvision", "arguments": {"weights": "IMAGENET1K_V1"}}, "'weights'"),
    "backbone": (
        {"library": "torchvision", "name": "fcn_resnet50", "arguments": {"weights_backbone": "DEFAULT"}},
        "weights_backbone",
    ),
    "torchvision path": ({"library": "torchvision", "name": "torch.hub:resnet18", "arguments": {}}, "plain name"),
    "library": ({"library": "torch.hub"}, "torch.hub"),
    "list for a library": ({"library": ["timm"]}, "library"),
    "zoo": ({"library": "kernelwarehouse", "arguments": {"checkpoint_path": "{outside}/other.pth"}}, "checkpoint_path"),
    "more": ({"source": URL}, "architecture"),
}


@pytest.mark.parametrize("format_number", [1, 2])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_fetched_or_read(name: str, format_number: int, folder: Path, reached: list[str]) -> None:
    change, message = HOSTILE[name]
    change = json.loads(json.dumps(change).replace("{outside}", str(folder.parent)))
    description = json.loads((folder / "plan.json").read_text())
    description["format"] = format_number
    description["architecture"] |= change
    (folder / "plan.json").write_text(json.dumps(description))
    with pytest.raises(kw.CheckpointError, match=message):
        kw.load(folder)
    assert not reached


def test_weights_of_others_are_not_asked_for(folder: Path, reached: list[str]) -> None:
    """Runs of former versions that started from weights of timm's say so in their description."""
    description = json.loads((folder / "plan.json").read_text())
    description["architecture"]["arguments"]["pretrained"] = True
    (folder / "plan.json").write_text(json.dumps(description))
    assert kw.load(folder)(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    assert not reached


@pytest.mark.parametrize("argument", ["pretrained_cfg_overlay", "act_layer"])
def test_what_may_not_be_asked_for_is_not_written_either(argument: str, tmp_path: Path) -> None:
    value: Any = {"crop_pct": 0.5} if argument != "act_layer" else torch.nn.SiLU
    model = kw.create_model("se_resnet18", num_classes=3, **TINY_RESNET, **{argument: value})
    if argument == "act_layer":
        with pytest.warns(kw.KernelWarehouseWarning, match="SiLU"):
            kw.save(model, tmp_path)
    else:
        kw.save(model, tmp_path)
    assert argument not in (tmp_path / "plan.json").read_text()

"""Checkpoints of every version there was load, and give the outputs that they gave then."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts.write_test_checkpoint import own_network

import kernelwarehouse as kw

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "checkpoints").glob("*/*"))


def test_this_version_has_checkpoints() -> None:
    assert {folder.name for folder in FOLDERS if folder.parent.name == kw.__version__} == {
        "converted",
        "own",
        "static",
        "zoo",
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_kept_checkpoint_loads_and_computes_what_it_did(folder: Path) -> None:
    model = kw.load(folder, model=own_network() if folder.name == "own" else None)
    kept = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        found = model(kept["input"])
    torch.testing.assert_close(found, kept["output"], rtol=1e-3, atol=1e-4)
    if kw.plan_of(model) is not None:
        assert kw.get_temperature(model) == 0.25
        assert kw.plan_of(model) == kw.Plan.load(folder / "plan.json")

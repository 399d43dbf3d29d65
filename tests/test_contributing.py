"""The diffs of docs/contributing.md: each alone adds what the page says it adds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
DIFFS = {
    re.search(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)[1]: diff  # type: ignore[index]
    for diff in re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}

FAMILY = """
import timm
import torch
import kernelwarehouse as kw
from kernelwarehouse.zoo import PRESETS, preset_plan
preset = PRESETS["kw1x_regnetx_002"]
assert preset_plan(preset).parameters_after == preset.parameters
model = timm.create_model("kw1x_regnetx_002", num_classes=3)
kw.save(model, "saved")
assert torch.equal(kw.load("saved")(torch.ones(1, 3, 32, 32)), model.eval()(torch.ones(1, 3, 32, 32)))
"""
FUNCTION = """
import torch
from torch import nn
import kernelwarehouse as kw
from kernelwarehouse.cli import main
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).eval()
plan = kw.plan(model, kw.WarehouseConfig(attention="tanh"))
plan.save("plan.json")
assert kw.Plan.load("plan.json") == plan
converted = kw.convert(model, plan)
x = torch.randn(2, 3, 9, 9)
with torch.no_grad():
    assert torch.allclose(converted(x), model(x), atol=1e-5)
    kw.set_temperature(converted, 0.0)
    assert not torch.allclose(converted(x), model(x), atol=1e-2)
    attention = converted[2].attention
    logits = torch.randn(2, attention.shape.mixtures, attention.shape.cells + 1)
    assert torch.allclose(attention.weights(logits), logits[..., :-1].tanh())
assert main(["plan", "resnet18", "--attention", "tanh"]) == 0
"""
USES = {"src/kernelwarehouse/zoo/regnet.py": FAMILY, "src/kernelwarehouse/attention_functions.py": FUNCTION}


def test_the_page_shows_a_family_and_a_function() -> None:
    assert set(DIFFS) == set(USES)


@pytest.mark.parametrize("changed", USES)
def test_a_diff_is_all_that_is_needed(changed: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # Outside of a repository, git apply works on the folder it is run in.
    apart = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply"], input=DIFFS[changed], text=True, check=True, cwd=tmp_path, env=apart)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, "-c", USES[changed]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

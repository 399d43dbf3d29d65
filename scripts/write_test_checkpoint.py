"""Writes the checkpoints of this version that tests load for ever after: `python scripts/write_test_checkpoint.py`.

They go to tests/data/checkpoints/<version>, and only where that version has none yet: what was written once must load.
Each comes with an input and the outputs it gave.
"""

import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse._files import new_folder

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "checkpoints" / kw.__version__
TINY = {"channels": (32, 32, 32, 32), "layers": (1, 1, 1, 1), "num_classes": 3}


def own_network() -> nn.Module:
    """A network that no library builds by name; the test gives it to `load`."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8))


def networks() -> dict[str, nn.Module]:
    """One of each kind: converted by hand, from the zoo, static, and one's own."""
    backbone = timm.create_model("test_byobnet", num_classes=3)
    config = kw.WarehouseConfig(budget="1/2", low_rank=0.5, overrides=[kw.Override("stage1", attention="softmax")])
    own = own_network()
    return {
        "converted": kw.convert(backbone, kw.plan(backbone, config)),
        "zoo": kw.create_model("kw1x_resnet18", **TINY),
        "static": timm.create_model("test_efficientnet", num_classes=3),
        "own": kw.convert(own, kw.plan(own, kw.WarehouseConfig(budget=2, norm="layer"))),
    }


def main() -> int:
    if FOLDER.exists():
        print(f"{FOLDER} is there already; a version's checkpoints are written once")
        return 1
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    with new_folder(FOLDER) as aside:
        for name, model in networks().items():
            if kw.plan_of(model) is not None:
                kw.set_temperature(model, 0.25)
            kw.save(model, aside / name)
            with torch.no_grad(), kw.force("plain"):
                save_file({"input": x, "output": model.eval()(x)}, aside / name / "expected.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())

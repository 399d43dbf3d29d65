"""Networks of runs that begin with the weights of another one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kernelwarehouse as kw
from kernelwarehouse.errors import CheckpointError, ConfigError
from kernelwarehouse.training.network import build_network
from kernelwarehouse.training.recipe import load_recipe
from tiny_things import TINY_RESNET

# timm starts the last norm of a block at 0, which would hide the converted layers from the outputs.
VISIBLE = TINY_RESNET | {"zero_init_last": False}


def network(
    name: str, *, classes: int = 4, seed: int = 0, weights: Path | None = None, recipe: str = "small", **arguments: Any
) -> torch.nn.Module:
    return build_network(name, load_recipe(recipe), classes, seed=seed, arguments=VISIBLE | arguments, weights=weights)


@pytest.fixture
def static(tmp_path: Path) -> torch.nn.Module:
    """As after training: other weights than those of a new network, and statistics that are none of a new norm."""
    model = network("resnet18", seed=7)
    model.train()(torch.randn(8, 3, 16, 16))
    kw.save(model, tmp_path / "static")
    return model.eval()


def test_a_static_network_becomes_its_twin_with_the_same_outputs(static: torch.nn.Module, tmp_path: Path) -> None:
    twin = network("kw1x_resnet18", weights=tmp_path / "static").eval()
    images = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(twin(images), static(images), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(network("kw1x_resnet18").eval()(images), static(images), atol=1e-2)


def test_the_same_seed_gives_the_same_attention(static: torch.nn.Module, tmp_path: Path) -> None:
    first, again, other = (
        network("kw1x_resnet18", seed=seed, weights=tmp_path / "static").state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert any("attention" in name and not torch.equal(value, other[name]) for name, value in first.items())


def test_a_classifier_for_other_classes_is_new(static: torch.nn.Module, tmp_path: Path) -> None:
    state = network("kw1x_resnet18", classes=3, weights=tmp_path / "static").state_dict()
    assert state["fc.weight"].shape[0] == 3
    assert torch.equal(state["conv1.weight"], static.state_dict()["conv1.weight"])


def test_another_static_network_is_refused(tmp_path: Path) -> None:
    other = build_network("resnet18", load_recipe("small"), 4, seed=0, arguments=TINY_RESNET | {"channels": [8] * 4})
    kw.save(other, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"other holds a static network that cannot be converted .*--from wants"):
        network("kw1x_resnet18", weights=tmp_path / "other")


def test_fine_tuning_does_not_forget_a_static_network_at_once(static: torch.nn.Module, tmp_path: Path) -> None:
    """Recipe `finetune` has no temperature, and attentions that begin by it are random without it."""
    with pytest.raises(ConfigError, match=r"kw1x_resnet18 .*tau_epochs is 0.*begin=logits, or --set tau_epochs=1"):
        network("kw1x_resnet18", weights=tmp_path / "static", recipe="finetune")
    twin = network("kw1x_resnet18", weights=tmp_path / "static", recipe="finetune", begin="logits").eval()
    images = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(twin(images), static(images), rtol=1e-4, atol=1e-5)
    kw.save(network("kw1x_resnet18"), tmp_path / "twin")
    network("kw1x_resnet18", weights=tmp_path / "twin", recipe="finetune")  # its attentions are learnt already

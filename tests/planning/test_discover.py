"""Which layers of a model could be converted, in which order, and which models are refused."""

import gc
import itertools

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.planning.discover import discover


def convolutions(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(into, out, 3) for into, out in itertools.pairwise(widths)))


def test_layers_are_described() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, (1, 3)), nn.Conv3d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6, 5)
    )
    found = discover(model)
    assert [
        (layer.name, layer.kind, layer.kernel_shape, layer.in_channels, layer.groups) for layer in found.layers
    ] == [
        ("0", "conv1d", (6, 4, 3), 4, 1),
        ("1", "conv2d", (6, 4, 1, 3), 4, 1),
        ("2", "conv3d", (6, 2, 2, 2, 2), 4, 2),
        ("4", "linear", (5, 6), 6, 1),
    ]
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.order == "traced"


def test_frozen_layers_are_told_apart() -> None:
    model = convolutions(8, 8, 8, 8)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)  # a bias is no part of a warehouse
    assert discover(model).frozen == {"1"}


def test_single_layers_and_layers_of_other_kinds() -> None:
    assert [layer.label for layer in discover(nn.Conv2d(4, 4, 3)).layers] == ["(model)"]
    found = discover(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.ReLU()))
    assert [(layer.name, layer.kind) for layer in found.static] == [("1", "ConvTranspose2d")]


def test_groups_take_forward_order_and_shared_modules_once() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(8, 8, 1)
            self.first = nn.Conv2d(8, 8, 3, padding=1)
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.again(self.first(x)))

    model = Backwards()
    plan = kw.plan(model)
    assert [layer.spec.name for layer in plan.layers] == ["first", "last"]
    converted = kw.convert(model, plan)
    assert converted.first is converted.again
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(converted(x), model(x))


def test_fused_query_key_value_is_split() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=2)
    plan = kw.plan(model)
    labels = [layer.spec.label for layer in plan.layers]
    assert labels[:4] == ["blocks.0.attn.qkv:value", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    assert {"patch_embed.proj", "head", "blocks.0.attn.qkv:query_key"} <= {layer.name for layer in plan.static}


def test_models_that_cannot_be_planned() -> None:
    model = convolutions(8, 8, 8)
    converted = kw.convert(model, kw.plan(model))
    refused = {
        "already": converted,
        "DataParallel": nn.DataParallel(model),
        "OptimizedModule": torch.compile(model),
        "lazy": nn.Sequential(nn.LazyConv2d(4, 3)),
        "TorchScript": torch.jit.script(model),
        "nn.Module": 3,
    }
    for word, value in refused.items():
        with pytest.raises(kw.PlanError, match=word):
            kw.plan(value)  # type: ignore[arg-type]


def test_quantised_models_are_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    with pytest.raises(kw.PlanError, match="quantised"):
        kw.plan(model)


def test_distributed_models_are_refused(tmp_path: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(kw.PlanError, match=r"DistributedDataParallel.*model\.module"):
            kw.plan(nn.parallel.DistributedDataParallel(convolutions(8, 8)))
    finally:
        gc.collect()  # the wrapper must go before its group
        torch.distributed.destroy_process_group()

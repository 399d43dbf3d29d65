import copy
import itertools

import pytest
import timm
import torch
import torchvision
from torch import nn

import kernelwarehouse as kw

STATIC = {
    "resnet18": ("conv1", "fc"),
    "resnet50": ("conv1", "fc", "layer1.0.conv1", "layer1.0.downsample.0"),
}
PAPER_M = {"resnet18": [56, 47, 47, 27], "resnet50": [87, 104, 138, 47]}


def convolutions(*widths: int, kernel: int = 3) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Conv2d(into, out, kernel, padding=kernel // 2) for into, out in pairs))


def groups(plan: kw.Plan) -> dict[str, list[str]]:
    return {warehouse.name: [layer.spec.label for layer in warehouse.layers] for warehouse in plan.warehouses}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("budget", [0.25, 0.5, 1, 2, 4])
def test_resnets_get_the_papers_m_and_n(library: str, name: str, budget: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name)
    plan = kw.plan(model, kw.WarehouseConfig(budget=budget, exclude=STATIC[name]))
    quarter = 4 if budget < 1 else 1  # half cells below one
    assert [warehouse.mixtures for warehouse in plan.warehouses] == [quarter * m for m in PAPER_M[name]]
    assert [warehouse.cells for warehouse in plan.warehouses] == [int(budget * quarter * m) for m in PAPER_M[name]]


def test_entry_layers_belong_to_the_stage_before() -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model("resnet18"))
    assert "layer2.0.conv1" in groups(plan)["stage1"]
    assert "layer2.0.downsample.0" in groups(plan)["stage1"]
    assert "layer2.0.conv2" in groups(plan)["stage2"]
    assert groups(plan)["stage1"][0] == "layer1.0.conv1"


def test_stages_without_tracing_follow_names_and_widths() -> None:
    model = timm.create_model("resnet18")

    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2, self.layer3, self.layer4 = (getattr(model, f"layer{i}") for i in (1, 2, 3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.sum()) > 0:
                x = self.layer1(x)
            return self.layer4(self.layer3(self.layer2(x)))

    plan = kw.plan(Untraceable())
    assert [warehouse.mixtures for warehouse in plan.warehouses] == PAPER_M["resnet18"]


def test_wide_bottlenecks_do_not_confuse_inner_layers_with_entries() -> None:
    # Its inner width equals the previous stage's output width: only what feeds a layer tells them apart.
    with torch.device("meta"):
        plan = kw.plan(torchvision.models.wide_resnet50_2())
    stage2 = next(names for names in groups(plan).values() if "layer2.1.conv2" in names)
    assert "layer2.0.conv2" in stage2
    assert "layer2.0.conv3" in stage2
    assert "layer2.0.conv1" not in stage2


def test_depthwise_and_pointwise_layers_do_not_share() -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model("mobilenetv2_100"))
    for warehouse in plan.warehouses:
        assert len({layer.spec.depthwise for layer in warehouse.layers}) == 1
        assert len({layer.spec.pointwise for layer in warehouse.layers}) == 1


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


def test_planning_touches_nothing() -> None:
    model = timm.create_model("resnet18")
    before, text = copy.deepcopy(model.state_dict()), repr(model)
    kw.plan(model)
    assert repr(model) == text
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_very_deep_networks_share_in_parts() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(1000)))
    plan = kw.plan(model)
    assert max(len(warehouse.layers) for warehouse in plan.warehouses) <= 32
    assert len(plan.layers) == 1000
    whole = kw.plan(model, kw.WarehouseConfig(max_layers=None))
    assert [warehouse.mixtures for warehouse in whole.warehouses] == [9000]


def test_sharing_by_layer_and_not_at_all() -> None:
    model = timm.create_model("resnet18")
    by_layer = kw.plan(model, kw.WarehouseConfig(sharing="layer"))
    assert by_layer.parameters_after == 11_805_134
    none = kw.plan(model, kw.WarehouseConfig(sharing="none"))
    assert none.parameters_after == 11_783_114
    unpartitioned = kw.plan(model, kw.WarehouseConfig(sharing="layer", spatial_partition=False))
    assert unpartitioned.parameters_after == 11_776_974


def test_same_shapes_only() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    plan = kw.plan(model, kw.WarehouseConfig(sharing="same_shape", exclude=STATIC["resnet50"]))
    assert plan.parameters_after == 26_949_052


def test_fused_query_key_value_is_split() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=2)
    plan = kw.plan(model)
    labels = [layer.spec.label for layer in plan.layers]
    assert labels[:4] == ["blocks.0.attn.qkv:value", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    assert {"patch_embed.proj", "head", "blocks.0.attn.qkv:query_key"} <= {layer.name for layer in plan.static}


def test_overrides_by_layer_and_by_warehouse() -> None:
    model = timm.create_model("resnet18")
    config = kw.WarehouseConfig(
        overrides=(kw.Override("stage4", budget=2, start="many_to_one"), kw.Override("layer1.*.conv1", reduction=1 / 2))
    )
    plan = kw.plan(model, config)
    assert plan.warehouse("stage4").cells == 54
    assert plan.warehouse("stage4").start == "many_to_one"
    assert plan.warehouse("stage3").cells == 47
    assert [layer.hidden for layer in plan.warehouse("stage1").layers] == [32, 16, 32, 16, 16, 16]


def test_explicit_groups() -> None:
    model = convolutions(8, 8, 16, 16)
    plan = kw.plan(model, kw.WarehouseConfig(groups={"late": ["2"], "early": ["0", "1"]}))
    assert groups(plan) == {"early": ["0", "1"], "late": ["2"]}
    partial = kw.plan(model, kw.WarehouseConfig(groups={"early": ["0"]}))
    assert {layer.name: layer.reason for layer in partial.static} == {"1": "in no group", "2": "in no group"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def reasons(model: nn.Module) -> dict[str, str]:
    return {layer.name: layer.reason for layer in kw.plan(model).static}


def test_static_layers_say_why() -> None:
    assert "tied" in reasons(Tied())["head"]
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 4, 3))
    assert "computed" in reasons(normed)["0"]
    transposed = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3))
    assert "can be converted" in reasons(transposed)["1"]
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8))
    assert "directly" in reasons(encoder)["1.linear1"]
    assert "directly" in reasons(encoder)["1.self_attn.out_proj"]
    assert "classifier" in reasons(encoder)["2"]

    class Own(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    assert "Own" in reasons(nn.Sequential(Own(4, 4, 3), nn.Conv2d(4, 4, 3)))["0"]


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.ReLU(), {}, "no layer that can be converted"),
        (nn.Sequential(nn.ConvTranspose2d(3, 3, 3)), {}, "no layer that can be converted"),
        (convolutions(8, 8), {"exclude": ["0"]}, "excluded"),
        (convolutions(8, 8), {"exclude": ["nine"]}, "'nine' matches no layer"),
        (convolutions(8, 8), {"groups": {"a": ["nine"]}}, "'nine' matches no layer"),
        (convolutions(8, 8), {"groups": {"a": ["0"], "b": ["0"]}}, "'a' and 'b'"),
        (convolutions(8, 8), {"groups": {"a": ["0"]}, "exclude": ["0"]}, "excluded"),
        (convolutions(8, 8), {"overrides": [{"pattern": "nine", "budget": 1}]}, "'nine' matches no layer"),
        (convolutions(8, 8, 8), {"overrides": [{"pattern": "0", "budget": 2}]}, "'0' and '1'"),
        (convolutions(9, 9), {"in_ratio": 0.5}, "'0' cannot be split"),
        (convolutions(8, 8), {"sharing": "none", "budget": 0.5}, "sharing 'none'"),
        (convolutions(8, 8), {"start": "many_to_one", "budget": 0.5}, "many_to_one"),
        (convolutions(8, 8), {"start": "one_to_many", "budget": 2}, "one_to_many"),
        (
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)),
            {"spatial_partition": False, "groups": {"a": ["*"]}},
            "differ in size",
        ),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), {"groups": {"a": ["*"]}}, "different axes"),
    ],
)
def test_plans_that_cannot_be(model: nn.Module, config: dict, message: str) -> None:
    with pytest.raises(kw.PlanError) as error:
        kw.plan(model, kw.WarehouseConfig(**config))
    assert message in str(error.value)


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
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["mobilenetv3_large_100", "efficientnet_b0", "regnety_002", "mixer_s16_224", "inception_v3", "resnetv2_50"]
)
def test_odd_widths_do_not_drag_the_others_down(name: str) -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model(name))
    assert plan.parameters_after < 4 * plan.parameters_before
    assert max(warehouse.mixtures for warehouse in plan.warehouses) <= 1024


def test_layers_on_pooled_features_stay_static() -> None:
    with torch.device("meta"):
        assert "pooled" in reasons(timm.create_model("efficientnet_b0"))["blocks.0.0.se.conv_reduce"]
        assert "pooled" in reasons(timm.create_model("resnetv2_50"))["head.fc"]


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.body = nn.Conv2d(8, 8, 3)
        self.stem = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if float(x.mean()) < 1e9:
            x = self.body(x)
        return self.fc(x.mean((2, 3)))


def test_an_example_shows_the_order_where_tracing_fails() -> None:
    plan = kw.plan(DataDependent(), example=torch.randn(1, 3, 8, 8))
    assert [layer.spec.name for layer in plan.layers] == ["body"]
    assert {layer.name for layer in plan.static} == {"stem", "fc"}
    with pytest.raises(kw.PlanError, match="example"):
        kw.plan(DataDependent(), example=torch.randn(1, 4, 8, 8))


def test_a_configuration_is_wanted() -> None:
    with pytest.raises(kw.PlanError, match="WarehouseConfig"):
        kw.plan(convolutions(8, 8), {"budget": 1})  # type: ignore[arg-type]

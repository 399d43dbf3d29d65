from pathlib import Path

import pytest
import timm
import torch

import kernelwarehouse as kw
from kernelwarehouse.zoo import PRESETS, convnext, deit, mobilenetv2, preset_plan, resnet
from kernelwarehouse.zoo._starts import build_backbone
from reference import relative_error

PAPER = {preset.name: preset for family in (resnet, mobilenetv2, convnext, deit) for preset in family.PRESETS}
NAMES = (
    [f"kw{budget}_resnet18" for budget in ("1d4x", "1d2x", "1x", "2x", "4x")]
    + [f"kw{budget}_resnet50" for budget in ("1d2x", "1x", "4x")]
    + [f"kw{budget}_mobilenetv2_{width}" for budget in ("1d2x", "1x", "4x") for width in ("050", "100")]
    + ["kw3d4x_convnext_tiny", "kw1x_convnext_tiny", "kw1x_convnext_tiny_published"]
    + ["kw3d4x_deit_small", "kw1x_deit_small", "kw1x_deit_tiny", "kw4x_deit_tiny"]
)
# The paper's table of m and n, for ConvNeXt in the order of use.
M_AND_N = {
    "kw1d2x_mobilenetv2_100": ([9, 36, 18, 27, 36, 27, 12, 27, 80, 40], [9, 36, 18, 27, 36, 27, 6, 27, 40, 20]),
    "kw1x_mobilenetv2_100": ([9, 36, 34, 78, 18, 42, 27, 102, 36, 120, 27, 58, 27],) * 2,
    "kw4x_mobilenetv2_100": (
        [9, 36, 11, 1, 2, 18, 7, 3, 27, 4, 4, 36, 9, 3, 27, 11, 3, 27, 20],
        [36, 144, 44, 4, 8, 72, 28, 12, 108, 16, 16, 144, 36, 12, 108, 44, 12, 108, 80],
    ),
    "kw3d4x_convnext_tiny": (
        [16, 147, 24, 4, 147, 24, 4, 147, 24, 147, 24, 147, 96, 4, 147, 96],
        [16, 147, 24, 4, 147, 24, 4, 147, 24, 147, 24, 147, 48, 4, 147, 48],
    ),
}


def test_every_preset_of_the_paper_is_there() -> None:
    assert set(NAMES) == set(PAPER)
    assert set(PAPER) <= set(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_claimed_and_the_papers(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        model = kw.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.parameters
    assert kw.plan_of(model).parameters_after == preset.parameters
    if preset.paper and not preset.note:
        assert f"{preset.parameters / 1e6:.2f}M" == preset.paper


@pytest.mark.parametrize("name", M_AND_N)
def test_m_and_n_are_the_papers(name: str) -> None:
    plan = preset_plan(PRESETS[name])
    m, n = M_AND_N[name]
    assert [warehouse.mixtures for warehouse in plan.warehouses] == m
    assert [warehouse.cells for warehouse in plan.warehouses] == n


@pytest.mark.parametrize("name", ["kw1x_resnet18", "kw1d2x_mobilenetv2_050", "kw3d4x_convnext_tiny", "kw1x_deit_tiny"])
def test_networks_run_and_learn(name: str) -> None:
    sizes = {"img_size": 32} if "deit" in name else {}
    model = kw.create_model(name, num_classes=5, in_chans=1, drop_rate=0.1, drop_path_rate=0.1, **sizes)
    kw.set_temperature(model, 0.5)
    logits = model(torch.randn(2, 1, 32, 32))
    assert logits.shape == (2, 5)
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    # The last norms see two numbers a channel here: steps of 0.1 spoil the static ResNet as well.
    torch.optim.SGD(model.parameters(), 1e-4).step()
    assert torch.isfinite(model.eval()(torch.randn(1, 1, 32, 32))).all()


@pytest.mark.parametrize("name", ["kw1x_resnet18", "kw1x_mobilenetv2_050", "kw1x_convnext_tiny", "kw1x_deit_tiny"])
def test_features_are_those_of_the_whole_network(name: str) -> None:
    sizes = {"img_size": 32} if "deit" in name else {}
    whole = kw.create_model(name, **sizes).eval()
    parts = timm.create_model(name, features_only=True, **sizes).eval()
    common = {key.replace("model.", "").replace("_", "."): value for key, value in whole.state_dict().items()}
    state = {key: common[key.replace("model.", "").replace("_", ".")] for key in parts.state_dict()}
    parts.load_state_dict(state)
    kw.set_temperature(whole, 0.5)
    kw.set_temperature(parts, 0.5)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        features = parts(x)
        expected = whole.forward_intermediates(x, indices=len(features), intermediates_only=True)
    for one, other in zip(features, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_timm_knows_the_presets() -> None:
    assert timm.is_model("kw1x_resnet18")
    torch.manual_seed(1)
    model = timm.create_model("kw1d2x_mobilenetv2_050", num_classes=3)
    torch.manual_seed(1)
    twin = kw.create_model("kw1d2x_mobilenetv2_050", num_classes=3)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


def test_unknown_presets_suggest_the_nearest() -> None:
    with pytest.raises(kw.UnknownPresetError, match="kw1x_resnet18"):
        kw.create_model("kw1x_resnet_18")
    with pytest.raises(kw.ConfigError, match="load_published"):
        kw.create_model("kw1x_resnet18", pretrained=True)


@pytest.mark.parametrize("name", ["kw1d2x_resnet18", "kw1d2x_mobilenetv2_050", "kw1x_deit_tiny"])
def test_networks_without_a_classifier(name: str) -> None:
    with torch.device("meta"):
        model = kw.create_model(name, num_classes=0)
        assert model(torch.randn(1, 3, 224, 224)).shape == (1, model.num_features)


def test_arguments_that_timm_does_not_take() -> None:
    with pytest.raises(kw.ConfigError, match="wings"):
        kw.create_model("kw1x_resnet18", wings=2)


@pytest.mark.parametrize("build", [kw.create_model, timm.create_model])
def test_presets_begin_as_they_are_told(build: object, tmp_path: Path) -> None:
    networks = []
    for begin in (None, "temperature", "logits"):
        torch.manual_seed(0)
        networks.append(build("kw1x_small_resnet", num_classes=4, begin=begin).eval())
    assert [kw.get_temperature(network) for network in networks] == [1, 1, 0]
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        first = networks[0](x)
        for network in networks[1:]:
            assert relative_error(network(x), first) < 1e-5
        kw.save(networks[2], tmp_path / "net")
        again = kw.load(tmp_path / "net")
        assert torch.equal(again(x), networks[2](x))
    assert {warehouse.begin for warehouse in kw.plan_of(again).warehouses} == {"logits"}


def test_feature_networks_begin_as_they_are_told() -> None:
    """At the logits a new network of the paper is its static one, and not drawn as in the released code."""
    arguments = {"features_only": True, "out_indices": (1, 2)}
    torch.manual_seed(0)
    static = build_backbone("mobilenetv2_050", arguments).eval()
    torch.manual_seed(0)
    logits = kw.create_model("kw1x_mobilenetv2_050", begin="logits", **arguments).eval()
    assert kw.get_temperature(logits) == 0
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for found, expected in zip(logits(x), static(x), strict=True):
            assert relative_error(found, expected) < 1e-5


def test_presets_that_cannot_begin_so_say_why() -> None:
    with pytest.raises(kw.ConfigError, match="attention is 'softmax'"):
        kw.create_model("kw1x_resnet18_softmax", begin="logits")
    with pytest.raises(kw.ConfigError, match="dy4x_resnet18 is given begin 'logits'"):
        kw.create_model("dy4x_resnet18", begin="logits")
    with pytest.raises(kw.ConfigError, match="begin is 'cold'; one of temperature, logits"):
        kw.create_model("kw1x_small_resnet", begin="cold")

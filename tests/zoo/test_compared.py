"""Every compared network: its count, and that it learns from a step."""

import pytest
import timm
import torch

import kernelwarehouse as kw
from kernelwarehouse import paper
from kernelwarehouse.zoo import PEERS

COUNTS = {
    "se_resnet18": 11_776_552,
    "cbam_resnet18": 11_779_392,
    "eca_resnet18": 11_689_556,
    "cgc_resnet18": 11_717_784,
    "weightnet_resnet18": 11_925_264,
    "dcd_resnet18": 14_703_332,
    "condconv8x_resnet18": 81_353_120,
    "dy4x_resnet18": 45_472_052,
    "dy4x_resnet50": 100_878_072,
    "dy4x_mobilenetv2_100": 12_404_540,
    "dy4x_mobilenetv2_050": 4_567_364,
    "od4x_resnet18": 44_901_640,
    "od4x_resnet50": 90_670_888,
    "od4x_mobilenetv2_100": 11_515_637,
    "od4x_mobilenetv2_050": 4_437_421,
    "kwod4x_mobilenetv2_100": 12_506_955,
}
WITH_TEMPERATURE = [name for name in COUNTS if name.startswith(("dy", "od", "kwod"))]


def test_all_are_there():
    assert [name for name in PEERS if "small_resnet" not in name] == list(COUNTS)


@pytest.fixture(scope="module", params=COUNTS)
def network(request):
    torch.manual_seed(0)
    return request.param, timm.create_model(request.param)


def test_parameters_are_those_of_the_definition(network):
    name, model = network
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name] == PEERS[name].parameters


def test_forward_backward_and_a_step(network):
    name, model = network
    if name in WITH_TEMPERATURE:
        kw.set_temperature(model, 0.5)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    out = model.train()(torch.randn(2, 3, 32, 32))
    assert out.shape == (2, 1000)
    assert out.isfinite().all()
    torch.nn.functional.cross_entropy(out, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert len(moved) > 0.9 * len(before)


@pytest.mark.parametrize("name", COUNTS)
def test_printed_counts_are_the_papers(name):
    printed = f"{paper.published(name).params_millions:.2f}M"
    assert PEERS[name].paper == printed
    if name != "cgc_resnet18":
        assert f"{COUNTS[name] / 1e6:.2f}M" == printed
    else:
        assert PEERS[name].note


def test_annealing_by_the_schedule():
    model = kw.create_model("dy4x_mobilenetv2_050", num_classes=2)
    schedule = kw.TemperatureSchedule(model, steps=4)
    softenings = []
    for _ in range(6):
        softenings.append(model.blocks[1][0].conv_dw.attention.softening(torch.float64).item())
        schedule.step()
    assert softenings == pytest.approx([30, 22.75, 15.5, 8.25, 1, 1])
    kw.set_temperature(model, 1.0)
    assert model.eval().blocks[1][0].conv_dw.attention.softening(torch.float64).item() == 1


@pytest.mark.parametrize("name", ["cbam_resnet18", "condconv8x_resnet18", "od4x_resnet18", "dy4x_mobilenetv2_050"])
def test_backbones_for_features(name):
    model = kw.create_model(name, features_only=True, out_indices=(2, 4))
    shapes = [tuple(feature.shape) for feature in model.eval()(torch.randn(1, 3, 64, 64))]
    assert [shape[2] for shape in shapes] == [8, 2]


@pytest.mark.parametrize("name", ["kwod4x_mobilenetv2_100", "dy4x_mobilenetv2_050", "cbam_resnet18"])
def test_saved_networks_come_back(name, tmp_path):
    model = kw.create_model(name, num_classes=2).eval()
    kw.save(model, tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(kw.load(tmp_path)(x), model(x))


def test_norms_start_at_one():
    model = kw.create_model("cgc_resnet18", num_classes=2)
    assert all((m.weight == 1).all() for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))

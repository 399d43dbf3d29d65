"""A network that begins at its logits is the static one at temperature 0, and learns from there."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kernelwarehouse as kw
from compiled_kernels import COMPILED
from devices import DEVICE
from kernelwarehouse.assemble import STRATEGIES
from kernelwarehouse.attention import Attention, AttentionShape, LowRank
from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS, START_OBSTACLES, ZERO_CELL_START, start_divisor
from kernelwarehouse.config import parse_number
from kernelwarehouse.conversion import converted_layers
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.layers import Conv1d, Conv2d, Conv3d, Linear
from reference import relative_error

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def both_begins(model: nn.Module, **config: object) -> tuple[nn.Module, nn.Module]:
    """The model converted with either begin."""
    plan = kw.plan(model, kw.WarehouseConfig(**config))
    logits = kw.plan(model, kw.WarehouseConfig(**config, begin="logits"))
    assert plan.parameters_after == logits.parameters_after
    return kw.convert(model, plan), kw.convert(model, logits)


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Convolutions, or linear layers, one after the other, and an input."""
    axes = draw(st.integers(0, 3))
    widths = draw(st.lists(st.sampled_from([4, 8, 12]), min_size=2, max_size=4))
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        if axes == 0:
            layers.append(nn.Linear(into, out))
            continue
        groups = draw(st.sampled_from([1, 1, 2, 4]))
        kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        layers.append(CONVS[axes](into, out, kernel, stride, padding=2, groups=groups, bias=draw(st.booleans())))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return nn.Sequential(*layers).double(), torch.randn(3, widths[0], *[5] * axes, dtype=torch.float64)


@settings(max_examples=80)
@given(
    models(),
    st.sampled_from(["1/8", "1/4", "1/2", "3/4", 1, 1.5, 2, 4]),
    st.sampled_from(["one_to_one", "one_to_one", "many_to_one", "one_to_many", "all_to_one"]),
    st.sampled_from(["stage", "layer", "none", "same_shape"]),
    st.sampled_from([None, "1/2"]),
    st.sampled_from(["batch", "layer"]),
    st.booleans(),
)
def test_any_model_begins_as_at_temperature_one(
    case: tuple[nn.Module, Tensor], budget: str | float, start: str, sharing: str, low_rank: str, norm: str, cut: bool
) -> None:
    model, x = case
    number = parse_number(budget, "budget")
    sharing = sharing if cut else "layer"  # whole kernels differ in size
    if (start == "many_to_one" and number < 1) or (start == "one_to_many" and number > 1):
        return
    if sharing == "none" and (number not in (1, 2, 4) or start == "all_to_one" or low_rank):
        return
    config = {"budget": budget, "start": start, "sharing": sharing, "low_rank": low_rank, "norm": norm}
    config |= {"spatial_partition": cut, "static_classifier": False}
    plan = kw.plan(model, kw.WarehouseConfig(**config))
    if not all(any(ranges) for warehouse in plan.warehouses for ranges in warehouse.starts()):
        with pytest.raises(kw.PlanError, match="would start from none of its"):
            both_begins(model, **config)
        return
    temperature, logits = both_begins(model, **config)
    assert (kw.get_temperature(temperature), kw.get_temperature(logits)) == (1, 0)
    for mode in (True, False):
        with torch.no_grad():
            found, expected = logits.train(mode)(x), temperature.train(mode)(x)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
            if start in ("one_to_one", "many_to_one") and number >= 1:
                torch.testing.assert_close(found, model(x), rtol=1e-11, atol=1e-12)
    logits(x).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in logits.parameters())


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_050", "convnext_atto"])
def test_trained_networks_are_what_they_were(name: str) -> None:
    model = timm.create_model(name, num_classes=10)
    x = torch.randn(4, 3, 64, 64)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype).eval()
        upgraded = kw.convert(model, kw.plan(model, kw.WarehouseConfig(begin="logits")))
        with torch.no_grad():
            assert relative_error(upgraded(x.to(dtype)), model(x.to(dtype))) < tolerance
    with torch.no_grad():
        assert relative_error(upgraded.train()(x.double()), model.train()(x.double())) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_its_rounding(dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 64)
    upgraded = kw.convert(layer, kw.plan(layer, kw.WarehouseConfig(begin="logits", static_classifier=False)))
    x, eps = torch.randn(8, 64), torch.finfo(dtype).eps
    with torch.no_grad():
        exact = layer(x)
        with torch.autocast("cpu", dtype):
            assert relative_error(upgraded(x), exact) < eps
        assert relative_error(upgraded.to(dtype)(x.to(dtype)), exact) < eps


def logits_gradient(attention: Attention) -> Tensor:
    """`[mixtures, visible + 1]`."""
    offsets = attention.fc2.bias if attention.shape.low_rank is None else attention.offset
    return offsets.grad.view(attention.shape.mixtures, -1)


@pytest.mark.parametrize(
    "config",
    [
        {"budget": "1/2"},
        {"budget": 1},
        {"budget": 4},
        {"budget": 4, "low_rank": 0.5},
        {"budget": 1, "sharing": "none"},
        {"budget": 2, "sharing": "none", "start": "many_to_one"},
    ],
)
def test_every_logit_can_learn(config: dict[str, object]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 3)).double()
    upgraded = kw.convert(model, kw.plan(model, kw.WarehouseConfig(begin="logits", **config)))
    optimiser = torch.optim.SGD(upgraded.parameters(), lr=1e-3)
    x, target = torch.randn(4, 8, 7, 7, dtype=torch.float64), torch.randn(4, 16, 3, 3, dtype=torch.float64)
    for step in range(2):
        optimiser.zero_grad()
        nn.functional.mse_loss(upgraded(x), target).backward()
        for layer in converted_layers(upgraded).values():
            gradient = logits_gradient(layer.attention)
            if step == 0:
                # A mixture of nothing but the zero cell is zero, however much of it there is.
                empty = ~layer.attention._first_cells.any(1)
                assert bool(empty.any()) == (config["budget"] == "1/2")
                assert not gradient[empty, -1].any()
                gradient = torch.cat([gradient[:, :-1].flatten(), gradient[~empty, -1]])
            assert gradient.count_nonzero() == gradient.numel()
        optimiser.step()


def test_all_parts_of_the_attention_learn_and_the_loss_falls() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    for config in ({}, {"low_rank": 0.5, "budget": 2}, {"sharing": "none"}):
        upgraded = kw.convert(model, kw.plan(model, kw.WarehouseConfig(begin="logits", **config)))
        before = copy.deepcopy(upgraded)
        x, target = torch.randn(16, 4, 6, 6), torch.randn(16, 8, 2, 2)
        optimiser = torch.optim.SGD(upgraded.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(40):
            loss = nn.functional.mse_loss(upgraded(x), target)
            losses.append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert math.isclose(losses[0], nn.functional.mse_loss(model(x), target).item(), rel_tol=1e-5)
        assert losses[-1] < 0.8 * losses[0]
        old = dict(before.named_parameters())
        for name, parameter in upgraded.named_parameters():
            assert not torch.equal(parameter, old[name]), name


STRATEGY_LAYERS = {
    "square": (lambda: nn.Conv2d(8, 16, 3, padding=1), (40, 8, 6, 6)),
    "strided": (lambda: nn.Conv1d(8, 16, 3, stride=2), (40, 8, 9)),
    "solid": (lambda: nn.Conv3d(8, 8, 2), (40, 8, 4, 4, 4)),
    "pointwise": (lambda: nn.Conv2d(8, 16, 1), (40, 8, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), (40, 8, 6, 6)),
    "linear": (lambda: nn.Linear(8, 16), (40, 3, 8)),
}


def results(layer: nn.Module, x: Tensor, way: str) -> dict[str, Tensor]:
    """Output, and the gradients of a fixed random function of it."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with kw.force(way):
        out = layer(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": out.detach(), "input": x.grad} | gradients


@pytest.mark.parametrize("budget", ["1/2", 1, 4])
@pytest.mark.parametrize("low_rank", [None, 0.5])
def test_every_strategy_agrees_where_training_begins(budget: str | int, low_rank: float | None) -> None:
    used = set()
    for make, shape in STRATEGY_LAYERS.values():
        model, x = nn.Sequential(make(), make()).to(DEVICE), torch.randn(shape, device=DEVICE)
        config = kw.WarehouseConfig(budget=budget, low_rank=low_rank, begin="logits", static_classifier=False)
        layer = kw.convert(model, kw.plan(model, config))[0]  # of two that share
        exact = results(layer.double(), x.double(), "plain")
        layer.float()
        for way in STRATEGIES:
            try:
                found = results(layer, x, way)
            except StrategyError:
                continue
            used.add(way)
            for name, expected in exact.items():
                error = (found[name].double() - expected).abs().max()
                assert error <= 2e-5 * expected.abs().max(), (way, name)
    # Half cells are too narrow for the compiled kernels, which are the CPU's.
    compiled = COMPILED and DEVICE.type == "cpu" and budget != "1/2"
    assert used == STRATEGIES.keys() - (set() if compiled else {"native", "depthwise", "rows", "planes", "winograd"})


@pytest.mark.parametrize("low_rank", [None, 0.5])
def test_prepared_networks_give_the_same(low_rank: float | None) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)).eval()
    config = kw.WarehouseConfig(budget=4, low_rank=low_rank, begin="logits", reduction=1 / 64)
    upgraded = kw.convert(model, kw.plan(model, config))
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad():
        assert kw.prepare_inference(upgraded, batch=2).layers
        torch.testing.assert_close(upgraded(x), model(x), rtol=1e-4, atol=1e-5)
        assert {layer.route.forward for layer in converted_layers(upgraded).values()} == {"basis"}


@pytest.mark.parametrize("kind", [Conv1d, Conv2d, Conv3d])
def test_layers_made_by_hand_are_as_new_at_both_begins(kind: type[Conv1d]) -> None:
    built = []
    for begin in ("temperature", "logits"):
        torch.manual_seed(0)
        built.append(kind(8, 16, 3, config=kw.WarehouseConfig(budget=2, begin=begin)))
    x = torch.randn(2, 8, *[4] * kind.axes)
    torch.testing.assert_close(built[1](x), built[0](x))
    assert "begin='logits'" in repr(built[1])
    assert "begin" not in repr(built[0])


def test_drawn_cells_are_made_up_for_too() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 3))
    plan = kw.plan(model, kw.WarehouseConfig(begin="logits"))
    converted = kw.convert(model, plan, initializer=lambda kernel: kernel.fill_(kernel.shape[0]))
    x = torch.randn(2, 8, 7, 7)
    for layer, value in zip(converted, (8, 16), strict=True):
        expected = nn.functional.conv2d(x, torch.full_like(model[0].weight, value)[:1]).expand(-1, value, -1, -1)
        torch.testing.assert_close(layer(x) - layer.bias[:, None, None], expected)


def test_a_schedule_leaves_the_temperature_where_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))
    temperature, logits = both_begins(model)
    schedule = kw.TemperatureSchedule(logits, steps=4)
    for _ in range(6):
        assert (schedule.temperature, kw.get_temperature(logits)) == (0, 0)
        schedule.step()
    kw.set_temperature(logits, 1)
    assert kw.get_temperature(logits) == 0
    schedule.load_state_dict(kw.TemperatureSchedule(temperature, steps=8).state_dict())
    assert (schedule.temperature, kw.get_temperature(logits)) == (0, 0)


def test_warehouses_of_both_kinds_in_one_model() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).double()
    overrides = [kw.Override("1", begin="logits")]
    plan = kw.plan(model, kw.WarehouseConfig(sharing="layer", overrides=overrides))
    assert [warehouse.begin for warehouse in plan.warehouses] == ["temperature", "logits"]
    mixed = kw.convert(model, plan)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(mixed(x), model(x))
    schedule = kw.TemperatureSchedule(mixed, steps=2)
    for expected in (1, 0.5, 0, 0):
        temperatures = [layer.attention.get_temperature() for layer in mixed]
        assert (schedule.temperature, kw.get_temperature(mixed), temperatures) == (expected, expected, [expected, 0])
        schedule.step()


def test_layers_of_one_warehouse_begin_alike() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.raises(kw.PlanError, match="begin 'temperature' and 'logits'"):
        kw.plan(model, kw.WarehouseConfig(overrides=[kw.Override("1", begin="logits")]))


def test_plans_and_files_keep_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    plan = kw.plan(model, kw.WarehouseConfig(begin="logits"))
    plan.save(tmp_path / "plan.json")
    assert kw.Plan.load(tmp_path / "plan.json") == plan
    assert kw.plan(model).with_warehouse("stage1", begin="logits").warehouses == plan.warehouses
    upgraded = kw.convert(model, plan)
    with torch.no_grad():
        for parameter in upgraded.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    kw.save(upgraded, tmp_path / "saved")
    again = kw.load(tmp_path / "saved", model=model)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(again(x), upgraded.eval()(x))
    assert kw.plan_of(again) == plan
    assert kw.get_temperature(again) == 0


def test_plans_of_old_files_begin_at_the_temperature() -> None:
    plan = kw.plan(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)))
    data = plan.to_dict()
    for part in (data["config"], *data["warehouses"]):
        assert part.pop("begin") == "temperature"
    assert kw.Plan.from_dict(data) == plan


def test_obstacles_are_what_they_say() -> None:
    """Functions begin at their logits if these give the cells alone, and every other logit has a slope."""
    assert START_OBSTACLES.keys() <= ATTENTION_FUNCTIONS.keys()
    for name, obstacle in START_OBSTACLES.items():
        logits = torch.tensor([0.0, 1, 0, ZERO_CELL_START], dtype=torch.float64, requires_grad=True)
        weights = ATTENTION_FUNCTIONS[name](logits)
        slopes = torch.stack([torch.autograd.grad(weight, logits, retain_graph=True)[0] for weight in weights])
        alone = weights[[0, 2]].count_nonzero() == 0
        learns = bool((slopes != 0).any(0).all())
        assert (obstacle is None) == (alone and learns)
        assert (obstacle is not None and "above 0" in obstacle) == (not alone)
        if obstacle is None:
            torch.testing.assert_close((weights[1] * start_divisor(1)).item(), 1.0)


@pytest.mark.parametrize("name", [name for name, obstacle in START_OBSTACLES.items() if obstacle])
def test_functions_that_cannot_begin_so_are_refused(name: str) -> None:
    message = rf"begin is 'logits' and attention is '{name}', which .*'caf'"
    with pytest.raises(kw.ConfigError, match=message):
        kw.WarehouseConfig(begin="logits", attention=name)
    with pytest.raises(kw.ConfigError, match=f"override 'a': {message}"):
        kw.Override("a", begin="logits", attention=name)
    with pytest.raises(kw.ConfigError, match=message):
        AttentionShape(4, 2, 3, 16, function=name, begin="logits")
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.raises(kw.ConfigError, match=f"layer '1': {message}"):
        kw.plan(model, kw.WarehouseConfig(begin="logits", overrides=[kw.Override("1", attention=name)]))


def test_starts_that_logits_cannot_give_are_refused() -> None:
    with pytest.raises(kw.ConfigError, match="start is 'none'"):
        kw.WarehouseConfig(begin="logits", start="none")
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.raises(kw.ConfigError, match="start is 'none'"):
        kw.plan(model, kw.WarehouseConfig(begin="logits", overrides=[kw.Override("stage1", start="none")]))
    with pytest.raises(kw.PlanError, match="'all_to_one' gives mixtures cells that they do not see"):
        kw.plan(model, kw.WarehouseConfig(begin="logits", sharing="none", start="all_to_one"))
    with pytest.raises(kw.ConfigError, match="was not told"):
        Attention(AttentionShape(4, 2, 3, 16, begin="logits"), None)


@pytest.mark.parametrize("low_rank", [None, LowRank(first=1, local=2, basis=16)])
def test_parameters_are_reset_to_the_start(low_rank: LowRank | None) -> None:
    starts = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    shape = AttentionShape(4, 2, 4, 16, low_rank=low_rank, begin="logits")
    attention = Attention(shape, starts, device="meta").to_empty(device="cpu")
    attention.set_temperature(1)
    attention.reset_parameters()
    expected = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]]) / start_divisor(1)
    torch.testing.assert_close(attention.eval()(torch.randn(3, 4)), expected.expand(3, 2, 4))


def test_linear_layers_by_hand_begin_there_too() -> None:
    layer = Linear(8, 16, config=kw.WarehouseConfig(begin="logits"))
    kernels = layer.attention(torch.randn(2, 8)) @ layer.warehouse.cells.flatten(1)
    torch.testing.assert_close(kernels[0], kernels[1])
    torch.testing.assert_close(kernels[0] * start_divisor(1), layer.warehouse.cells.flatten(1))


def test_layers_that_would_never_wake_are_refused() -> None:
    """The first is zero and followed by a norm and a ReLU: nothing there has a gradient."""
    model = nn.Sequential(
        *(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)),
    )
    config = {"budget": "1/2", "in_ratio": 1, "out_ratio": 1}
    message = r"'stage1': '0' \(1 of 3 layers\) would start from none of its 9 cells.* larger budget than 0.5"
    with pytest.raises(kw.PlanError, match=message):
        kw.plan(model, kw.WarehouseConfig(**config, begin="logits"))
    by_temperature = kw.plan(model, kw.WarehouseConfig(**config))
    with pytest.raises(kw.PlanError, match=message):
        by_temperature.with_warehouse("stage1", begin="logits")
    for wanted in ({"budget": 1}, {"sharing": "layer"}):
        kw.plan(model, kw.WarehouseConfig(**config | wanted, begin="logits"))
    converted = kw.convert(model, by_temperature)  # and by temperature it does wake
    x = torch.randn(4, 16, 8, 8)
    for tau, awake in ((1, False), (0.9, True)):
        kw.set_temperature(converted, tau)
        converted.zero_grad()
        converted(x).square().sum().backward()
        assert bool(converted[0].attention.fc2.weight.grad.any()) == awake

import copy

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kernelwarehouse as kw


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))
    return kw.convert(model, kw.plan(model))


def test_schedule_falls_linearly_to_zero_and_stays() -> None:
    model = small_model()
    schedule = kw.TemperatureSchedule(model, steps=4)
    seen = []
    for _ in range(6):
        seen.append(kw.get_temperature(model))
        schedule.step()
    assert seen == [1, 0.75, 0.5, 0.25, 0, 0]


def test_schedule_resumes_exactly() -> None:
    model, other = small_model(), small_model()
    schedule = kw.TemperatureSchedule(model, steps=7)
    for _ in range(3):
        schedule.step()
    resumed = kw.TemperatureSchedule(other, steps=1)
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(5):
        assert kw.get_temperature(other) == kw.get_temperature(model)
        schedule.step()
        resumed.step()
    assert kw.get_temperature(other) == 0


def test_zero_steps_is_fine_tuning() -> None:
    model = small_model()
    kw.TemperatureSchedule(model, steps=0)
    assert kw.get_temperature(model) == 0


@pytest.mark.parametrize("tau", [0.0, 1.0, 0.3, 1 / 3, 0.1, 0.999])
def test_temperature_is_state(tau: float) -> None:
    model = small_model()
    kw.set_temperature(model, tau)
    assert kw.get_temperature(model) == tau
    fresh = small_model()
    fresh.load_state_dict(model.state_dict())
    assert kw.get_temperature(fresh) == tau
    assert kw.get_temperature(copy.deepcopy(model)) == tau
    assert kw.get_temperature(model.to(torch.bfloat16)) == tau


def test_averaged_models_take_the_temperature_over() -> None:
    model = small_model()
    ema = ModelEmaV3(model, decay=0.9)
    swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa.update_parameters(model)
    kw.set_temperature(model, 0.25)
    ema.update(model)
    swa.update_parameters(model)
    assert kw.get_temperature(ema.module) == 0.25
    assert kw.get_temperature(swa.module) == 0.25


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan"), "1", True])
def test_bad_temperatures(tau: object) -> None:
    model = small_model()
    with pytest.raises(kw.KernelWarehouseError, match="temperature"):
        kw.set_temperature(model, tau)  # type: ignore[arg-type]
    assert kw.get_temperature(model) == 1


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_bad_steps(steps: object) -> None:
    with pytest.raises(kw.KernelWarehouseError, match="steps"):
        kw.TemperatureSchedule(small_model(), steps=steps)  # type: ignore[arg-type]


def test_bad_state() -> None:
    schedule = kw.TemperatureSchedule(small_model(), steps=3)
    with pytest.raises(kw.KernelWarehouseError, match="state"):
        schedule.load_state_dict({"steps": 3})


def test_static_model_has_no_temperature() -> None:
    with pytest.raises(kw.KernelWarehouseError, match="convert"):
        kw.get_temperature(nn.Linear(2, 2))
    with pytest.raises(kw.KernelWarehouseError, match="convert"):
        kw.TemperatureSchedule(nn.Linear(2, 2), steps=3)


def test_no_start_strategy_means_temperature_zero() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    model = kw.convert(model, kw.plan(model, kw.WarehouseConfig(start="none")))
    assert kw.get_temperature(model) == 0
    kw.set_temperature(model, 1.0)
    assert kw.get_temperature(model) == 0

"""Converted layers under DistributedDataParallel, in two real processes."""

import copy
import gc
from pathlib import Path

import torch
import torch.multiprocessing as processes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import kernelwarehouse as kw


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(1), nn.Linear(32, 32)).double()
    config = kw.WarehouseConfig(norm="layer", budget=2, static_classifier=False)
    return kw.convert(model, kw.plan(model, config))


def train(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    schedule = kw.TemperatureSchedule(model, steps=4)
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
        schedule.step()
    return copy.deepcopy(model.state_dict())


def worker(rank: int, folder: str, x: torch.Tensor) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(make_model())
    train(wrapped, x[2 * rank : 2 * rank + 2])
    torch.save(wrapped.module.state_dict(), f"{folder}/{rank}.pt")
    del wrapped  # torch may wait for itself forever where the wrapper is what lets go of the processes' group
    gc.collect()
    distributed.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    x = torch.randn(4, 4, 6, 6, dtype=torch.float64)
    processes.spawn(worker, (str(tmp_path), x), nprocs=2)
    alone = train(make_model(), x)
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert set(state) == set(alone)
        for key, value in alone.items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)

"""A run goes on by the ways that it has begun with, whatever is measured later: another way rounds otherwise."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernelwarehouse as kw
from kernelwarehouse.assemble import route_table, routing
from kernelwarehouse.assemble.measure import Times
from kernelwarehouse.data import DataSet
from kernelwarehouse.training.api import train
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run import RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.trainer import Trainer
from tiny_things import TINY_RESNET

Machine = Callable[[str], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Becomes, when called, a new machine on which this strategy is the fastest."""
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    monkeypatch.setattr(route_table, "machine_file", lambda device: tmp_path / "no folder" / "routes.json")

    def become(fastest: str) -> None:
        route_table.forget()

        def times(candidates: list, x: Tensor, cells: Tensor, question: routing.Question) -> Times:
            taken = {strategy.name: 0.1 if strategy.name == fastest else 1.0 for strategy in candidates}
            return Times(taken, taken if question.training else {})

        monkeypatch.setattr(routing, "measure", times)

    return become


def _run(data: DataSet, recipe: Recipe, output: Path) -> RunFolder:
    options = RunOptions(workers=0, report_every=1, checkpoint_seconds=0)
    return train("kw1x_resnet18", data, recipe, output, options=options, arguments=TINY_RESNET)


def _weights(folder: RunFolder) -> list[Tensor]:
    return list(kw.load(folder.path / "last").state_dict().values())


@pytest.mark.parametrize("by_rule", [False, True])
def test_a_run_that_goes_on_elsewhere_keeps_its_ways(
    by_rule: bool,
    machine: Machine,
    striped: DataSet,
    plain_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether they were measured or not."""
    if by_rule:
        monkeypatch.setenv(route_table.VARIABLE, route_table.BY_RULE)
    machine("matmul")
    whole = _weights(_run(striped, plain_recipe, tmp_path / "whole"))
    step = Trainer.step

    def broken_off(trainer: Trainer, parts: list) -> Tensor:
        if trainer.steps_done == 3:
            raise KeyboardInterrupt
        return step(trainer, parts)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", broken_off)
        with pytest.raises(KeyboardInterrupt):
            _run(striped, plain_recipe, tmp_path / "broken")
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    machine("grouped")
    resumed = _weights(_run(striped, plain_recipe, tmp_path / "broken"))
    assert all(map(torch.equal, whole, resumed))
    # The other machine would not have come to the same by itself, so the test can tell.
    assert not all(map(torch.equal, whole, _weights(_run(striped, plain_recipe, tmp_path / "elsewhere"))))


def test_the_checkpoint_says_which_ways_were_taken(
    machine: Machine, striped: DataSet, plain_recipe: Recipe, tmp_path: Path
) -> None:
    machine("matmul")
    folder = _run(striped, plain_recipe, tmp_path / "run")
    [routes] = torch.load(folder.path / "last" / "training.pt", weights_only=True)["routes"]
    choices = route_table.from_json(routes, "the checkpoint")
    assert {choice.forward for choice in choices.values()} == {"matmul"}
    assert {key.rsplit(", ", 1)[1] for key in choices} == {"training", "inference"}

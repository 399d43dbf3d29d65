"""Steps: accumulation, temperature, average, precision, and a state from which all goes on as before."""

import copy
import io

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.training.loading import Batch
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.trainer import Trainer
from tiny_things import TINY_RESNET, layer_norm_network


def batch(size: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 16, 16, generator=generator)
    return Batch(images, torch.randint(0, 4, (size,), generator=generator), [])


def cut(whole: Batch, parts: int) -> list[Batch]:
    pieces = zip(whole.images.chunk(parts), whole.targets.chunk(parts), strict=True)
    return [Batch(images, targets, []) for images, targets in pieces]


def tiny_resnet() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("kw1x_resnet18", num_classes=4, **TINY_RESNET)


def trainer_for(model: nn.Module, recipe: Recipe) -> Trainer:
    return Trainer(model, recipe, classes=4, steps_per_epoch=4)


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_accumulated_parts_give_the_step_of_the_whole_batch(plain_recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = layer_norm_network().double()
    whole, parted = (trainer_for(copy.deepcopy(model), plain_recipe) for _ in range(2))
    for step in range(3):
        data = batch(16, step)
        data = data._replace(images=data.images.double())
        losses = whole.step([data]), parted.step(cut(data, 4))
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(tensor, parted.model.state_dict()[name], rtol=1e-7, atol=1e-9, msg=name)
    assert not torch.equal(whole.model.head.fc.weight, model.head.fc.weight)


def test_temperature_falls_once_a_step_however_many_parts(plain_recipe: Recipe) -> None:
    trainer = trainer_for(tiny_resnet(), plain_recipe)
    seen = [kw.get_temperature(trainer.model)]
    for step in range(5):
        trainer.step(cut(batch(16, step), 2))
        seen.append(kw.get_temperature(trainer.model))
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_fine_tuning_starts_at_zero(plain_recipe: Recipe) -> None:
    trainer = trainer_for(tiny_resnet(), plain_recipe.with_overrides({"tau_epochs": 0.0}))
    assert kw.get_temperature(trainer.model) == 0
    assert trainer.tau == 0


def test_begun_at_the_logits_tau_is_zero_throughout(plain_recipe: Recipe) -> None:
    model = timm.create_model("kw1x_resnet18", num_classes=4, begin="logits", **TINY_RESNET)
    trainer = trainer_for(model, plain_recipe)
    for step in range(2):
        assert (trainer.tau, kw.get_temperature(trainer.model)) == (0, 0)
        trainer.step([batch(16, step)])
    again = trainer_for(copy.deepcopy(model), plain_recipe)
    again.load_state_dict(trainer.state_dict())
    assert (again.tau, kw.get_temperature(again.model)) == (0, 0)


def test_static_network_has_no_temperature(plain_recipe: Recipe) -> None:
    trainer = trainer_for(timm.create_model("resnet18", num_classes=4, **TINY_RESNET), plain_recipe)
    trainer.step([batch(16, 0)])
    assert trainer.tau is None


def test_average_follows_weights_and_carries_the_temperature(plain_recipe: Recipe) -> None:
    trainer = trainer_for(tiny_resnet(), plain_recipe.with_overrides({"ema_decay": 0.5}))
    expected = trainer.model.fc.weight.detach().clone()
    # Warm-up of the decay: 0 at the first step, then 1 - (1 + n)^(-2/3), here at most 0.5.
    for step, decay in enumerate((0.0, 1 - 2 ** (-2 / 3), 0.5)):
        trainer.step([batch(16, step)])
        expected = decay * expected + (1 - decay) * trainer.model.fc.weight.detach()
        assert kw.get_temperature(trainer.result) == kw.get_temperature(trainer.model) == 0.75 - step / 4
    assert trainer.result is not trainer.model
    torch.testing.assert_close(trainer.result.fc.weight.detach(), expected)


def test_average_without_a_warm_up_of_its_decay(plain_recipe: Recipe) -> None:
    trainer = trainer_for(tiny_resnet(), plain_recipe.with_overrides({"ema_decay": 0.75, "ema_warmup": False}))
    expected = trainer.model.fc.weight.detach().clone()
    for step in range(3):
        trainer.step([batch(16, step)])
        expected = 0.75 * expected + 0.25 * trainer.model.fc.weight.detach()
    torch.testing.assert_close(trainer.result.fc.weight.detach(), expected)


def test_state_goes_on_bit_by_bit(recipe: Recipe) -> None:
    through, stopped = (trainer_for(tiny_resnet(), recipe) for _ in range(2))
    for step in range(3):
        for trainer in (through, stopped):
            trainer.step(cut(batch(16, step), 2))
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    resumed = trainer_for(timm.create_model("kw1x_resnet18", num_classes=4, **TINY_RESNET), recipe)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    torch.rand(100)
    for step in range(3, 7):
        losses = through.step(cut(batch(16, step), 2)), resumed.step(cut(batch(16, step), 2))
        assert torch.equal(*losses)
        assert through.learning_rate == resumed.learning_rate
    assert_same(through.model, resumed.model)
    assert_same(through.result, resumed.result)


def test_state_of_another_network_is_refused(plain_recipe: Recipe) -> None:
    static = trainer_for(timm.create_model("resnet18", num_classes=4, **TINY_RESNET), plain_recipe)
    with pytest.raises(CheckpointError, match="does not fit this network"):
        trainer_for(tiny_resnet(), plain_recipe).load_state_dict(static.state_dict())


def test_clipping_limits_the_step(plain_recipe: Recipe) -> None:
    recipe = plain_recipe.with_overrides(
        {"clip_norm": 1e-6, "weight_decay": 0.0, "optimizer": "momentum", "matched_steps": False}
    )
    trainer = trainer_for(tiny_resnet(), recipe)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.step([batch(16, 0)])
    moved = torch.stack(
        [(new.detach() - old).norm() for new, old in zip(trainer.model.parameters(), before, strict=True)]
    )
    assert 0 < float(moved.norm()) <= 1.01e-6 * 0.05


@pytest.mark.parametrize(
    "changes", [{"precision": "bfloat16"}, {"precision": "float16"}, {"channels_last": True}, {"optimizer": "adamw"}]
)
def test_variants_learn(plain_recipe: Recipe, changes: dict[str, object]) -> None:
    """Half precision passes over the first steps, until gradients are scaled to fit: rounding decides how many."""
    settings = {"epochs": 6, "learning_rate": 0.01, "tau_epochs": 0.0, **changes}
    trainer = trainer_for(tiny_resnet(), plain_recipe.with_overrides(settings))
    losses = [float(trainer.step([batch(16, 0)])) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3
    assert trainer.model.fc.weight.dtype == torch.float32


def test_sync_batch_norm_needs_gpus(plain_recipe: Recipe) -> None:
    from kernelwarehouse.training.distributed import Processes

    recipe = plain_recipe.with_overrides({"sync_batch_norm": True})
    with pytest.raises(TrainingError, match="needs GPUs, this run is on cpu"):
        Trainer(tiny_resnet(), recipe, classes=4, steps_per_epoch=4, processes=Processes(world_size=2))


def test_spoiled_weights_are_named(plain_recipe: Recipe) -> None:
    trainer = trainer_for(tiny_resnet(), plain_recipe)
    assert trainer.spoiled_weight() is None
    with torch.no_grad():
        trainer.model.fc.weight[0, 0] = float("inf")
    assert trainer.spoiled_weight() == "fc.weight"

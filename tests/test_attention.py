import pytest
import torch
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.attention import Attention, AttentionShape, LowRank, hidden_width

BETA = torch.eye(3, 7, dtype=torch.bool)


def attention(beta: torch.Tensor | None = BETA, **changes: object) -> Attention:
    return Attention(AttentionShape(**{"in_channels": 6, "mixtures": 3, "cells": 7, "hidden": 16} | changes), beta)


def test_hidden_width_has_a_floor() -> None:
    assert hidden_width(512, 1 / 16) == 32
    assert hidden_width(64, 1 / 16) == 16


@pytest.mark.parametrize("function", ["caf", "softmax", "sigmoid", "relu"])
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_functions_follow_their_formulas(function: str, tau: float) -> None:
    module = attention(function=function)
    kw.set_temperature(module, tau)
    z = torch.randn(2, 3, 8)
    total = z.abs().sum(-1, keepdim=True) + 1e-3
    learned = {"caf": z / total, "softmax": z.softmax(-1), "sigmoid": z.sigmoid(), "relu": z.clamp(min=0) / total}
    expected = tau * BETA + (1 - tau) * learned[function][..., :7]
    torch.testing.assert_close(module.weights(z), expected)


def test_branch_follows_its_definition() -> None:
    module = attention().eval()
    kw.set_temperature(module, 0)
    module.norm.running_mean.normal_()
    pooled = torch.randn(4, 6)
    hidden = torch.relu(module.norm(pooled @ module.fc1.weight.T))
    z = (hidden @ module.fc2.weight.T + module.fc2.bias).reshape(4, 3, 8)
    torch.testing.assert_close(module(pooled), (z / (z.abs().sum(-1, keepdim=True) + 1e-3))[..., :7])
    assert module.fc1.bias is None
    assert attention(norm="layer").fc1.bias is not None


def test_own_cells_only_sees_the_diagonal_blocks() -> None:
    module = Attention(AttentionShape(6, 3, 6, 16, own_cells_only=True), torch.eye(3).repeat_interleave(2, 1).bool())
    kw.set_temperature(module, 0)
    z = torch.randn(2, 3, 3)
    weights = module.weights(z)
    learned = z / (z.abs().sum(-1, keepdim=True) + 1e-3)
    for mixture in range(3):
        block = slice(2 * mixture, 2 * mixture + 2)
        torch.testing.assert_close(weights[:, mixture, block], learned[:, mixture, :2])
    assert int(weights.count_nonzero()) == 2 * 3 * 2


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "layer"}, {"low_rank": LowRank.of(1 / 16, 7, 2, 3)}, {"own_cells_only": True, "cells": 6}],
)
def test_parameters_are_counted_without_building(changes: dict) -> None:
    shape = AttentionShape(**{"in_channels": 6, "mixtures": 3, "cells": 7, "hidden": 16} | changes)
    module = Attention(shape, None)
    assert shape.parameters() == sum(parameter.numel() for parameter in module.parameters())


def test_starts_kaiming_with_zero_biases() -> None:
    module = Attention(AttentionShape(512, 16, 63, 256), None)
    assert module.fc1.weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert module.fc2.weight.std().item() == pytest.approx((2 / 1024) ** 0.5, rel=0.05)
    assert not module.fc2.bias.any()


def test_zero_inputs_and_logits_give_no_nan() -> None:
    module = attention()
    kw.set_temperature(module, 0)
    z = torch.zeros(2, 3, 8, requires_grad=True)
    weights = module.weights(z)
    weights.sum().backward()
    assert not weights.any()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("batch", [0, 1])
def test_tiny_batches_use_and_keep_the_running_statistics(batch: int) -> None:
    module = attention().train()
    module.norm.running_mean.fill_(0.5)
    pooled = torch.randn(batch, 6)
    in_training = module(pooled)
    torch.testing.assert_close(in_training, module.eval()(pooled))
    assert (module.norm.running_mean == 0.5).all()
    assert module.norm.num_batches_tracked == 0


def test_half_precision_logits_are_normalised_in_float32() -> None:
    z = torch.randn(2, 3, 8).to(torch.bfloat16)
    assert attention().weights(z).dtype == torch.float32
    big = torch.full((1, 3, 8), 60000.0).half()
    assert torch.isfinite(attention().weights(big)).all()


def test_batch_norm_becomes_synchronised() -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(attention())
    assert isinstance(module.norm, nn.SyncBatchNorm)


def test_impossible_shapes() -> None:
    with pytest.raises(kw.ConfigError, match="hidden"):
        attention(hidden=0)
    with pytest.raises(kw.ConfigError, match="starts"):
        attention(torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(kw.ConfigError, match="own cells"):
        attention(own_cells_only=True)

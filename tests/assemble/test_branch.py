"""The attention branch as one call gives what its steps give."""

import pytest
import torch
from torch import nn

from compiled_kernels import COMPILED
from kernelwarehouse.assemble import force
from kernelwarehouse.assemble.branch import attend, coefficients, fused_attention, fused_coefficients
from kernelwarehouse.attention import Attention, AttentionShape
from kernelwarehouse.attention_functions import normaliser
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d


def _attention(tau: float, **changes: object) -> Attention:
    torch.manual_seed(0)
    shape = AttentionShape(12, mixtures=3, cells=21, hidden=16, **changes)
    beta = torch.zeros(3, 21, dtype=torch.bool)
    beta[torch.arange(3), torch.arange(3) * 5] = True
    attention = Attention(shape, beta)
    attention.set_temperature(tau)
    for name, tensor in attention.state_dict().items():
        if name in ("norm.running_mean", "norm.bias", "fc2.bias"):
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
        if name == "norm.running_var":
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return attention.eval()


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("batch", [1, 5])
@torch.no_grad()
def test_same_weights(tau: float, batch: int) -> None:
    attention, pooled = _attention(tau), torch.randn(batch, 12)
    wanted = _attention(tau).double()(pooled.double())
    torch.testing.assert_close(attend(attention, pooled), wanted.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("space", [(1,), (7, 7), (56, 57), (3, 5, 4)])
@torch.no_grad()
def test_means_over_positions(space: tuple[int, ...]) -> None:
    attention, x = _attention(0.0), torch.randn(2, 12, *space) + 100  # an offset that careless sums would lose
    wanted = _attention(0.0).double()(x.double())
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    for given in (x, last, torch.stack([x, x], -1)[..., 0]):
        torch.testing.assert_close(attend(attention, given), wanted.float(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_one_call_is_made_where_there_are_compiled_kernels() -> None:
    attention, pooled = _attention(0.0), torch.randn(4, 12)
    assert (fused_attention(attention, pooled) is not None) == COMPILED
    assert (fused_coefficients(attention, pooled) is not None) == COMPILED
    with force("plain"):
        assert fused_attention(attention, pooled) is None


@torch.no_grad()
def test_wrong_number_of_channels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _attention(0.0)(torch.randn(1, 11))


@torch.no_grad()
def test_zero_logits_give_no_nan() -> None:
    attention = _attention(0.0)
    attention.fc2.weight.zero_()
    attention.fc2.bias.zero_()
    assert not attention(torch.randn(2, 12)).any()


@torch.no_grad()
def test_coefficients() -> None:
    attention, pooled = _attention(0.0), torch.randn(4, 12)
    units, scale = coefficients(attention, pooled)
    hidden = attention.hidden(pooled)
    torch.testing.assert_close(units, torch.cat([hidden, torch.ones(4, 1)], 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale, 1 / normaliser(attention.logits(hidden)).squeeze(-1), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_steps_are_taken_where_one_call_does_not_apply() -> None:
    pooled = torch.randn(2, 12)
    ways = [_attention(0.0, norm="layer"), _attention(0.0, function="softmax"), _attention(0.0).double()]
    for attention in ways:
        assert fused_attention(attention, pooled.to(attention.fc1.weight.dtype)) is None
    attention = _attention(0.0)
    seen = []
    attention.fc2.register_forward_hook(lambda *_: seen.append(1))
    attention(pooled)
    assert seen == [1]
    with torch.enable_grad():
        assert fused_attention(_attention(0.0), pooled) is None


@torch.no_grad()
def test_steps_are_taken_where_somebody_follows_them() -> None:
    attention, pooled, taken = _attention(0.0).requires_grad_(False), torch.randn(3, 1, 12), []

    def follow(x: torch.Tensor) -> torch.Tensor:
        taken.append(fused_attention(attention, x) is None)
        return attend(attention, x)

    wanted = attend(attention, pooled[:, 0])
    torch.testing.assert_close(torch.func.vmap(follow)(pooled)[:, 0], wanted)
    torch.testing.assert_close(torch.jit.trace(follow, pooled[0], check_trace=False)(pooled[1]), wanted[1:2])
    assert taken == [True] * len(taken)
    assert len(taken) >= 2


@torch.no_grad()
def test_parts_that_are_not_as_they_were_made() -> None:
    pooled, without_scale, without_bias = torch.randn(2, 12), _attention(0.0), _attention(0.0)
    without_scale.norm = nn.BatchNorm1d(16, affine=False).eval()
    without_bias.fc2.bias = None
    with_bias, cast = _attention(0.0), _attention(0.5).type(torch.float32)
    with_bias.fc1 = nn.Linear(12, 16)
    for attention in (without_scale, without_bias, with_bias, cast):
        assert fused_attention(attention, pooled) is None
        torch.testing.assert_close(attend(attention, pooled), attention(pooled))


@pytest.mark.parametrize("tau", [0.0, 0.5])
@torch.no_grad()
def test_starts_may_lie_anywhere(tau: float) -> None:
    starts, pooled = torch.eye(3, 21, dtype=torch.bool), torch.randn(2, 12)
    weights = []
    for given in (starts, starts.t().contiguous().t()):
        torch.manual_seed(0)
        attention = Attention(AttentionShape(12, mixtures=3, cells=21, hidden=16), given).eval()
        attention.set_temperature(tau)
        weights.append(attend(attention, pooled))
    assert torch.equal(*weights)


def test_layer_gives_the_same_with_and_without_gradients() -> None:
    torch.manual_seed(0)
    layer = Conv2d(16, 16, 3, config=WarehouseConfig(2)).eval()
    layer.attention.set_temperature(0.2)
    x = torch.randn(3, 16, 7, 7)
    with torch.no_grad():
        inferred = layer(x)
    torch.testing.assert_close(inferred, layer(x).detach(), rtol=1e-4, atol=1e-5)

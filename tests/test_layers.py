import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernelwarehouse as kw
from compiled_kernels import CAN_BE, pretend
from devices import DEVICE
from kernelwarehouse import layers
from kernelwarehouse.assemble import force, hidden
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.inference import prepare_inference
from reference import relative_error

TORCH = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OURS = {1: layers.Conv1d, 2: layers.Conv2d, 3: layers.Conv3d}


def sample_by_sample(layer: layers.WarehouseLayer, static: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """torch's own layer with each sample's kernel, assembled by the definition."""
    axes = tuple(range(1, x.dim() - 1)) if isinstance(static, nn.Linear) else tuple(range(2, x.dim()))
    weights = layer.attention(x.mean(axes) if axes else x)
    outputs = []
    for sample, alpha in zip(x, weights, strict=True):
        mixtures = torch.einsum("mn,n...->m...", alpha, layer.warehouse.cells)
        parameters = {"weight": layer.geometry.partition.join(mixtures)}
        if layer.bias is not None:
            parameters["bias"] = layer.bias
        outputs.append(torch.func.functional_call(static, parameters, (sample[None],)))
    return torch.cat(outputs)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, dict]:
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    per_axis = st.tuples(*[st.integers(1, 3)] * axes)
    kernel = draw(per_axis)
    padding = draw(st.sampled_from(["same", "valid", 0, 1, tuple(range(1, axes + 1))]))
    arguments = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "stride": 1 if padding == "same" else draw(st.one_of(st.integers(1, 2), per_axis)),
        "padding": padding,
        "dilation": draw(st.one_of(st.integers(1, 2), per_axis)),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
    }
    return axes, arguments


@settings(deadline=None, max_examples=60)
@given(convolutions(), st.integers(1, 3), st.sampled_from([0.5, 1, 2]), st.sampled_from([0.0, 0.5, 1.0]))
def test_convolutions_equal_torchs_sample_by_sample(case: tuple, batch: int, budget: float, tau: float) -> None:
    axes, arguments = case
    static = TORCH[axes](**arguments, dtype=torch.float64)
    layer = OURS[axes](**arguments, dtype=torch.float64, config=kw.WarehouseConfig(budget=budget)).eval()
    kw.set_temperature(layer, tau)
    x = torch.randn(batch, arguments["in_channels"], *[8] * axes, dtype=torch.float64)
    output = layer(x)
    torch.testing.assert_close(output, sample_by_sample(layer, static, x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(x[0]), output[0])
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(layer, name) == getattr(static, name), name
    assert layer.extra_repr().startswith(static.extra_repr())


@pytest.mark.parametrize("shape", [(5, 6), (2, 7, 6), (2, 3, 4, 6), (0, 6), (1, 6), (0, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_torchs_sample_by_sample(shape: tuple[int, ...], bias: bool) -> None:
    static = nn.Linear(6, 9, bias, dtype=torch.float64)
    layer = layers.Linear(6, 9, bias, dtype=torch.float64, config=kw.WarehouseConfig(budget=2)).eval()
    kw.set_temperature(layer, 0.5)
    x = torch.randn(shape, dtype=torch.float64)
    output = layer(x)
    assert output.shape == static(x).shape
    if shape[0]:
        torch.testing.assert_close(output, sample_by_sample(layer, static, x))
    assert layer.extra_repr().startswith(static.extra_repr())


def test_linear_takes_a_single_vector() -> None:
    layer = layers.Linear(6, 9).eval()
    x = torch.randn(6)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch", [0, 1])
def test_tiny_batches(training: bool, batch: int) -> None:
    for layer, shape in ((layers.Conv2d(4, 8, 3), (4, 9, 9)), (layers.Linear(4, 8), (4,))):
        layer.train(training)
        x = torch.randn(batch, *shape, requires_grad=True)
        output = layer(x)
        assert output.shape[:2] == (batch, 8)
        output.sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
        assert x.grad.shape == x.shape


def test_channels_last_and_strided_inputs() -> None:
    layer = layers.Conv2d(4, 8, 3, padding=1).eval()
    x = torch.randn(2, 4, 6, 6)
    expected = layer(x)
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(layer(x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    torch.testing.assert_close(layer(torch.randn(2, 4, 6, 12)[..., ::2].copy_(x)), expected)


@pytest.mark.parametrize(("layer", "shape"), [(layers.Conv2d(8, 8, 3), (2, 8, 5, 5)), (layers.Linear(8, 8), (2, 3, 8))])
def test_autocast_gives_the_type_that_torch_gives(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    assert relative_error(output.float(), layer(x)) < 0.05
    output.float().sum().backward()
    assert layer.warehouse.cells.grad.dtype == torch.float32


def test_bfloat16_modules() -> None:
    layer = layers.Conv2d(8, 8, 3, padding=1).eval()
    x = torch.randn(2, 8, 5, 5)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    output = half(x.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert relative_error(output.float(), layer(x)) < 0.05


def test_device_and_dtype_arguments() -> None:
    layer = layers.Conv2d(8, 8, 3, device="meta", dtype=torch.float64)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_gradients_in_float64() -> None:
    layer = layers.Conv2d(2, 4, 2, groups=2, dtype=torch.float64, config=kw.WarehouseConfig(budget=2)).eval()
    kw.set_temperature(layer, 0.4)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


def test_activation_checkpointing() -> None:
    layer = layers.Conv2d(4, 4, 3).eval()
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    layer(x).sum().backward()
    direct = layer.warehouse.cells.grad.clone()
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(layer.warehouse.cells.grad, direct)


def test_compiles() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(2), nn.Linear(36, 6))
    model = kw.convert(model, kw.plan(model)).eval()
    kw.set_temperature(model, 0.5)
    x = torch.randn(2, 4, 6, 6)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    kw.set_temperature(model, 0.0)
    torch.testing.assert_close(compiled(x), model(x))  # the temperature is state, not a constant
    compiled(x).sum().backward()
    assert model[0].warehouse.cells.grad is not None


def test_own_warehouse_starts_as_the_static_kernel_would() -> None:
    for budget in (1, 4):
        layer = layers.Conv2d(64, 128, 3, config=kw.WarehouseConfig(budget=budget))
        assert layer.warehouse.cells.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)


def test_value_layer_of_a_fused_projection() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.qkv(x))

    model = Attention().double()
    converted = kw.convert(model, kw.plan(model))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-10, atol=1e-12)
    assert (converted.qkv.in_features, converted.qkv.out_features) == (8, 24)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.Conv2d(4, 4, 3), (2, 5, 8, 8)),
        (layers.Conv2d(4, 4, 3), (4, 8)),
        (layers.Conv1d(4, 4, 3), (2, 4, 8, 8)),
        (layers.Linear(4, 4), (2, 5)),
        (layers.Linear(4, 4), ()),
    ],
)
def test_wrong_inputs_name_their_shape(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(kw.KernelWarehouseError) as error:
        layer(torch.zeros(shape))
    assert str(shape) in str(error.value)


def test_mismatched_parts_are_refused() -> None:
    one, other = layers.Conv2d(4, 4, 3), layers.Conv2d(4, 4, 1)
    with pytest.raises(kw.KernelWarehouseError, match="9 mixtures"):
        layers.Conv2d(4, 4, 1, source=layers.Source(other.warehouse, one.attention))


def test_an_empty_token_axis() -> None:
    layer = layers.Linear(8, 12)
    layer(torch.randn(2, 0, 8)).sum().backward()
    assert torch.isfinite(layer.warehouse.cells.grad).all()


def test_inputs_smaller_than_the_kernel_are_refused() -> None:
    with pytest.raises(kw.KernelWarehouseError, match="smaller"):
        layers.Conv1d(4, 4, 3)(torch.randn(2, 4, 2))


def test_traces_whole_and_under_function_transforms() -> None:
    layer = layers.Conv2d(4, 4, 3, dtype=torch.float64).eval()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    parameters = dict(layer.named_parameters())
    gradients = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_float64_stays_float64_under_autocast() -> None:
    layer = layers.Conv2d(4, 4, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 4, 6, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", CAN_BE)
@pytest.mark.parametrize("side", [8, 24])
@pytest.mark.parametrize(("width", "kernel", "groups"), [(16, 3, 1), (6, 3, 1), (16, 1, 1), (16, 3, 16)])
def test_traced_layers_take_any_batch(
    width: int, kernel: int, groups: int, side: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, compiled)
    conv = layers.Conv2d(width, width, kernel, padding=kernel // 2, groups=groups, config=kw.WarehouseConfig(1)).eval()
    x = torch.randn(5, width, side, side)
    with torch.no_grad():
        traced = torch.jit.trace(conv, x[:2], check_trace=False)
        for batch in (1, 5):
            torch.testing.assert_close(traced(x[:batch]), conv(x[:batch]), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", CAN_BE)
@pytest.mark.parametrize("prepared", [False, True])
def test_traced_layers_that_mix_through_the_hidden_vector_take_any_batch(
    prepared: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, compiled)
    conv = layers.Conv2d(128, 128, 3, padding=1, config=kw.WarehouseConfig(16)).eval()
    conv.attention.set_temperature(0.0)
    x = torch.randn(64, 128, 2, 2)
    assert hidden.saves(48, conv.attention)
    if prepared:
        assert prepare_inference(conv, batch=64).layers
    with torch.no_grad():
        traced = torch.jit.trace(conv, x[:48], check_trace=False)
        with force("plain"):
            expected = conv(x)
        torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(StrategyError, match="size of this batch"), force("hidden"), torch.no_grad():
        torch.jit.trace(conv, x[:48], check_trace=False)


@pytest.mark.parametrize("way", ["grouped", "hidden"])
def test_empty_batches_whatever_is_forced(way: str) -> None:
    conv = layers.Conv2d(16, 24, 3, device=DEVICE, config=kw.WarehouseConfig(1))
    with force(way):
        out = conv(torch.zeros(0, 16, 8, 8, device=DEVICE))
    out.sum().backward()
    assert out.shape == (0, 24, 6, 6)
    assert conv.warehouse.cells.grad is not None

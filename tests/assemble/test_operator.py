"""Layers as operators, which is what compilers see of them."""

import copy
import gc
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from benchmarks.compiled import saved_bytes, seen_as_plain
from layer_cases import DEVICE, Case
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compiled_kernels import CAN_BE, COMPILED, pretend
from kernelwarehouse.assemble import Geometry, evaluate, force
from kernelwarehouse.assemble.operator import evaluate_as_operator
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.layers import Conv1d, Conv2d, Conv3d, Linear, WarehouseLayer
from kernelwarehouse.partition import Partition

OPERATORS = torch.ops.kernelwarehouse

CASES = {
    "linear": Case(Geometry(Partition((6, 4), (3, 2))), 3, 5, (4,), 0),
    "conv1d": Case(Geometry(Partition((4, 4, 3), (2, 2, 1)), (2,), (1,), (2,)), 2, 5, (9,), 1),
    "conv2d": Case(Geometry(Partition((16, 8, 3, 3), (8, 8, 1, 1)), (1, 1), (1, 1), (1, 1)), 3, 5, (6, 5), 2),
    "wide cells": Case(Geometry(Partition((4, 4, 3, 3), (2, 4, 3, 3)), (2, 1), (1, 0), (1, 1)), 2, 3, (7, 6), 3),
    "strided": Case(Geometry(Partition((16, 8, 3, 3), (8, 8, 1, 1)), (2, 2), (1, 1), (1, 1)), 2, 5, (7, 6), 4),
    "pointwise": Case(Geometry(Partition((16, 16, 1, 1), (16, 8, 1, 1)), (1, 1), (0, 0), (1, 1)), 4, 5, (9, 8), 5),
    "strided pointwise": Case(Geometry(Partition((8, 8, 1, 1), (4, 8, 1, 1)), (2, 2), (0, 0), (1, 1)), 2, 3, (5, 6), 6),
    "groups": Case(Geometry(Partition((4, 2, 3, 3), (2, 1, 1, 1)), (1, 1), (1, 1), (1, 1), 2), 2, 4, (5, 5), 7),
    "depthwise": Case(Geometry(Partition((16, 1, 3, 3), (8, 1, 1, 1)), (1, 1), (1, 1), (1, 1), 16), 2, 4, (6, 7), 8),
    "conv3d": Case(
        Geometry(Partition((4, 2, 2, 1, 2), (2, 2, 1, 1, 1)), (1, 2, 1), (0, 1, 1), (1, 1, 1)), 2, 3, (3, 4, 3), 9
    ),
    "one sample": Case(Geometry(Partition((8, 8, 3, 3), (8, 8, 1, 1)), (1, 1), (1, 1), (1, 1)), 1, 3, (4, 4), 10),
    "no sample": Case(Geometry(Partition((8, 8, 3, 3), (8, 8, 1, 1)), (1, 1), (1, 1), (1, 1)), 0, 3, (4, 4), 11),
}

LAYERS: dict[str, tuple[Callable[[], WarehouseLayer], tuple[int, ...]]] = {
    "linear": (lambda: Linear(8, 6), (5, 3, 8)),
    "conv1d": (lambda: Conv1d(4, 8, 3, stride=2), (5, 4, 9)),
    "conv2d": (lambda: Conv2d(8, 16, 3, padding=1), (5, 8, 6, 7)),
    "same padding": (lambda: Conv2d(8, 8, 2, padding="same", padding_mode="reflect"), (5, 8, 6, 7)),
    "depthwise": (lambda: Conv2d(16, 16, 3, padding=1, groups=16, bias=False), (5, 16, 8, 8)),
    "conv3d": (lambda: Conv3d(4, 4, 2), (5, 4, 3, 4, 3)),
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def arguments(geometry: Geometry) -> tuple[list[int] | int, ...]:
    partition = geometry.partition
    lists = partition.kernel_shape, partition.cell_shape, geometry.stride, geometry.padding, geometry.dilation
    return *map(list, lists), geometry.groups


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def with_channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    largest = max([1.0, *expected.detach().abs().flatten().tolist()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * largest)


def results(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after a step, which leaves no trace in the layer."""
    before = copy.deepcopy(layer.state_dict())
    x = x.detach().requires_grad_()
    out = run(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    grads = torch.autograd.grad(out, [x, *layer.parameters()], weight)
    found = {"out": out.detach(), "x": grads[0]}
    found |= {name: grad for (name, _), grad in zip(layer.named_parameters(), grads[1:], strict=True)}
    found |= {name: buffer.clone() for name, buffer in layer.named_buffers() if buffer.is_floating_point()}
    layer.load_state_dict(before)
    return found


def compare(compiled: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> None:
    found, expected = results(compiled, layer, x), results(layer, layer, x)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def check_operators(case: Case, dtype: torch.dtype) -> None:
    x, attention, cells = case.tensors(dtype)
    numbers = arguments(case.geometry)
    inputs = [tensor.detach().requires_grad_() for tensor in (x, attention, cells)]
    torch.library.opcheck(OPERATORS.evaluate, (*inputs, *numbers))
    grad = torch.randn_like(evaluate(x, attention, cells, case.geometry))
    torch.library.opcheck(OPERATORS.evaluate_backward, (grad, x, attention, cells, *numbers, True))
    for seen, wants_input in ((x, False), (with_channels_last(x), True)):
        promised = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(OPERATORS.evaluate, (seen, attention, cells, *numbers), **promised)
        given = (grad, seen, attention, cells, *numbers, wants_input)
        torch.library.opcheck(OPERATORS.evaluate_backward, given, **promised)


@pytest.mark.parametrize("compiled", CAN_BE)
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compiled)
    check_operators(CASES[name], torch.float32)


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "depthwise", "conv3d"])
def test_opcheck_in_double_precision(name: str) -> None:
    check_operators(CASES[name], torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    case = CASES[name]
    inputs = [tensor.requires_grad_() for tensor in case.tensors(torch.float64)]
    assert torch.autograd.gradcheck(
        lambda *tensors: evaluate_as_operator(*tensors, case.geometry), inputs, fast_mode=True
    )


@pytest.mark.parametrize("name", CASES)
def test_is_the_plain_definition(name: str) -> None:
    case = CASES[name]
    inputs = [tensor.requires_grad_() for tensor in case.tensors(torch.float32)]
    with force("plain"):
        expected = evaluate(*inputs, case.geometry)
    out = evaluate_as_operator(*inputs, case.geometry)
    assert_same(out, expected)
    weight = torch.randn_like(out)
    for found, exact in zip(
        torch.autograd.grad(out, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        assert_same(found, exact)


@pytest.mark.filterwarnings("ignore:.*boxed arguments")
@pytest.mark.parametrize(("dynamic", "training"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layers_do_what_they_do_otherwise(name: str, dynamic: bool, training: bool) -> None:
    make, shape = LAYERS[name]
    layer = make().to(DEVICE).train(training)
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    compare(compiled, layer, randn(*shape))
    compare(compiled, layer, randn(3, *shape[1:]))
    for graphs, operator in (
        (backend.fw_graphs, OPERATORS.evaluate.default),
        (backend.bw_graphs, OPERATORS.evaluate_backward.default),
    ):
        assert graphs
        assert all([node.target for node in graph.graph.nodes].count(operator) == 1 for graph in graphs)


def test_one_graph_takes_all_batches_and_sizes() -> None:
    layer = nn.Sequential(Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), Conv2d(16, 8, 1)).to(DEVICE)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    compare(compiled, layer, randn(4, 8, 9, 10))
    before = counter.frame_count
    for batch, *space in ((7, 11, 12), (30, 6, 5)):
        compare(compiled, layer, randn(batch, 8, *space))
    assert counter.frame_count == before


def test_inference() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE).eval(), randn(2, 8, 6, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(compiled(x), layer(x))


@pytest.mark.skipif(not COMPILED, reason="where our kernels cannot be compiled, Inductor's cannot")
def test_inductor() -> None:
    layer = Conv2d(8, 8, 3, padding=1, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    for x in (randn(2, 8, 5, 5), with_channels_last(randn(2, 8, 5, 5))):
        compare(compiled, layer, x)


def test_channels_last_stays_channels_last() -> None:
    layer = Conv2d(8, 16, 3, padding=1, device=DEVICE)
    x = randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    compare(torch.compile(layer, backend="aot_eager", fullgraph=True), layer, x)


def test_autocast() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE), randn(2, 8, 6, 6)

    def cast(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return run(x)

        return call

    expected = results(cast(layer), layer, x)
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        found = results(cast(torch.compile(layer, backend=backend, fullgraph=True)), layer, x)
        assert found["out"].dtype == torch.bfloat16
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=0.05 * float(tensor.abs().max()))


def test_autocast_around_backward_changes_nothing() -> None:
    case = CASES["conv2d"]
    inputs = [tensor.requires_grad_() for tensor in case.tensors(torch.float32)]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = evaluate_as_operator(*inputs, case.geometry)
        grads = torch.autograd.grad(out.sum(), inputs)
    for found, exact in zip(grads, torch.autograd.grad(evaluate(*inputs, case.geometry).sum(), inputs), strict=True):
        assert_same(found, exact)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_are_made_of_torch_alone(strict: bool) -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE).eval(), randn(2, 8, 6, 6)
    program = torch.export.export(layer, (x,), strict=strict)
    assert "aten.conv" in program.graph_module.code
    assert "kernelwarehouse" not in program.graph_module.code
    assert_same(program.module()(x), layer(x))


def test_function_transforms_inside_of_what_is_compiled() -> None:
    layer = Conv2d(4, 4, 3, dtype=torch.float64, device=DEVICE).eval()
    x = randn(3, 2, 4, 6, 6, dtype=torch.float64)
    compiled = torch.compile(lambda x: torch.vmap(lambda part: layer(part))(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.stack([layer(part) for part in x]))

    def squares(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    compiled = torch.compile(lambda x: torch.func.grad(squares)(x), backend="aot_eager", fullgraph=True)
    one = x[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(squares(one), one)
    torch.testing.assert_close(compiled(x[0]), expected)


def test_second_derivatives_are_refused() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE), randn(2, 8, 6, 6).requires_grad_()
    out = torch.compile(layer, backend="eager", fullgraph=True)(x)
    with pytest.raises(StrategyError, match="differentiated"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_forcing_a_strategy_holds_for_what_is_compiled() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, dtype=torch.float64, device=DEVICE), randn(2, 8, 6, 6, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for way in ("plain", "grouped", "matmul"):
        with force(way):
            compare(compiled, layer, x)
    with pytest.raises(StrategyError, match="cannot be native"), force("native"):
        compiled(x)


def test_saves_its_inputs_and_nothing_else() -> None:
    case = CASES["conv2d"]
    inputs = [tensor.requires_grad_() for tensor in case.tensors(torch.float32)]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        evaluate_as_operator(*inputs, case.geometry)
    assert saved == [tensor.data_ptr() for tensor in inputs]


def test_what_is_compiled_keeps_no_kernels() -> None:
    model = nn.Sequential(Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), Conv2d(32, 32, 3)).to("meta")
    x = torch.empty(64, 8, 8, 8, device="meta")
    kernels = 64 * sum(math.prod(model[index].geometry.partition.kernel_shape) for index in (0, 3)) * 4
    ours = saved_bytes(model, x, "aot_eager")
    with seen_as_plain():
        plain = saved_bytes(model, x, "aot_eager")
    assert kernels > 2**21
    assert plain - ours >= kernels


@pytest.mark.filterwarnings("ignore:.*boxed arguments")
def test_only_wanted_gradients() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE), randn(2, 8, 6, 6)
    backend = AotEagerAndRecordGraphs()
    torch.compile(layer, backend=backend, fullgraph=True)(x).sum().backward()
    (backward,) = (
        node for node in backend.bw_graphs[0].graph.nodes if node.target is OPERATORS.evaluate_backward.default
    )
    assert backward.args[-1] is False
    found = layer.warehouse.cells.grad
    layer.zero_grad()
    layer(x).sum().backward()
    assert found is not None
    assert layer.warehouse.cells.grad is not None
    assert_same(found, layer.warehouse.cells.grad)


def test_checkpointing() -> None:
    layer, x = Conv2d(8, 16, 3, padding=1, device=DEVICE).eval(), randn(2, 8, 6, 6)
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    compare(compiled, layer, x)


def test_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Sequential(Conv2d(8, 16, 3, padding=1), nn.ReLU(), Conv2d(16, 8, 1, config=WarehouseConfig()))
        x = torch.randn(4, 8, 6, 6)
        alone = copy.deepcopy(layer)
        torch.compile(DistributedDataParallel(layer), backend="aot_eager")(x).square().sum().backward()
    finally:
        torch.compiler.reset()  # what is compiled holds the wrapper, which must go before its group
        gc.collect()
        torch.distributed.destroy_process_group()
    alone(x).square().sum().backward()
    for found, expected in zip(layer.parameters(), alone.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert_same(found.grad, expected.grad)


def test_copies_of_compiled_layers() -> None:
    layer = Conv2d(8, 16, 3, padding=1, device=DEVICE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compare(compiled, layer, randn(2, 8, 6, 6))
    twin = copy.deepcopy(compiled)
    compare(twin, twin._orig_mod, randn(2, 8, 6, 6))


@pytest.mark.skipif(not COMPILED, reason="there are no compiled kernels here")
def test_compiled_kernels_share_the_name_space() -> None:
    assert hasattr(OPERATORS, "evaluate")
    assert hasattr(OPERATORS, "forward_taps")

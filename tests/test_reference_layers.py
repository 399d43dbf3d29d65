"""Layers against the numbers of the authors' code, in float64: rounding is then far below what is asked."""

import pytest
import torch
from torch import nn

import kernelwarehouse as kw
from reference import fill, read_arrays, read_json, relative_error, standard_normal

CASES = read_json("layers.json")
NUMBERS = read_arrays("layers.npz")
TOLERANCE = 1e-10
PARTS = {"fc1": "fc1", "norm1": "norm", "fc2": "fc2", "fc3": "basis"}


def build(case: dict) -> nn.Module:
    layers = []
    for layer in case["layers"]:
        arguments = {key: value for key, value in layer.items() if key != "type"}
        if layer["type"] == "linear":
            layers.append(nn.Linear(layer["in_channels"], layer["out_channels"], layer["bias"]))
        else:
            kinds = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}
            layers.append(kinds[layer["type"]](**arguments))
    manager = case["manager"]
    config = kw.WarehouseConfig(
        budget=manager.get("cell_num_ratio", 1),
        in_ratio=manager.get("cell_inplane_ratio", 1),
        out_ratio=manager.get("cell_outplane_ratio", 1),
        spatial_partition=manager.get("spatial_partition", True),
        low_rank=manager.get("nonlocal_basis_ratio"),
        norm=case["norm"],
        groups={"all": [str(index) for index in range(len(layers))]},
    )
    model = nn.Sequential(*layers).double()
    converted = kw.convert(model, kw.plan(model, config))
    state = converted.state_dict()
    filled = {our_name(key): fill(key, tuple(shape)) for key, shape in case["keys"].items()}
    kept = {key: value for key, value in state.items() if key.endswith(("beta", "temperature"))}
    assert set(filled) | set(kept) == set(state)
    converted.load_state_dict(kept | {key: value.reshape(state[key].shape) for key, value in filled.items()})
    return converted


def our_name(key: str) -> str:
    if key.startswith("warehouse_manager"):
        return "0.warehouse.cells"
    layer, *rest = key.split(".")
    rest = rest[1:] if rest[0] == "conv" else rest
    if rest == ["attention", "basis_bias"]:
        return f"{layer}.attention.offset"
    if rest[0] == "attention":
        rest[1] = PARTS[rest[1]]
    return ".".join([layer, *rest])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_outputs_in_evaluation(case: str, tau: float) -> None:
    model = build(CASES[case]).eval()
    kw.set_temperature(model, tau)
    output = model(standard_normal(1, CASES[case]["input"], torch.float64))
    assert relative_error(output, NUMBERS[f"{case}/eval/{tau}/output"]) < TOLERANCE


def test_outputs_and_gradients_in_training(case: str) -> None:
    model = build(CASES[case]).train()
    kw.set_temperature(model, 0.5)
    x = standard_normal(1, CASES[case]["input"], torch.float64).requires_grad_()
    output = model(x)
    prefix = f"{case}/train/0.5/"
    assert relative_error(output, NUMBERS[prefix + "output"]) < TOLERANCE
    (output * standard_normal(2, tuple(output.shape), torch.float64)).sum().backward()
    assert relative_error(x.grad, NUMBERS[prefix + "grad_input"]) < TOLERANCE
    parameters = dict(model.named_parameters())
    checked = set()
    for key, reference in NUMBERS.items():
        if key.startswith(prefix + "grad/"):
            tensor, _, summary = key.removeprefix(prefix + "grad/").partition(":")
            name = our_name(tensor)
            gradient = parameters[name].grad
            if summary:
                gradient = torch.stack([gradient.sum(), gradient.abs().sum(), gradient.norm()])
            assert relative_error(gradient.reshape(reference.shape), reference) < TOLERANCE, tensor
            checked.add(name)
    assert checked == set(parameters)


def test_start_cells(case: str) -> None:
    starts = []
    for layer in build(CASES[case]):
        cells = layer.attention.beta.shape[1]
        starts += [int(row.nonzero()) if row.any() else cells for row in layer.attention.beta]
    assert starts == NUMBERS[f"{case}/start_cells"].tolist()

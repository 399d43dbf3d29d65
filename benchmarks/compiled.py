"""What a training step under `torch.compile` keeps for backward, beside the model's own: counted, without computing.

The networks have no memory (device meta). They are compiled as far as Inductor decides what to keep, and no further.
"plain" is what a compiler keeps that sees the plain definition, "ours" what it keeps where layers are operators.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.cases import WAYS, Case, converted_network, static_network
from kernelwarehouse.assemble import operator


def saved_bytes(model: nn.Module, x: Tensor, backend: str = "aot_eager_decomp_partition") -> int:
    """Bytes that the compiled model keeps of a forward pass, without its own parameters and buffers."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    saved: dict[int, Tensor] = {}  # by the memory, which several tensors may share

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(x)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)


@contextmanager
def seen_as_plain() -> Iterator[None]:
    """Compilers see the plain definition inside the `with` block."""
    with mock.patch.object(operator, "wanted", _never):  # a function, which compilers can follow
        yield


def _never() -> bool:
    return False


def measure(case: Case, way: str) -> int:
    """Bytes kept by a step of the case."""
    model = static_network(case.preset) if way == "static" else converted_network(case.preset)
    x = torch.empty(case.batch, 3, case.image, case.image, device="meta")
    with seen_as_plain() if way == "plain" else nullcontext():
        return saved_bytes(model.to("meta").train(), x)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--preset", nargs="+", default=["kw1x_resnet18"])
    parser.add_argument("--batch", nargs="+", type=int, default=[128])
    chosen = parser.parse_args(arguments)
    for preset in chosen.preset:
        for batch in chosen.batch:
            case = Case(preset, "training", batch)
            kept = ", ".join(f"{way} {measure(case, way) / 1e6:.1f} MB" for way in WAYS)
            print(f"{case.name}, kept for backward when compiled: {kept}")


if __name__ == "__main__":
    main()

"""What decides a network's outputs apart from its weights: compared to see whether a builder gives the same network.

For every module: its class, what it prints, its plain attributes (a drop rate, an activation function, a scale), and
the names and shapes of its tensors. Not seen are hooks, attributes whose names begin with `_`, and the values of
tensors that are in no state dict: those are as the builder makes them.
"""

import contextlib
import dataclasses
import enum
import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# They say how the network is trained or where its first weights came from, not what it computes.
_IGNORED = frozenset({"training", "grad_checkpointing", "pretrained_cfg", "default_cfg"})
_DEEPEST = 8
_Facts = tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class ModuleFacts:
    """One module, in values that can be compared and hashed."""

    kind: type[nn.Module]
    first_name: str
    printed: str
    attributes: _Facts
    tensors: _Facts


@dataclass(frozen=True)
class Structure:
    """The facts of every module by name, and for every parameter the first name that it has."""

    modules: tuple[tuple[str, ModuleFacts], ...]
    ties: _Facts


def structure(model: nn.Module) -> Structure:
    first_names: dict[int, str] = {}
    modules = []
    for name, module in model.named_modules(remove_duplicate=False):
        first = first_names.setdefault(id(module), name)
        facts = ModuleFacts(type(module), first, module.extra_repr(), _attributes(module), _tensors(module))
        modules.append((name, facts))
    holders: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    ties = tuple((name, holders.setdefault(id(parameter), name)) for name, parameter in parameters)
    return Structure(tuple(modules), ties)


def difference(ours: Structure, built: Structure) -> str | None:
    """Where a network is another than the one a builder made, in words; nothing where they are alike."""
    here, there = dict(ours.modules), dict(built.modules)
    for name in [*here, *there]:
        place = f"{name!r}" if name else "the model itself"
        if name not in there or name not in here:
            return f"{place} is {'not in' if name not in there else 'only in'} what it builds"
        one, other = here[name], there[name]
        if one.kind is not other.kind:
            return f"{place} is {one.kind.__name__} here, {other.kind.__name__} there"
        if one.printed != other.printed:
            return f"{place} is {one.kind.__name__}({one.printed}) here, {other.kind.__name__}({other.printed}) there"
        if one.tensors != other.tensors:
            return f"the tensors of {place} have other names or shapes there"
        if one.first_name != other.first_name:
            return f"{place} is shared with other modules there"
        attribute = _other_attribute(one, other)
        if attribute is not None:
            return f"attribute {attribute!r} of {place} has another value there"
    for name in (name for name, facts in here.items() if issubclass(facts.kind, nn.Sequential)):  # calls them in order
        inside = [[key for key in names if key and key.rpartition(".")[0] == name] for names in (here, there)]
        if inside[0] != inside[1]:
            return f"the modules of {name!r} come in another order there"
    if ours.ties != built.ties:
        return "other parameters are tied there"
    return None


def _other_attribute(one: ModuleFacts, other: ModuleFacts) -> str | None:
    here, there = dict(one.attributes), dict(other.attributes)
    for name, value in there.items():
        if name not in here or here[name] != value:
            return name
    # What only our module has cannot matter to its class (notes of the user), unless it hides a part of the class.
    return next((name for name in here if name not in there and hasattr(one.kind, name)), None)


def _attributes(module: nn.Module) -> _Facts:
    state = module.__getstate__()  # without what a module can make again, such as prepared kernels
    state = state if isinstance(state, dict) else vars(module)
    found = []
    for name, value in state.items():
        if name.startswith("_") or name in _IGNORED:
            continue
        if name == "num_classes" and type(module).__module__.startswith("timm.") and isinstance(value, int):
            value = value > 0  # timm asks no more of it; it is out of date where a user replaced the classifier
        found.append((name, _value(value)))
    return tuple(sorted(found, key=lambda fact: fact[0]))


def _tensors(module: nn.Module) -> _Facts:
    parameters = [(name, None if tensor is None else tensor.shape) for name, tensor in module._parameters.items()]
    passing = module._non_persistent_buffers_set
    buffers = [
        (name, (None if tensor is None else tensor.shape, name in passing)) for name, tensor in module._buffers.items()
    ]
    return (*parameters, *buffers)


def _value(value: Any, depth: int = 0) -> Hashable:
    """A stand-in for a value that equals those of equal values. Lists are tuples: JSON cannot tell them apart."""
    inner = partial(_value, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, str, bytes, enum.Enum, type, torch.dtype)):
        return value
    if isinstance(value, float):
        return repr(value)  # no number equals itself too
    if isinstance(value, Tensor):
        return ("tensor", value.shape)
    if depth < _DEEPEST:
        if isinstance(value, (list, tuple)):
            return tuple(map(inner, value))
        if isinstance(value, (set, frozenset)):
            return frozenset(map(inner, value))
        if isinstance(value, Mapping):
            return ("mapping", *((inner(key), inner(item)) for key, item in value.items()))
        if isinstance(value, partial):
            return ("partial", inner(value.func), inner(value.args), inner(value.keywords))
        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return (type(value), *map(inner, fields))
        if inspect.isfunction(value) or inspect.ismethod(value):
            return ("function", value.__code__, inner(value.__defaults__), inner(_enclosed(value)))
    if inspect.isbuiltin(value):
        return ("function", value.__module__, value.__qualname__)
    return ("object", type(value))


def _enclosed(function: Any) -> list[Any]:
    """The values that a function made inside another keeps from there."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found

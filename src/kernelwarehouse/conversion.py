"""Plan -> converted model."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from kernelwarehouse.errors import ConvertError, PlanError
from kernelwarehouse.layers import (
    Conv1d,
    Conv2d,
    Conv3d,
    FusedQueryKeyValue,
    Linear,
    Source,
    WarehouseLayer,
    make_sources,
)
from kernelwarehouse.planning.discover import check_model, discover
from kernelwarehouse.planning.plan import Plan, PlannedWarehouse
from kernelwarehouse.planning.spec import LayerSpec
from kernelwarehouse.warehouse import Initializer, draw_cells, scale_for_logits, seed_from_kernels

_CONVS: dict[str, type[Conv1d] | type[Conv2d] | type[Conv3d]] = {"conv1d": Conv1d, "conv2d": Conv2d, "conv3d": Conv3d}
_PLAN = "_kernelwarehouse_plan"
_NAMES = "_kernelwarehouse_names"
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def convert(model: nn.Module, plan: Plan, *, initializer: Initializer | None = None) -> nn.Module:
    """A copy of the model whose planned layers draw on warehouses; the original is untouched.

    The cells are seeded from the model's present kernels: with a whole budget of 1 or more, the converted model gives
    the original's outputs where it starts, which is temperature 1, or 0 for a plan that begins at the logits
    (`WarehouseConfig.begin`). With an `initializer` they are drawn anew instead.
    The cells of layers that are frozen (`requires_grad` is `False`) are frozen; their attention, which is new, is not.

    Arguments:
        model: the model that the plan was made for.
        plan: made by `kernelwarehouse.plan`, edited or not.
        initializer: fills a kernel in place, such as `torch.nn.init.kaiming_normal_`.

    Raises:
        PlanError: for a plan that was made for another model.
        ConvertError: for a model that cannot be copied and for a warehouse whose layers differ in device, type or in
            being frozen.

    Example:
        >>> import torch, kernelwarehouse as kw
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).eval()
        >>> converted = kw.convert(model, kw.plan(model))
        >>> x = torch.randn(2, 3, 9, 9)
        >>> torch.allclose(converted(x), model(x), atol=1e-5)
        True
    """
    check_model(model)
    check_fits(model, plan)
    for warehouse in plan.warehouses:
        _check_alike(model, warehouse)
    try:
        converted = copy.deepcopy(model)
    except Exception as error:
        raise ConvertError(f"{type(model).__name__} cannot be copied: {error}") from error
    return apply_plan(converted, plan, {layer.spec.name: layer.spec.name for layer in plan.layers}, initializer)


def apply_plan(
    model: nn.Module, plan: Plan, names: Mapping[str, str], initializer: Initializer | None = None
) -> nn.Module:
    """Convert in place. `names` says what the plan's layers are called here; those it lacks are not in this model,
    which may be a part of the planned one, but keep their share of the cells."""
    replacements: dict[str, nn.Module] = {}
    for planned in plan.warehouses:
        replacements |= _convert_group(model, planned, names, initializer)
    model = replace_modules(model, replacements)
    setattr(model, _PLAN, plan)
    setattr(model, _NAMES, dict(names))
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan a model was converted with; `None` for a static one.

    Arguments:
        model: what `kernelwarehouse.convert`, `create_model` or `load` returned.
    """
    return getattr(model, _PLAN, None)


def names_of(model: nn.Module) -> dict[str, str]:
    """What the layers of a converted model's plan were called in the model when it was converted."""
    return getattr(model, _NAMES, {})


def converted_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that were converted by a plan, by name: the model itself, or what a wrapper holds."""
    return {name: module for name, module in model.named_modules() if _PLAN in vars(module)}


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for another model."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {type(plan).__name__}; a Plan made by kernelwarehouse.plan is wanted")
    if not plan.warehouses:
        raise PlanError("the plan has no warehouses; there is nothing to convert")
    found = {layer.label: layer for layer in discover(model).layers}
    mentioned = {layer.spec.label for layer in plan.layers} | {layer.name for layer in plan.static}
    for label in found:
        if label not in mentioned:
            raise PlanError(
                f"the plan is for another model: it lacks {label!r} ({found[label]}) of {type(model).__name__}"
            )
    for layer in plan.layers:
        here = found.get(layer.spec.label)
        if here is None:
            raise PlanError(
                f"the plan is for another model: it converts {layer.spec.label!r} ({layer.spec}), which "
                f"{type(model).__name__} does not have or cannot convert"
            )
        if here != layer.spec:
            raise PlanError(
                f"the plan is for another model: layer {here.label!r} is {here} here, {layer.spec} in the plan"
            )


def _check_alike(model: nn.Module, planned: PlannedWarehouse) -> None:
    """Refuse to share cells between layers that are frozen and layers that are trained, which would move both."""
    first = planned.layers[0].spec
    trained = _trained(model.get_submodule(first.name))
    for spec in (layer.spec for layer in planned.layers):
        if _trained(model.get_submodule(spec.name)) != trained:
            names = (first.label, spec.label) if trained else (spec.label, first.label)
            raise ConvertError(
                f"warehouse {planned.name!r} is shared by {names[0]!r}, which is trained, and {names[1]!r}, which is "
                "frozen (requires_grad is False); plan the model as it is now, which gives frozen layers their own"
            )


def _convert_group(
    model: nn.Module, planned: PlannedWarehouse, names: Mapping[str, str], initializer: Initializer | None
) -> dict[str, nn.Module]:
    """The new layers of one warehouse, by the name of the layer they replace."""
    specs = [layer.spec for layer in planned.layers]
    olds = [model.get_submodule(names[spec.name]) if spec.name in names else None for spec in specs]
    kernels = [None if old is None else _kernel(spec, old) for spec, old in zip(specs, olds, strict=True)]
    first = next((kernel for kernel in kernels if kernel is not None), None)
    if first is None:
        return {}
    for spec, kernel in zip(specs, kernels, strict=True):
        if kernel is not None and (kernel.device, kernel.dtype) != (first.device, first.dtype):
            raise ConvertError(
                f"warehouse {planned.name!r} is on {first.device} in {first.dtype}, its layer {spec.label!r} on "
                f"{kernel.device} in {kernel.dtype}; move them to one device and type, or give them own groups"
            )
    sources = make_sources(planned, first.device, first.dtype)
    cells = sources[0].warehouse.cells
    if first.device.type != "meta":
        _fill(cells, planned, kernels, initializer)
    cells.requires_grad_(any(_trained(old) for old in olds if old is not None))
    new = {}
    for spec, old, source in zip(specs, olds, sources, strict=True):
        if old is not None:
            layer = _layer(spec, old, source).train(old.training)
            _take_hooks(layer, old)
            _take_attributes(layer, old)
            new[names[spec.name]] = layer
    return new


def _fill(
    cells: Tensor, planned: PlannedWarehouse, kernels: Sequence[Tensor | None], initializer: Initializer | None
) -> None:
    """Seed the cells from the kernels, or draw those of every layer as its static kernel would be."""
    if initializer is None:
        # Without a start strategy there is nothing to meet, but trained values are still the better cells.
        starts = planned.starts("one_to_one" if planned.start == "none" else None)
        seed_from_kernels(cells, planned.partitions, planned.claims, starts, kernels)
    else:
        for partition, claim in zip(planned.partitions, planned.claims, strict=True):
            draw_cells(cells, partition, claim, initializer)
    if planned.begin == "logits":
        scale_for_logits(cells, planned.starts())


def _kernel(spec: LayerSpec, old: nn.Module) -> Tensor:
    weight = old.get_parameter("weight")
    return weight[-spec.out_channels :] if spec.part == "value" else weight


def _trained(old: nn.Module) -> bool:
    return old.get_parameter("weight").requires_grad


def _layer(spec: LayerSpec, old: nn.Module, source: Source) -> nn.Module:
    bias = old._parameters.get("bias")
    layer: WarehouseLayer
    if isinstance(old, nn.Linear):
        layer = Linear(spec.in_channels, spec.out_channels, bias is not None, source=source)
        if spec.part == "value":
            if bias is not None:
                layer.bias = nn.Parameter(bias[-spec.out_channels :].detach().clone(), bias.requires_grad)
            return FusedQueryKeyValue(_query_key(old), layer)
    elif isinstance(old, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        layer = _CONVS[spec.kind](
            old.in_channels,
            old.out_channels,
            old.kernel_size,
            old.stride,
            old.padding,  # type: ignore[arg-type]
            old.dilation,
            old.groups,
            bias is not None,
            old.padding_mode,
            source=source,
        )
    else:
        raise ConvertError(f"layer {spec.label!r} is a {type(old).__name__}, which has no converted twin")
    if bias is not None:
        layer.bias = bias  # the copy's own parameter, so that ties and requires_grad stay
    return layer


def _take_hooks(layer: nn.Module, old: nn.Module) -> None:
    for hooks in _HOOKS:
        getattr(layer, hooks).update(getattr(old, hooks))
    # Without this torch does not call full backward hooks, and says nothing.
    layer._is_full_backward_hook = old._is_full_backward_hook


def _take_attributes(layer: nn.Module, old: nn.Module) -> None:
    """What a model has pinned on a layer, to read it later: anything that torch's own layer does not have."""
    base = next(base for base in type(old).__mro__ if base.__module__.startswith("torch.nn.modules."))
    own = vars(_bare(base))
    for name, value in vars(old).items():
        if name not in own and name not in vars(layer):
            setattr(layer, name, value)


@cache
def _bare(kind: type[nn.Module]) -> nn.Module:
    """torch's own convolution or linear layer, without memory."""
    with torch.device("meta"):
        return kind(1, 1) if kind is nn.Linear else kind(1, 1, 1)


def _query_key(old: nn.Linear) -> nn.Linear:
    """The first two thirds of a fused layer."""
    rows = 2 * old.in_features
    new = nn.Linear(old.in_features, rows, old.bias is not None, device="meta", dtype=old.weight.dtype)
    new.weight = nn.Parameter(old.weight[:rows].detach().clone(), old.weight.requires_grad)
    if old.bias is not None:
        new.bias = nn.Parameter(old.bias[:rows].detach().clone(), old.bias.requires_grad)
    return new.train(old.training)


def replace_modules(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """Put new modules in the place of named ones, everywhere each is used; returns the model (or its replacement)."""
    by_identity = {id(model.get_submodule(name)): new for name, new in replacements.items()}
    if id(model) in by_identity:
        return by_identity[id(model)]
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for module in model.modules():
        for name, child in module._modules.items():
            if id(child) in by_identity:
                places.append((module, name, by_identity[id(child)]))
    for module, name, new in places:
        module._modules[name] = new
    return model


def converted_layers(model: nn.Module) -> dict[str, WarehouseLayer]:
    """The converted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WarehouseLayer)}

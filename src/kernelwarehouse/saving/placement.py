"""Where the layers of a plan are in a model: in a converted one when it is saved, in a static one when it is loaded."""

from dataclasses import dataclass

from torch import nn

from kernelwarehouse.conversion import apply_plan, converted_layers, converted_parts, names_of, plan_of
from kernelwarehouse.errors import PlanError
from kernelwarehouse.layers import FusedQueryKeyValue, WarehouseLayer
from kernelwarehouse.planning.discover import check_model
from kernelwarehouse.planning.plan import Plan, PlannedWarehouse
from kernelwarehouse.planning.spec import LayerSpec
from kernelwarehouse.planning.static import kind_of


@dataclass(frozen=True)
class Placement:
    """A plan and what its layers are called in one model. Layers without a name are not in that model (a backbone for
    features, a network with another classifier) but keep their share of the cells."""

    plan: Plan
    names: dict[str, str]

    @classmethod
    def whole(cls, plan: Plan) -> "Placement":
        """Every layer under the name that the plan gives it."""
        return cls(plan, {layer.spec.name: layer.spec.name for layer in plan.layers})

    def apply(self, model: nn.Module, part: str = "") -> nn.Module:
        """Convert a new, static model in place, or the named part of it that the plan is for."""
        check_model(model)
        inside = f"{part}." if part else ""
        for layer in self.plan.layers:
            name = self.names.get(layer.spec.name)
            if name is not None:
                if not name.startswith(inside):
                    raise PlanError(f"the plan is for another model: it converts {name!r}, which is not in {part!r}")
                _check_layer(model, name, layer.spec)
        names = {planned: name.removeprefix(inside) for planned, name in self.names.items()}
        converted = apply_plan(model.get_submodule(part), self.plan, names)
        return model if part else converted


def find_placement(model: nn.Module) -> tuple[Placement | None, str | None]:
    """Where the layers of a converted model, or of the converted model that a wrapper holds, are now; and what keeps
    the plan from describing all layers that draw on warehouses.

    There is no placement for static models, and for those whose own code makes layers with warehouses.
    """
    parts = converted_parts(model)
    if not parts:
        return None, None
    if len(parts) > 1:
        listed = " and ".join(repr(name) if name else "the model itself" for name in list(parts)[:2])
        return None, f"it holds several converted models ({listed}); save each by itself"
    [(prefix, part)] = parts.items()
    plan = plan_of(part)
    if plan is None:
        return None, None
    modules = dict(model.named_modules(remove_duplicate=False))
    placed: dict[str, WarehouseLayer] = {}
    names: dict[str, str] = {}
    for planned, inside in names_of(part).items():
        path = ".".join(filter(None, (prefix, inside)))
        module = modules.get(path)
        layer = module.value if isinstance(module, FusedQueryKeyValue) else module
        if isinstance(layer, WarehouseLayer):
            placed[planned], names[planned] = layer, path
    known = {id(layer) for layer in placed.values()}
    for path, layer in converted_layers(model).items():
        if id(layer) not in known:
            problem = f"layer {path!r} draws on a warehouse, and the plan does not have it under this name"
            return Placement(plan, names), problem
    return Placement(plan, names), next(filter(None, (_deviation(each, placed) for each in plan.warehouses)), None)


def _deviation(planned: PlannedWarehouse, placed: dict[str, WarehouseLayer]) -> str | None:
    """What is no longer as planned in the layers of one warehouse."""
    first: WarehouseLayer | None = None
    for index, layer in enumerate(planned.layers):
        here = placed.get(layer.spec.name)
        if here is None:
            continue
        first = first or here
        cells = here.warehouse.cells.shape
        if here.warehouse is not first.warehouse:
            return f"layer {layer.spec.label!r} no longer shares the warehouse {planned.name!r} of its plan"
        wanted = (planned.name, (planned.cells, *planned.cell_shape), planned.partitions[index])
        found = (here.warehouse.name, tuple(cells), here.geometry.partition)
        if found != wanted or here.attention.shape != planned.attention_shape(index):
            return f"layer {layer.spec.label!r} is another than the plan has under this name"
    return None


def _check_layer(model: nn.Module, name: str, spec: LayerSpec) -> None:
    other = "the plan is for another model"
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"{other}: it converts {name!r} ({spec}), which {type(model).__name__} does not have") from None
    kind, weight = kind_of(module), module._parameters.get("weight")
    if kind is None or weight is None:
        raise PlanError(f"{other}: it converts {name!r} ({spec}), which is a {type(module).__name__} here")
    rows, *rest = spec.kernel_shape
    shape = (3 * rows, *rest) if spec.part == "value" else spec.kernel_shape
    here = (kind, tuple(weight.shape), getattr(module, "groups", 1))
    if here != (spec.kind, shape, spec.groups):
        raise PlanError(f"{other}: layer {name!r} is {kind} {here[1]} here, {spec.kind} {shape} in the plan")

"""The plan: which layers draw on which warehouse, and what that makes of the model. Pure data, printable, JSON."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_args

from rich.table import Table

from kernelwarehouse._files import write_file
from kernelwarehouse._terminal import printed
from kernelwarehouse.assignment import CellRanges, claimed_cells, start_cells
from kernelwarehouse.attention import AttentionShape, LowRank
from kernelwarehouse.config import (
    MOST_BUDGET,
    AttentionFunction,
    Begin,
    Norm,
    Start,
    WarehouseConfig,
    check_begin,
    check_choice,
    check_positive,
    exact,
    parse_number,
)
from kernelwarehouse.errors import KernelWarehouseError, PlanError
from kernelwarehouse.partition import Partition
from kernelwarehouse.planning.patterns import Patterns
from kernelwarehouse.planning.spec import Kind, LayerSpec, Order, StaticLayer

PLAN_VERSION = 1


@dataclass(frozen=True)
class PlannedLayer:
    """A layer and the attention it gets."""

    spec: LayerSpec
    hidden: int
    norm: Norm = "batch"
    attention: AttentionFunction = "caf"
    low_rank: float | None = None


@dataclass(frozen=True)
class PlannedWarehouse:
    """A warehouse and the layers that share it, in the order in which they claim cells."""

    name: str
    layers: tuple[PlannedLayer, ...]
    cell_shape: tuple[int, ...]
    budget: float = 1.0
    start: Start = "one_to_one"
    own_cells_only: bool = False
    begin: Begin = "temperature"

    def __post_init__(self) -> None:
        where = f"warehouse {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"a warehouse is named {self.name!r}; text is wanted")
        if not all(isinstance(size, int) for size in self.cell_shape):
            raise PlanError(f"{where} has cells of {self.cell_shape}; whole numbers are wanted")
        if not self.layers:
            raise PlanError(f"{where} has no layers")
        object.__setattr__(self, "budget", parse_number(self.budget, f"{where}: budget"))
        check_positive(self.budget, f"{where}: budget", MOST_BUDGET)
        check_choice(self.start, f"{where}: start", get_args(Start))
        check_choice(self.begin, f"{where}: begin", get_args(Begin))
        names = ", ".join(layer.spec.label for layer in self.layers[:3])
        for layer in self.layers:
            self._check_layer(layer, where)
        if self.own_cells_only and (self.budget < 1 or self.budget != int(self.budget)):
            raise PlanError(f"{where} ({names}): sharing 'none' needs a whole budget of 1 or more, not {self.budget:g}")
        if self.start == "many_to_one" and self.budget < 1:
            raise PlanError(f"{where} ({names}): start 'many_to_one' needs a budget of 1 or more, not {self.budget:g}")
        if self.start == "one_to_many" and self.budget > 1:
            raise PlanError(f"{where} ({names}): start 'one_to_many' needs a budget of at most 1, not {self.budget:g}")
        if self.begin == "logits" and self.own_cells_only and not self._starts_from_own_cells():
            raise PlanError(
                f"{where} ({names}): start {self.start!r} gives mixtures cells that they do not see with sharing "
                "'none', and their logits cannot begin there; start 'one_to_one' in a warehouse of one layer is wanted"
            )
        if self.begin == "logits" and (asleep := self._start_as_zero()):
            # By temperature, attentions take over as it falls; here a norm and a ReLU would let no gradient through.
            raise PlanError(
                f"{where}: {', '.join(map(repr, asleep[:3]))} ({len(asleep)} of {len(self.layers)} layers) would start "
                f"from none of its {self.cells} cells, as zero, and begun at the logits might stay so; a larger budget "
                f"than {self.budget:g}, sharing 'layer' or begin 'temperature' is wanted"
            )

    def _starts_from_own_cells(self) -> bool:
        for partition, ranges in zip(self.partitions, self.starts(), strict=True):
            own = self.cells // partition.mixtures
            if any(
                run and not index * own <= run.start < run.stop <= (index + 1) * own for index, run in enumerate(ranges)
            ):
                return False
        return True

    def _start_as_zero(self) -> list[str]:
        return [layer.spec.label for layer, ranges in zip(self.layers, self.starts(), strict=True) if not any(ranges)]

    def _check_layer(self, layer: PlannedLayer, where: str) -> None:
        try:
            Partition(layer.spec.kernel_shape, self.cell_shape)
        except PlanError as error:
            raise PlanError(f"{where}: layer {layer.spec.label!r} cannot be split: {error}") from None
        check_begin(self.begin, layer.attention, self.start, f"{where}: layer {layer.spec.label!r}: ")
        if layer.low_rank is not None:
            check_positive(layer.low_rank, f"{where}: layer {layer.spec.label!r}: low_rank", 1.0)
            if self.own_cells_only:
                raise PlanError(f"{where}: layer {layer.spec.label!r}: sharing 'none' has no low-rank attention")
        if layer.hidden < 1:
            raise PlanError(
                f"{where}: layer {layer.spec.label!r} has a hidden width of {layer.hidden}; 1 or more is wanted"
            )

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(Partition(layer.spec.kernel_shape, self.cell_shape) for layer in self.layers)

    @property
    def mixtures(self) -> int:
        """The paper's m_t."""
        return sum(partition.mixtures for partition in self.partitions)

    @property
    def cells(self) -> int:
        """The paper's n."""
        return max(int(exact(self.budget) * self.mixtures), 1)

    @cached_property
    def claims(self) -> list[range]:
        """The cells that each layer claims."""
        return claimed_cells([partition.mixtures for partition in self.partitions], self.cells)

    def starts(self, start: Start | None = None) -> list[CellRanges]:
        """Per layer and mixture, the cells it starts from."""
        return start_cells(start or self.start, [partition.mixtures for partition in self.partitions], self.cells)

    def attention_shape(self, index: int) -> AttentionShape:
        """The attention branch of the layer at `index`."""
        layer, mixtures = self.layers[index], self.partitions[index].mixtures
        low_rank = None
        if layer.low_rank is not None:
            local = int(exact(self.budget) * mixtures)
            low_rank = LowRank.of(layer.low_rank, self.cells, self.claims[index].start, local)
        return AttentionShape(
            layer.spec.in_channels,
            mixtures,
            self.cells,
            layer.hidden,
            layer.norm,
            layer.attention,
            low_rank,
            self.own_cells_only,
            self.begin,
        )

    @cached_property
    def attention_parameters(self) -> int:
        return sum(self.attention_shape(index).parameters() for index in range(len(self.layers)))

    @property
    def cell_parameters(self) -> int:
        return self.cells * math.prod(self.cell_shape)


@dataclass(frozen=True, repr=False)
class Plan:
    """What `convert` will do. Edit it with `with_warehouse` and `without`, or as JSON; every edit is checked.

    `print(plan)` shows it as a table. `warehouses` are in the order of first use, `static` are the layers that stay as
    they are, with the reason, `parameters_before` and `parameters_after` count the whole model.

    Example:
        >>> import kernelwarehouse as kw
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
        >>> plan = kw.plan(model)
        >>> [(warehouse.name, warehouse.mixtures, warehouse.cells) for warehouse in plan.warehouses]
        [('stage1', 18, 18)]
        >>> plan.with_warehouse("stage1", budget=4).warehouses[0].cells
        72
        >>> [(layer.name, layer.reason) for layer in plan.without("2").static]
        [('0', 'the stem (static_stem)'), ('2', 'taken out of the plan')]
    """

    warehouses: tuple[PlannedWarehouse, ...]
    static: tuple[StaticLayer, ...]
    parameters_before: int
    config: WarehouseConfig
    order: Order | None = None  # where the order of the layers comes from; plans of old files do not say

    def __post_init__(self) -> None:
        if self.order is not None:
            check_choice(self.order, "the order of the plan", get_args(Order))
        owners: dict[str, str] = {}
        names: set[str] = set()
        for warehouse in self.warehouses:
            if warehouse.name in names:
                raise PlanError(f"two warehouses are named {warehouse.name!r}")
            names.add(warehouse.name)
            for layer in warehouse.layers:
                label = layer.spec.label
                if label in owners:
                    raise PlanError(f"layer {label!r} is in warehouses {owners[label]!r} and {warehouse.name!r}")
                owners[label] = warehouse.name

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """All layers that will be converted, warehouse by warehouse."""
        return tuple(layer for warehouse in self.warehouses for layer in warehouse.layers)

    @property
    def parameters_after(self) -> int:
        """Parameters of the converted model."""
        removed = sum(layer.spec.parameters for layer in self.layers)
        added = sum(warehouse.cell_parameters + warehouse.attention_parameters for warehouse in self.warehouses)
        return self.parameters_before - removed + added

    def warehouse(self, name: str) -> PlannedWarehouse:
        """A warehouse by its name.

        Raises:
            PlanError: where there is none of that name.
        """
        for warehouse in self.warehouses:
            if warehouse.name == name:
                return warehouse
        known = ", ".join(warehouse.name for warehouse in self.warehouses)
        raise PlanError(f"the plan has no warehouse {name!r}; it has {known}")

    def with_warehouse(self, name: str, /, **changes: Any) -> Self:
        """The plan with other `budget`, `start`, `begin`, `cell_shape`, `layers` or `name` for one warehouse.

        Raises:
            PlanError: for an unknown warehouse or setting, and for a value that does not fit the layers.
        """
        known = {field.name for field in dataclasses.fields(PlannedWarehouse)}
        for change in changes:
            if change not in known:
                raise PlanError(f"a warehouse has no setting {change!r}; it has {', '.join(sorted(known))}")
        edited = dataclasses.replace(self.warehouse(name), **changes)
        warehouses = tuple(edited if warehouse.name == name else warehouse for warehouse in self.warehouses)
        return dataclasses.replace(self, warehouses=warehouses)

    def without(self, *patterns: str) -> Self:
        """The plan with the matching layers left static. Warehouses that lose layers shrink with them.

        Arguments:
            patterns: shell-style, as in `WarehouseConfig.exclude`.

        Raises:
            PlanError: for a pattern that matches no layer of the plan.
        """
        chosen = Patterns(patterns, [layer.spec.label for layer in self.layers]).matches
        static = list(self.static)
        warehouses = []
        for warehouse in self.warehouses:
            kept = tuple(layer for layer in warehouse.layers if layer.spec.label not in chosen)
            for layer in warehouse.layers:
                if layer.spec.label in chosen:
                    spec = layer.spec
                    static.append(StaticLayer(spec.label, spec.kind, spec.parameters, "taken out of the plan"))
            if kept:
                warehouses.append(dataclasses.replace(warehouse, layers=kept))
        return dataclasses.replace(self, warehouses=tuple(warehouses), static=tuple(static))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary. The counts in it are for readers; `from_dict` checks them."""
        return {
            "version": PLAN_VERSION,
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "warehouses": [_warehouse_to_dict(warehouse) for warehouse in self.warehouses],
            "static": [dataclasses.asdict(layer) for layer in self.static],
            "config": self.config.to_dict(),
            "order": self.order,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` made. Counts that no longer fit after an edit by hand may be left out.

        Raises:
            PlanError: for what is no plan, one of a newer version, or one that contradicts itself.
        """
        try:
            version = data["version"]
            if version != PLAN_VERSION:
                newer = isinstance(version, int) and version > PLAN_VERSION
                hint = "a newer version of kernelwarehouse wrote it" if newer else "it is damaged"
                raise PlanError(f"the plan has version {version!r}; this library reads {PLAN_VERSION}: {hint}")
            plan = cls(
                tuple(_warehouse_from_dict(item) for item in data["warehouses"]),
                tuple(StaticLayer(**item) for item in data["static"]),
                data["parameters_before"],
                WarehouseConfig.from_dict(data["config"]),
                data.get("order"),
            )
            claimed = data.get("parameters_after", plan.parameters_after)
        except KernelWarehouseError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {type(error).__name__} {error}") from error
        if claimed != plan.parameters_after:
            raise PlanError(
                f"the plan says {claimed} parameters after conversion, its warehouses make {plan.parameters_after}; "
                "correct 'parameters_after' or leave it out"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, aside first, so that a failure leaves an old file whole.

        Raises:
            PlanError: where it cannot be written.
        """
        try:
            write_file(path, json.dumps(self.to_dict(), indent=1))
        except OSError as error:
            raise PlanError(f"the plan cannot be written to {os.fspath(path)}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from what `Plan.save` or `kernelwarehouse.save` (its `plan.json`) wrote.

        Raises:
            PlanError: where there is no plan that can be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"no plan can be read from {os.fspath(path)}: {error}") from error
        # `kernelwarehouse.save` puts the plan beside what it needs to rebuild the model.
        return cls.from_dict(data["plan"] if isinstance(data, dict) and data.get("plan") else data)

    def __repr__(self) -> str:
        counts = f"{len(self.warehouses)} warehouses, {len(self.layers)} layers"
        return f"Plan({counts}, {self.parameters_before:,} -> {self.parameters_after:,} parameters)"

    def __rich__(self) -> Table:
        from kernelwarehouse.planning.table import plan_table  # printing knows plans, plans need not know printing

        return plan_table(self)

    def __str__(self) -> str:
        return printed(self)


def _warehouse_to_dict(warehouse: PlannedWarehouse) -> dict[str, Any]:
    fields = dataclasses.asdict(warehouse)
    return fields | {"m": warehouse.mixtures, "n": warehouse.cells}


def _warehouse_from_dict(data: Mapping[str, Any]) -> PlannedWarehouse:
    fields = dict(data)
    claimed = {"m": fields.pop("m", None), "n": fields.pop("n", None)}
    layers = []
    for item in fields.pop("layers"):
        spec = dict(item["spec"])
        check_choice(spec["kind"], f"layer {spec['name']!r}: kind", get_args(Kind))
        spec["kernel_shape"] = tuple(spec["kernel_shape"])
        layers.append(PlannedLayer(**{**item, "spec": LayerSpec(**spec)}))
    fields["cell_shape"] = tuple(fields["cell_shape"])
    warehouse = PlannedWarehouse(layers=tuple(layers), **fields)
    for name, value in (("m", warehouse.mixtures), ("n", warehouse.cells)):
        if claimed[name] not in (None, value):
            raise PlanError(
                f"warehouse {warehouse.name!r} says {name} = {claimed[name]}, its layers, cell shape and budget make "
                f"{value}; correct '{name}' or leave it out"
            )
    return warehouse

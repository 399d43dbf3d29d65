"""What `print(plan)` and `kernelwarehouse plan` show."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.planning.spec import Order, StaticLayer

_ORDERS: dict[Order, str] = {
    "traced": "layers in the order of the forward pass (traced)",
    "run": "layers in the order of a run with the example",
    "registration": "layers in the order of registration (the model cannot be traced, and no example was given)",
}


def plan_table(plan: Plan) -> Table:
    """The table that `print(plan)` and `kernelwarehouse plan` show."""
    before, after = plan.parameters_before, plan.parameters_after
    ratio = f" ({after / before:.2f}x)" if before else ""
    order = None if plan.order is None else _ORDERS[plan.order]
    caption = Text("\n".join(filter(None, (order, _begin(plan)))), style="table.caption")
    table = Table(title=f"{plan!r}{ratio}", title_justify="left", expand=False, caption=caption, caption_justify="left")
    for heading in ("warehouse", "layers", "cell", "m", "n", "b", "cells", "attention"):
        text = heading in ("warehouse", "layers", "cell")
        # Only the layers' column gives way on a narrow terminal, and it folds: no name is ever cut.
        table.add_column(heading, justify="left" if text else "right", no_wrap=heading != "layers", overflow="fold")
    for warehouse in plan.warehouses:
        table.add_row(
            # Names are the model's, and not markup, whichever console prints them.
            Text(warehouse.name),
            Text(shorten([layer.spec.label for layer in warehouse.layers])),
            "x".join(map(str, warehouse.cell_shape)),
            f"{warehouse.mixtures}",
            f"{warehouse.cells}",
            f"{warehouse.budget:g}",
            f"{warehouse.cell_parameters:,}",
            f"{warehouse.attention_parameters:,}",
        )
    by_reason: dict[str, list[StaticLayer]] = {}
    for layer in plan.static:
        by_reason.setdefault(layer.reason, []).append(layer)
    table.add_section()
    for reason, layers in by_reason.items():
        names = shorten([layer.name for layer in layers])
        kept = f"{sum(layer.parameters for layer in layers):,}"
        table.add_row("static", Text(f"{names}: {reason}"), "", "", "", "", kept, "")
    return table


def _begin(plan: Plan) -> str | None:
    """Which warehouses begin at the logits, where any do."""
    names = [warehouse.name for warehouse in plan.warehouses if warehouse.begin == "logits"]
    if not names:
        return None
    which = "" if len(names) == len(plan.warehouses) else f" in {shorten(names)}"
    return f"attentions begin at their logits, temperature 0{which}"


def shorten(names: Sequence[str], most: int = 4) -> str:
    """The first names, the last one and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, ..., {names[-1]} ({len(names)})"

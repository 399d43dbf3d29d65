from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelwarehouse.assemble import route_table, routing


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Measuring is on; the file of the machine is a new one."""
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    path = tmp_path / "kernels" / "routes.json"
    monkeypatch.setattr(route_table, "machine_file", lambda: path)
    route_table._of_machine.cache_clear()
    monkeypatch.setattr(routing, "_answers", {})
    yield path
    route_table._of_machine.cache_clear()

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernelwarehouse.assemble import route_table, routing


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Measuring is on, by one thread, as what several find beside other tests does not last; the file is a new one."""
    torch.set_num_threads(1)
    monkeypatch.delenv(route_table.VARIABLE, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(routing, "_answers", {})
    _as_a_new_process()
    path = route_table.machine_file()
    assert path is not None
    yield path
    _as_a_new_process()


def _as_a_new_process() -> None:
    route_table.machine_file.cache_clear()
    route_table._of_machine.cache_clear()

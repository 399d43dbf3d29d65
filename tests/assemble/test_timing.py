"""Taking times, with a clock that says what the test wants."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernelwarehouse.assemble import timing
from kernelwarehouse.assemble.rates import machine_rates

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Seconds of every run by name; the last ones are those of all later runs."""
    seconds: dict[str, list[float]] = {}

    def taken(run: Callable[[], str], device: torch.device) -> float:
        left = seconds[run()]
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(timing, "_seconds", taken)
    return seconds


def _best(*names: str, counts: dict[str, int]) -> dict[str, float]:
    def run(name: str) -> str:
        counts[name] = counts.get(name, 0) + 1
        return name

    return timing.best_times({name: lambda name=name: run(name) for name in names}, CPU)


def test_the_fastest_run_counts(clock: dict[str, list[float]]) -> None:
    clock.update(a=[1.6, 1.0, 2.0], b=[1.5, 1.4, 1.4])
    assert _best("a", "b", counts={}) == {"a": 1.0, "b": 1.4}


def test_a_cold_first_run_is_made_up_for(clock: dict[str, list[float]]) -> None:
    clock.update(a=[4.0, 1.0, 2.0], b=[1.5, 1.4, 1.4])
    assert _best("a", "b", counts={}) == {"a": 1.0, "b": 1.4}
    clock.update(a=[5.0, 1.0, 2.0], b=[1.5, 1.4, 1.4])
    assert _best("a", "b", counts={}) == {"a": 5.0, "b": 1.4}  # beyond hope
    clock.update(a=[4.0, 2.5, 1.0], b=[1.5, 1.4, 1.4])
    assert _best("a", "b", counts={}) == {"a": 2.5, "b": 1.4}  # once


def test_what_is_hopeless_is_not_run_again_but_first_runs_of_short_ones_do_not_count(
    clock: dict[str, list[float]],
) -> None:
    counts: dict[str, int] = {}
    clock.update(fast=[1.0], slow=[9.0])
    _best("fast", "slow", counts=counts)
    assert counts == {"fast": 3, "slow": 1}
    counts.clear()
    clock.update(fast=[0.001], warmed=[0.004, 0.0005])
    assert _best("fast", "warmed", counts=counts)["warmed"] == 0.0005
    assert counts["warmed"] > 3  # short runs are repeated until there is something to compare


def test_other_threads_of_the_process_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    others: list[float] = []

    def work() -> None:
        while time.thread_time() < 0.05:
            sum(range(1000))
        others.append(time.thread_time())

    def run() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert timing._seconds(run, CPU) < others[0]


def test_waiting_for_another_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may sleep meanwhile, which its own clock does not see."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    taken = timing.best_times({"wait": lambda: time.sleep(0.02)}, torch.device("cuda"))
    assert taken["wait"] >= 0.02


def test_rates_are_numbers_of_this_machine() -> None:
    rates = machine_rates(torch.device("cpu"), torch.get_num_threads())
    assert rates.few_products > 1e6
    assert 1e6 < rates.products < 1e14
    assert 1e5 < rates.reads < 1e13
    assert machine_rates(torch.device("cpu"), torch.get_num_threads()) is rates


CROWD = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
torch.set_num_threads(2)
from kernelwarehouse.assemble import route_table
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv2d
layer = Conv2d(32, 32, 3, padding=1, config=WarehouseConfig(2))
with torch.no_grad():
    layer(torch.randn(4, 32, 48, 48))
print(layer.route.reason.split(":")[0], route_table.machine_file().exists())
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads have waited")
def test_what_threads_find_without_a_processor_each_is_not_for_the_next_time(tmp_path: Path) -> None:
    """Of two that share one, each keeps the other waiting, whatever else the machine does."""
    variables = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "KERNELWAREHOUSE_NATIVE": "0"}
    variables.pop("KERNELWAREHOUSE_ROUTES", None)
    done = subprocess.run([sys.executable, "-c", CROWD], env=variables, capture_output=True, text=True, check=False)
    expected = "measured while others had the processor, so not for the next time False"
    assert done.stdout.strip() == expected, done.stderr


def test_a_system_that_does_not_tell_of_waits_is_taken_for_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_waited", dict)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not timing.Watch().crowded()

"""bfloat16 on processors where torch dies of it: helped where that is possible, refused with the remedy where not.

The trials here die as torch does on such processors; the real trial runs in every session, from `conftest.py`.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch

from kernelwarehouse import _bfloat16
from kernelwarehouse._bfloat16 import CAP, VARIABLE, require_computable
from kernelwarehouse.compare.measure import QUICK, measure
from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import PrecisionError
from kernelwarehouse.layers import Conv2d, Linear
from kernelwarehouse.training.api import train
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.evaluate import evaluate
from kernelwarehouse.training.loading import Batch
from kernelwarehouse.training.predict import TrainedNetwork
from kernelwarehouse.training.recipe import load_recipe

TESTS = Path(__file__).parent
FAULTING = TESTS / "faulting_trial.py"
CPU = torch.device("cpu")

# Asks whether bfloat16 can be used, as a process that has not asked before, on a machine with each of the trials given.
ASK = """
import os, sys
from pathlib import Path
import torch
from kernelwarehouse import _bfloat16
from kernelwarehouse.errors import PrecisionError

def ask(trial, cap):
    _bfloat16.TRIAL, _bfloat16.CAP = Path(trial), cap
    for _ in range(2):
        try:
            _bfloat16.require_computable(torch.device("cpu"), torch.bfloat16)
            print("works with", os.environ.get("ONEDNN_MAX_CPU_ISA"))
        except PrecisionError as error:
            print(error)
    for name in ("ONEDNN_MAX_CPU_ISA", _bfloat16._REMEMBERED):
        os.environ.pop(name, None)
    _bfloat16._problem.cache_clear()

trials = sys.argv[1:]
for pair in zip(trials[::2], trials[1::2]):
    ask(*pair)
sys.max_cpu_isa = None  # what the stand-in for oneDNN has read
torch.nn.functional.conv2d(torch.ones(16, 64, 32, 32), torch.ones(64, 64, 3, 3))
for pair in zip(trials[::2], trials[1::2]):
    ask(*pair)
"""

# What oneDNN itself says it may use, as a trial: dies unless that is SSE4.1, the least there is.
ASK_ONEDNN = """
import ctypes, os, signal, tempfile, torch
with tempfile.TemporaryFile() as file:
    stdout = os.dup(1)
    os.dup2(file.fileno(), 1)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        torch.nn.functional.conv2d(torch.ones(16, 64, 32, 32), torch.ones(64, 64, 3, 3))
    ctypes.CDLL(None).fflush(None)
    os.dup2(stdout, 1)
    file.seek(0)
    said = file.read()
if b"isa:Intel SSE4.1" not in said:
    os.kill(os.getpid(), signal.SIGILL)
"""


def _environment() -> dict[str, str]:
    """Without what this session has found out about bfloat16."""
    return {key: value for key, value in os.environ.items() if key not in (VARIABLE, _bfloat16._REMEMBERED)}


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has not asked yet."""
    for name in (VARIABLE, _bfloat16._REMEMBERED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _bfloat16._problem.cache_clear()
    yield
    _bfloat16._problem.cache_clear()


def _trial(folder: Path, source: str) -> Path:
    path = folder / "trial.py"
    path.write_text(source)
    return path


@pytest.mark.usefixtures("new_process")
def test_healthy_machine_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(_bfloat16, "TRIAL", _trial(tmp_path, f"print(file=open({str(runs)!r}, 'a'))"))
    for _ in range(2):
        require_computable(CPU, torch.bfloat16)
    assert VARIABLE not in os.environ
    _bfloat16._problem.cache_clear()  # a child process has no cache, but the environment
    require_computable(CPU, torch.bfloat16)
    assert runs.read_text() == "\n"
    monkeypatch.setenv(VARIABLE, "AVX2")  # of which nothing is known
    _bfloat16._problem.cache_clear()
    require_computable(CPU, torch.bfloat16)
    assert runs.read_text() == "\n\n"


@pytest.mark.usefixtures("new_process")
def test_where_no_process_can_be_started_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "no-such-python")
    for _ in range(2):
        require_computable(CPU, torch.bfloat16)
    (record,) = caplog.records
    assert "no-such-python" in record.getMessage()


@pytest.mark.usefixtures("new_process")
def test_nothing_is_tried_for_other_types_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bfloat16, "TRIAL", _trial(tmp_path, "raise SystemExit(1)"))
    require_computable(CPU, torch.float32)
    require_computable(torch.device("cuda"), torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        require_computable(CPU, torch.float32)
    Conv2d(8, 8, 3)(torch.ones(1, 8, 5, 5))
    assert _bfloat16._problem.cache_info().misses == 0


def test_cap_is_set_where_it_helps_and_refused_where_it_comes_too_late(tmp_path: Path) -> None:
    """Once on a machine that faults, and once by the word of this machine's oneDNN, where it has one."""
    machines = [(str(FAULTING), CAP)]
    if platform.machine() in ("x86_64", "AMD64"):
        machines.append((str(_trial(tmp_path, ASK_ONEDNN)), "SSE41"))
    child = subprocess.run(
        [sys.executable, "-c", ASK, *(word for machine in machines for word in machine)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = child.stdout.splitlines()
    caps = [cap for _, cap in machines for _ in range(2)]
    assert answers[: len(caps)] == [f"works with {cap}" for cap in caps]
    for answer, cap in zip(answers[len(caps) :], caps, strict=True):
        assert "the process died of signal 4, Illegal instruction" in answer
        assert f"{VARIABLE}={cap}" in answer
        assert "set it before the process starts" in answer


@pytest.fixture
def hopeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_process: None) -> None:
    source = "raise RuntimeError('could not create a primitive')"
    monkeypatch.setattr(_bfloat16, "TRIAL", _trial(tmp_path, source))


@pytest.mark.usefixtures("hopeless")
def test_machine_that_no_cap_helps_is_refused() -> None:
    for _ in range(2):
        with pytest.raises(PrecisionError, match=f"could not create a primitive.*not even with {VARIABLE}={CAP}"):
            require_computable(CPU, torch.bfloat16)
    assert VARIABLE not in os.environ
    assert _bfloat16._REMEMBERED not in os.environ


@pytest.mark.usefixtures("hopeless")
def test_layers_refuse_instead_of_dying() -> None:
    layers = [(Conv2d(8, 8, 3), torch.ones(1, 8, 5, 5)), (Linear(4, 4), torch.ones(2, 4))]
    for layer, x in layers:
        with pytest.raises(PrecisionError, match=VARIABLE), torch.autocast("cpu", torch.bfloat16):
            layer(x)
        with pytest.raises(PrecisionError, match=VARIABLE):
            layer.bfloat16()(x.bfloat16())


@pytest.mark.usefixtures("hopeless")
def test_training_refuses_before_anything_is_written(tmp_path: Path) -> None:
    recipe = load_recipe("small").with_overrides({"precision": "bfloat16"})
    with pytest.raises(PrecisionError, match=VARIABLE):
        train("resnet18", open_dataset("embedded"), recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("hopeless")
def test_evaluation_prediction_and_comparison_refuse() -> None:
    network = timm.create_model("resnet18", num_classes=2)
    data = open_dataset("embedded")
    trained = TrainedNetwork(network, ("one", "two"), 28, 1.0, "bilinear")
    with pytest.raises(PrecisionError, match=VARIABLE):
        evaluate(network, [_batch()], Processes(), "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate(network, [_batch()], Processes()).images == 2  # its precision counts, not what is around it
        with pytest.raises(PrecisionError, match=VARIABLE):
            trained.predict([data.validation.load(0)])
        with pytest.raises(PrecisionError, match=VARIABLE):
            measure("resnet18", QUICK)


def _batch() -> Batch:
    return Batch(torch.ones(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64), [])


def test_this_suite_tests_bfloat16_on_a_machine_that_needs_the_cap() -> None:
    options = ["-n", "0", "-p", "faulting_trial", "-p", "no:cacheprovider", "-v"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_layers.py", "-k", "bfloat16"],
        env={**_environment(), "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"oneDNN with {VARIABLE}={CAP}" in child.stdout
    assert "1 passed" in child.stdout

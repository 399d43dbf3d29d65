import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from kernelwarehouse._bfloat16 import VARIABLE, require_computable
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.data import ArrayImages, DataSet
from tiny_things import striped_arrays

# The suite's own compiled kernels: kept between runs, and neither from the user's cache nor in it.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))

# What suits a layer is not measured again and again, on a busy machine: tests of measuring turn that on.
os.environ.setdefault("KERNELWAREHOUSE_ROUTES", "rule")

THREADS = int(os.environ.get("KERNELWAREHOUSE_TEST_THREADS", "1"))  # the suite runs one process per core
torch.set_num_threads(THREADS)

# A slow or busy machine is no failure.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Where bfloat16 needs help from the environment, it has to come before torch multiplies. Workers inherit it."""
    require_computable(torch.device("cpu"), torch.bfloat16)


def pytest_report_header() -> str:
    capped = f"{VARIABLE}={os.environ[VARIABLE]}" if VARIABLE in os.environ else "all instructions"
    compiled = "compiled kernels" if load_native() else "no compiled kernels"
    return f"kernelwarehouse: {compiled}, {torch.get_num_threads()} threads, oneDNN with {capped}"


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test begins alike, whatever the one before it has left."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def striped() -> DataSet:
    train, validation = striped_arrays(64, 0), striped_arrays(25, 1)
    names = ("rows", "columns", "down", "up")
    return DataSet("striped", names, ArrayImages(*train, "train"), ArrayImages(*validation, "validation"))


@pytest.fixture(scope="session")
def striped_npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "striped.npz"
    (x_train, y_train), (x_test, y_test) = striped_arrays(64, 0), striped_arrays(25, 1)
    classes = np.array(["rows", "columns", "down", "up"])
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes)
    return path

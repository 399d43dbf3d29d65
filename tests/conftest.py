import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kernelwarehouse.data import ArrayImages, DataSet
from tiny_things import striped_arrays

# The suite's own compiled kernels: kept between runs, and neither from the user's cache nor in it.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))

torch.set_num_threads(1)  # the suite runs one process per core


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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

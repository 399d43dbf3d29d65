"""Data and recipes for runs of seconds."""

from pathlib import Path

import numpy as np
import pytest
from tiny_things import striped_arrays

from kernelwarehouse.data import ArrayImages, DataSet
from kernelwarehouse.training.recipe import Recipe, load_recipe


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


@pytest.fixture
def recipe() -> Recipe:
    """Two epochs with everything that is random or stateful switched on."""
    return load_recipe("small").with_overrides(
        {
            "epochs": 2,
            "batch_size": 16,
            "learning_rate": 0.02,
            "tau_epochs": 1.5,
            "warmup_epochs": 0.5,
            "mixup": 0.4,
            "cutmix": 0.4,
            "mix_probability": 0.7,
            "random_erasing": 0.3,
            "auto_augment": "rand-m5",
            "ema_decay": 0.9,
            "clip_norm": 5.0,
            "drop_path": 0.1,
        }
    )


@pytest.fixture
def plain_recipe() -> Recipe:
    """Nothing random in it but the order of images."""
    changes = {"crop": "none", "flip": 0.0, "label_smoothing": 0.0, "warmup_epochs": 0.0, "learning_rate": 0.05}
    return load_recipe("small").with_overrides({"epochs": 2, "batch_size": 16, "tau_epochs": 1.0, **changes})

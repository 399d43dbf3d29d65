"""Recipes for runs of seconds."""

import pytest

from kernelwarehouse.training.recipe import Recipe, load_recipe


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

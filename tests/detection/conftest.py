"""Scenes that several files of tests read."""

from pathlib import Path

import pytest
from detection_runs import SCENES

from kernelwarehouse.detection.scenes import make_scenes


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes") / "set", **SCENES)

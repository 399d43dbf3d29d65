import pytest
import torch

torch.set_num_threads(1)  # the suite runs one process per core


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

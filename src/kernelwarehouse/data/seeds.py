"""All randomness of a run is a function of where in the run it is needed.

Nothing is drawn from a generator that lives on between steps. So a run that is killed and resumed at any step draws
what the uninterrupted run draws, whatever the number of worker processes and however far they had read ahead.
"""

import hashlib
import random

import numpy as np
import torch


def derive_seed(purpose: str, *place: int) -> int:
    """64 well-mixed bits for one purpose at one place of a run: `derive_seed("augment", seed, epoch, index)`."""
    digest = hashlib.blake2b(repr((purpose, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_generators(seed: int) -> None:
    """Set Python's, NumPy's and torch's global generators, which timm's and torchvision's augmentations draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also queue a call with a formatted stack for every device not yet in use: a hundred times
    # the cost, for each image.
    torch.default_generator.manual_seed(seed)

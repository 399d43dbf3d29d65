"""Where tests compute: the environment variable `KW_TEST_DEVICE`, `cuda` for example, or the CPU.

What they compare with is computed there as well, or on the CPU in float64.
"""

import os

import torch

DEVICE = torch.device(os.environ.get("KW_TEST_DEVICE", "cpu"))
# The tolerances are those of float32.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

"""`python -m kernelwarehouse`, for torchrun and for environments without scripts."""

import sys

from kernelwarehouse.cli import main

sys.exit(main())

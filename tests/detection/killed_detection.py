"""A short run of a detector: `python killed_detection.py SCENES OUTPUT STEP`, alone or under torchrun.

Before STEP it kills itself, the first time round; with a step that it never takes, it ends well.
"""

import os
import signal
import sys
from pathlib import Path

from detection_runs import OPTIONS, train_tiny

from kernelwarehouse.detection.data import open_coco
from kernelwarehouse.training.trainer import Trainer

if __name__ == "__main__":
    scenes, output, killed_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    step = Trainer.step

    def killed(trainer: Trainer, parts: list):
        if trainer.steps_done == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, parts)

    Trainer.step = killed
    train_tiny(open_coco(scenes), output, options=OPTIONS)

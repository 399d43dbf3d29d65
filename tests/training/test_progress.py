"""The display: a bar in a terminal, plain lines in a log, nothing from other processes."""

import io

import pytest
from rich.console import Console

from kernelwarehouse.training.progress import Display

STEP = {"loss": 1.23456, "tau": 0.5, "images_per_second": 1234.5, "learning_rate": 0.1}
EPOCH = {"top1": 0.5, "top5": 0.9, "loss": 1.5, "training_loss": 2.0, "best": True}


def shown(*, terminal: bool, silent: bool = False) -> str:
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=terminal, width=150, highlight=False), silent=silent)
    display.start(0, 40)
    display.step(20, "1/2", STEP, seconds_left=75.4)
    display.epoch("1/2", EPOCH)
    display.stop()
    return file.getvalue()


def test_plain_lines_in_a_log() -> None:
    assert shown(terminal=False).splitlines() == [
        "epoch 1/2 · step 20/40 · loss 1.2346 · 1,234 images/s · tau 0.500 · 0:01:15 left",
        "epoch 1/2 · top-1 50.00% · top-5 90.00% · loss 1.5000 (training 2.0000) · best so far",
    ]


def test_bar_in_a_terminal() -> None:
    text = shown(terminal=True)
    assert "\x1b[" in text
    for part in ("epoch 1/2", "20/40", "loss 1.2346", "1,234 images/s", "tau 0.500", "0:01:15 left", "top-1 50.00%"):
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_are_silent(terminal: bool) -> None:
    assert shown(terminal=terminal, silent=True) == ""


def test_static_network_shows_no_tau() -> None:
    file = io.StringIO()
    Display(Console(file=file)).step(1, "1/1", STEP | {"tau": None}, seconds_left=0)
    assert "tau" not in file.getvalue()

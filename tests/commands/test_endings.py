"""How commands end: their exit status, and what reaches the terminal whatever is in the names."""

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bad_places import TRAIN, save_npz
from PIL import Image
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse import cli
from kernelwarehouse.cli import main
from kernelwarehouse.commands import training, zoo
from kernelwarehouse.errors import Terminated, TrainingError

ODD = ("[/red]", "[bold]", ":smile:", "naïve ✓")
"""Names that are markup, an emoji's code, or beyond ASCII."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "[bold].npz"
    save_npz(path, classes=list(ODD))
    return path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on classes with odd names, in a folder with one."""
    output = tmp_path_factory.mktemp("runs") / "[/red]"
    assert main(TRAIN.format(data=data, out=output).split()) == 0
    return output


def raising(error: BaseException) -> object:
    def run(*arguments: object, **options: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the same command resumes the run from its last checkpoint"),
        (Terminated("ended by SIGTERM"), 143, "ended by SIGTERM"),
        (TrainingError("bad\n\n  luck\x1b[31m\udcff"), 2, r"bad luck\x1b[31m\udcff"),
        (MemoryError(), 2, "the memory does not suffice (MemoryError); use smaller batches or images"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "the memory does not suffice (OutOfMemoryError: CUDA out"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 9 bytes"), 2, "the memory does not suffice ("),
        (OSError(28, "No space left on device", "a/b"), 2, "a/b cannot be read or written: No space left on device"),
        (ZeroDivisionError("by 0"), 2, "unexpected ZeroDivisionError: by 0; --debug shows the traceback"),
        (AssertionError(), 2, "unexpected AssertionError; --debug shows the traceback"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_a_run_raises_becomes_a_line_and_a_status(
    error: BaseException,
    status: int,
    line: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training, "train", raising(error))
    assert main(TRAIN.format(data=data, out=tmp_path / "out").split()) == status
    shown = capsys.readouterr().err
    assert shown.startswith(f"kernelwarehouse: {line}")
    assert len(shown.splitlines()) == 1


def test_only_a_run_can_be_resumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(zoo, "preset_plan", raising(KeyboardInterrupt()))
    assert main(["zoo"]) == 130
    assert capsys.readouterr().err == "kernelwarehouse: interrupted\n"


@pytest.mark.parametrize(
    "words", ["--debug plan resnet18.zzz", "plan --debug resnet18.zzz", "plan resnet18.zzz --debug"]
)
def test_debug_shows_the_traceback(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.splitlines()[-1].startswith("kernelwarehouse: resnet18 has no weights tagged 'zzz'")


@pytest.mark.parametrize("words", ["--help", "--version", *(f"{name} --help" for name in ("plan", "train", "compare"))])
def test_help_and_version_end_well(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"kernelwarehouse {kw.__version__}" if words == "--version" else "usage: kernelwarehouse")


def test_ctrl_c_ends_a_run_that_goes_on_with_the_same_command(data: Path, tmp_path: Path) -> None:
    """A real process with workers, interrupted as a terminal does it: the signal goes to all of them."""
    long = f"{TRAIN} --epochs 1000 --workers 1 --report-every 1 --checkpoint-seconds 0"
    words = long.format(data=data, out=tmp_path / "run").split()
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelwarehouse", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background of a shell, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while "epoch 2/1000" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()[1]
    os.killpg(process.pid, signal.SIGINT)
    _, shown = process.communicate()
    assert process.returncode == 130
    last = shown.splitlines()[-1]
    assert last == "kernelwarehouse: interrupted; the same command resumes the run from its last checkpoint"
    assert "Traceback" not in shown
    assert (tmp_path / "run" / "last" / "training.pt").exists()


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A process of its own, for Python flushes once more as it ends. Its files cannot grow, as on a full disk."""
    with (tmp_path / "output").open("w") as file:
        ended = subprocess.run(
            [sys.executable, "-m", "kernelwarehouse", "plan", "resnet18"],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last == "kernelwarehouse: the output or a file cannot be read or written: File too large"
    assert "Traceback" not in ended.stderr


def ascii_output(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii", write_through=True))
    return content


def test_terminals_that_know_only_ascii(run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "ü.png"
    Image.new("RGB", (16, 16)).save(picture)
    commands = [
        TRAIN.format(data=data, out=tmp_path / "run").split(),
        ["eval", str(run), "--data", str(data), "--workers", "0"],
        ["predict", str(run), str(picture)],
        ["plan", "resnet18"],
    ]
    for words in commands:
        content = ascii_output(monkeypatch)
        assert main(words) == 0
        shown = content.getvalue().decode("ascii")
        assert "loss 1" in shown or "|" in shown  # the numbers of a run, or the lines of a table
    assert r"na\xefve \u2713" in predicted(run, picture, monkeypatch)


def predicted(run: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    content = ascii_output(monkeypatch)
    assert main(["predict", str(run), str(picture)]) == 0
    return content.getvalue().decode("ascii")


def test_names_are_printed_as_they_are(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "[" / "blue] :smile:.png"
    picture.parent.mkdir()
    Image.new("RGB", (16, 16)).save(picture)
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(run), "[/blue] :smile:.png"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ODD)
    assert "[/blue] :smile:.png" in shown


def test_unreadable_images_are_named_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, broken = tmp_path / "data", tmp_path / "data" / "val" / "[" / "red] :smile:.png"
    for folder in (data / "train" / "[", data / "val" / "["):
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (16, 16)).save(folder / f"{number}.png")
    broken.write_bytes(b"")
    words = TRAIN.format(data=data, out=tmp_path / "run").split()
    assert main([*words, "--unreadable", "skip"]) == 0
    assert f"unreadable image, skipped (number 1): {broken}: cannot identify" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--data", str(data), "--workers", "0", "--unreadable", "skip"]) == 0
    assert f"unreadable: {broken}: cannot identify" in capsys.readouterr().out


def test_layers_are_named_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    layers = {"[/red]": nn.Conv2d(8, 8, 3), "[bold]": nn.Conv2d(8, 8, 3), ":smile:": nn.Conv2d(8, 8, 3)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    plan = kw.plan(model, kw.WarehouseConfig(static_stem=False, static_classifier=False))
    kw.explain(kw.convert(model, plan), torch.zeros(1, 8, 9, 9))
    explained = capsys.readouterr().out
    for name in layers:
        assert name in str(plan)
        assert name in explained


def test_plans_can_be_printed_by_any_console() -> None:
    from rich.console import Console

    model = nn.Sequential()
    model.add_module("[/red]", nn.Conv2d(8, 8, 3))
    plan = kw.plan(model, kw.WarehouseConfig(static_stem=False, static_classifier=False))
    console = Console(width=120, file=io.StringIO())
    console.print(plan)
    assert "[/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_statuses_are_those_of_shells() -> None:
    assert (cli.INTERRUPTED, cli.TERMINATED) == (128 + signal.SIGINT, 128 + signal.SIGTERM)

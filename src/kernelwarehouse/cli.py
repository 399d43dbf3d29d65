"""The `kernelwarehouse` command: its sub-commands are in `commands`, and what they raise becomes one line here."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import torch

from kernelwarehouse._version import __version__
from kernelwarehouse.commands import comparing, detecting, plan, studying, training, zoo
from kernelwarehouse.commands.arguments import add_debug
from kernelwarehouse.errors import KernelWarehouseError, Terminated

FAILED, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit statuses: an error, and as shells report them Ctrl-C and SIGTERM."""


class _UsageError(KernelWarehouseError):
    """A command line that cannot be understood."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. What goes wrong ends as one line on stderr."""
    chosen = argparse.Namespace()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what a terminal's encoding cannot say
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _parser().parse_args(arguments, chosen)
        status: int = chosen.run(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk should be noticed here, where it can be told
        return status
    except (Exception, KeyboardInterrupt) as error:
        if getattr(chosen, "debug", False):
            traceback.print_exc()  # with its notes
        else:
            _list_notes(error)
        return _explain(error, getattr(chosen, "when_interrupted", ""))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="kernelwarehouse",
        description="KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells.",
        epilog="What cannot be done ends with one line that says why, and exit status 2; Ctrl-C with 130.",
    )
    parser.add_argument("--version", action="version", version=f"kernelwarehouse {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (plan, zoo):
        module.add_parser(commands)
    training.add_parsers(commands)
    comparing.add_parser(commands)
    studying.add_parser(commands)
    detecting.add_parser(commands)
    for each in (parser, *commands.choices.values()):
        add_debug(each)
    return parser


def _explain(error: BaseException, when_interrupted: str) -> int:
    """Say in one line what happened; the exit status."""
    if isinstance(error, OSError):
        return _explain_failed_file(error)
    if isinstance(error, KeyboardInterrupt):
        return _say(f"interrupted{when_interrupted}", INTERRUPTED)
    if isinstance(error, Terminated):
        return _say(str(error), TERMINATED)
    if isinstance(error, KernelWarehouseError):
        return _say(str(error))
    if _is_out_of_memory(error):
        return _say(f"the memory does not suffice ({_told(error)}); use smaller batches or images")
    return _say(f"unexpected {_told(error)}; --debug shows the traceback")


def _say(message: str, status: int = FAILED) -> int:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"kernelwarehouse: {_visible(line)}", file=sys.stderr)
    return status


def _list_notes(error: BaseException) -> None:
    """What is too long for the one line, such as all files that are missing, goes before it, a line a note."""
    if isinstance(error, KernelWarehouseError):
        for note in getattr(error, "__notes__", ()):
            print(_visible(note), file=sys.stderr)


def _visible(line: str) -> str:
    """Line breaks and control characters, which file names may hold, do not reach the terminal as such."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _explain_failed_file(error: OSError) -> int:
    """Also that of our output, which Python would flush once more as it ends, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has seen enough
        return 1
    return _say(f"{error.filename or 'the output or a file'} cannot be read or written: {error.strerror or error}")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""The `kernelwarehouse` command: its sub-commands are in `commands`."""

import argparse
import os
import sys
from collections.abc import Sequence

from kernelwarehouse.commands import comparing, plan, training, zoo
from kernelwarehouse.errors import KernelWarehouseError, Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernelwarehouse", description="KernelWarehouse for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (plan, zoo):
        module.add_parser(commands)
    training.add_parsers(commands)
    comparing.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except KernelWarehouseError as error:
        print(f"kernelwarehouse: {error}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 2  # as shells report an end by SIGTERM
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

"""Measurements in a process of their own, which nothing else has touched."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


def ask(benchmark: str, options: Sequence[str]) -> dict[str, Any]:
    """What `python -m benchmarks.<benchmark>` answers: the last line that it prints, as JSON."""
    command = _command(benchmark, options)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def partner(benchmark: str, options: Sequence[str]) -> Iterator[Callable[[], Any]]:
    """`python -m benchmarks.<benchmark>` as a process that takes turns with this one.

    It does nothing until it is asked, by a line that it is sent, and answers with a line of JSON.
    """
    command, pipe = _command(benchmark, options), subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):

        def ask() -> Any:
            answer = ""
            if process.stdin is not None and process.stdout is not None:
                with suppress(BrokenPipeError):  # it has ended: what it has said is its answer
                    print(file=process.stdin, flush=True)
                answer = process.stdout.readline()
            if not answer:
                process.wait()
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()}")
            return json.loads(answer)

        try:
            yield ask
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def _command(benchmark: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{benchmark}", *options]

"""A peer's server as a process of ours: started on a free loopback port, asked until it answers, ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

_START_TIMEOUT_S = 300.0  # compiling a model may take minutes
_STOP_TIMEOUT_S = 15.0


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    timeout: float = _START_TIMEOUT_S,
) -> Iterator[int]:
    """Run ``command`` until the block is left; entered once ``ready`` says so, with the pid. Its output goes to ``log``.

    Raises RuntimeError if the process ends before, TimeoutError if it takes longer than ``timeout`` seconds; both with the end of the log.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + timeout
        while not ready():
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} exited with {process.returncode}\n{tail(log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command[0]} was not ready after {timeout:g} s\n{tail(log)}")
            time.sleep(0.1)
        yield process.pid
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} exited with {process.returncode} under load\n{tail(log)}")
    finally:
        _end(process)


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log, for error messages."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, and no child left behind."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()

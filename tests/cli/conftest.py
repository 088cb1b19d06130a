"""The supervisor under test runs as a program of its own, over fake planes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIVENESS_S = 20.0  # generous: the machine may be busy


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < end, f"after {LIVENESS_S:.0f} s still not: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@dataclass
class Supervised:
    folder: Path
    process: subprocess.Popen[str]
    stderr: str = field(default="")

    def notes(self, plane: str, what: str) -> list[tuple[int, float]]:
        """(pid, time) of each note of that kind in the plane's log."""
        log = self.folder / f"{plane}.log"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(int(pid), float(when)) for kind, pid, when in lines if kind == what]

    def wait_for(self, plane: str, what: str, count: int = 1) -> list[tuple[int, float]]:
        wait_until(lambda: len(self.notes(plane, what)) >= count, f"{plane} {what} x{count}")
        return self.notes(plane, what)

    def wait_up(self) -> tuple[int, int]:
        """Pids of (control, data) once both run."""
        return self.wait_for("control", "up")[-1][0], self.wait_for("data", "up")[-1][0]

    def kill(self, plane: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.notes(plane, "start")[-1][0], number)

    def finish(self) -> int:
        """Wait for the supervisor's end; its messages are then in ``stderr``."""
        _, self.stderr = self.process.communicate(timeout=LIVENESS_S)
        return self.process.returncode

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]

    def pids(self) -> list[int]:
        return [pid for plane in ("control", "data") for pid, _ in self.notes(plane, "start")]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    running: list[Supervised] = []

    def start(control: str = "serve", data: str = "load", *, max_restarts: int = 5, drain_s: float = 10.0) -> Supervised:
        argv = [sys.executable, str(HERE / "run_supervisor.py"), str(tmp_path), str(max_restarts), str(drain_s), control, data]
        running.append(Supervised(tmp_path, subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)))
        return running[-1]

    yield start
    for supervised in running:
        supervised.process.kill()
        supervised.process.communicate()
        for pid in supervised.pids():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

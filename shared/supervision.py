"""A plane's side of being supervised by ``twinplane serve``.

The supervisor hands each plane the write end of a pipe. A plane writes at most two kinds of line into it: ``ready`` once
requests would be served, and ``failed <one sentence>`` just before it ends in an error. So the supervisor can tell a
failing start (give up at once, with the cause) from a death in service (restart), whatever the log's format and
destination. Without a supervisor every call does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_MAX_LINE = 2000  # below PIPE_BUF (4096), so one write is atomic

_fd: int | None = None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL; end now if it is already dead.

    Linux prctl(2). Called between fork and exec: the setting survives exec, and asks nothing of the program started.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def attach(fd: int | None) -> None:
    """Use ``fd`` (inherited from the supervisor) for the calls below. It does not pass on to our own children."""
    global _fd
    if fd is not None:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
    _fd = fd


def notify_ready() -> None:
    """Tell the supervisor that a request sent now would be served. May be called again; only the first counts."""
    _send("ready")


def notify_failed(cause: str) -> None:
    """Tell the supervisor in one sentence why this plane is about to end."""
    _send("failed " + " ".join(cause.split()))


def _send(line: str) -> None:
    if _fd is not None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and the kernel is about to end us too
            os.write(_fd, line.encode()[:_MAX_LINE] + b"\n")

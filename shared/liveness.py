"""Does the peer live? The heartbeat path of PROTOCOL.md, section 6 (the other path is the lifeline's EOF).

A plane beats every 20 ms. A heartbeat gone stale says that something is wrong; whether the peer is dead or merely
stands still, the process table says, as long as both planes share a PID namespace.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .wire import Phase

SUSPECT_AFTER_NS = 60_000_000  # three beats: worth a look at the process table
STALLED_AFTER_NS = 500_000_000  # longer than a busy machine keeps a thread off its cores

_START_TIME_FIELD = 22  # of /proc/<pid>/stat, counted from 1; see proc(5)
_STATE_FIELD = 3


class Liveness(enum.Enum):
    ALIVE = "alive"
    STALLED = "stalled"  # exists, or can not be seen from here, and does not beat
    DEAD = "dead"


def process_start_time(pid: int) -> int:
    """When process ``pid`` started, in clock ticks since boot; 0 if there is none, or only its zombie.

    Pid and start time together name a process for good: pids are reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text[text.rindex(")") + 2 :].split()  # from field 3 on; field 2, the command, may hold blanks and parentheses
    if fields[0] in "ZX":  # dead, its parent has not noticed yet
        return 0
    return int(fields[_START_TIME_FIELD - _STATE_FIELD])


class PeerWatch:
    """Judges a peer by the age of its heartbeat and the process table.

    Ask at least every 20 ms: then a death is seen less than 100 ms after the peer's last instruction.

    Args:
        name: how reports call the peer, "data plane".
        pid: the peer in *our* PID namespace, as SO_PEERCRED tells it; 0 if it lives in another one. Such a peer is never
            called dead here; its lifeline tells.
        read: the peer's page and our own, as dicts of phase, phase_step, phase_since_ns, heartbeat_ns, published, consumed.
    """

    def __init__(self, name: str, pid: int, read: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]) -> None:
        self._name = name
        self._pid = pid
        self._start_time = process_start_time(pid) if pid else 0
        self._read = read
        self._since_ns = time.monotonic_ns()

    def check(self) -> Liveness:
        """Judge now. A peer that has not beaten yet is given the same time from the watch's creation on."""
        age_ns = self._age_ns(self._read()[0])
        if age_ns < SUSPECT_AFTER_NS:
            return Liveness.ALIVE
        if self._pid and (self._start_time == 0 or process_start_time(self._pid) != self._start_time):
            return Liveness.DEAD
        return Liveness.ALIVE if age_ns < STALLED_AFTER_NS else Liveness.STALLED

    def report(self) -> str:
        """Who stands where, in one sentence (INV-4); meant for a log, once per second at most."""
        peer, own = self._read()
        now = time.monotonic_ns()
        process = f"pid {self._pid}" if self._pid else "pid unknown, in another PID namespace"
        return (
            f"the {self._name} ({process}) is in phase {_phase_name(peer['phase'])} of step {peer['phase_step']} "
            f"for {_ms(now - peer['phase_since_ns'] if peer['phase_since_ns'] else now - self._since_ns)} ms, "
            f"last heartbeat {_ms(self._age_ns(peer))} ms ago; "
            f"it published {peer['published']} and consumed {peer['consumed']} slots, "
            f"we published {own['published']} and consumed {own['consumed']}"
        )

    def _age_ns(self, peer: Mapping[str, int]) -> int:
        return time.monotonic_ns() - max(peer["heartbeat_ns"], self._since_ns)


def _phase_name(phase: int) -> str:
    return Phase(phase).name if phase in Phase.__members__.values() else str(phase)


def _ms(ns: int) -> int:
    return ns // 1_000_000

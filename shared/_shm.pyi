"""Native half of the shared-memory protocol (PROTOCOL.md): atomics, futexes, mapping, heartbeat.

The control plane's end of the rings is used from C++ by the core (``csrc/*.hpp``); here are the data
plane's end, and both ends for tests and benchmarks. Every call that may wait releases the GIL.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WAIT_BOUND_NS: int  # 20 ms: no futex wait is longer
HEARTBEAT_NS: int  # 20 ms
LAYOUT_HASH: int  # of the schema the module was compiled with; equals wire.LAYOUT_HASH
POINTS: tuple[str, ...]  # labelled points of the protocol, for signal_at()

class ProtocolError(Exception):
    """The mapping is not what it should be: magic, hash, epoch, size. Names both values."""

def format_segment(fd: int, capacities: Sequence[int], epoch: int) -> int:
    """Write the header of a new, zeroed segment and its ready word [H1]; returns the segment's bytes."""

def segment_bytes(capacities: Sequence[int]) -> int:
    """Size of a session's segment. Raises ProtocolError for capacities no session can have."""

def region_offsets(capacities: Sequence[int]) -> dict[str, dict[str, int]]:
    """The compiler's byte offsets of every region, by name of the layout class in wire.py; for the test that compares them."""

def signal_at(point: str, passage: int, signal: int) -> None:
    """Test hook: send `signal` to this process when it passes a labelled point for the `passage`-th time from now.

    Raises KeyError for a point that does not exist.
    """

# Round trips between two processes without Python in between, for benchmarks/ring.py: one side measures, the other answers. They raise
# RuntimeError when the other side is silent for 10 s.
def measure_ring(fd: int, epoch: int, count: int, bytes: int) -> list[int]:
    """Control plane's side: nanoseconds of each of `count` exchanges of a step against a result, `bytes` written and read in each."""

def answer_ring(fd: int, epoch: int, count: int, bytes: int) -> None: ...
def measure_futex(fd: int, count: int) -> list[int]:
    """The yardstick: nanoseconds of each ping-pong over two bare futex words in the file's first page (zeros at the start)."""

def answer_futex(fd: int, count: int) -> None: ...

class DataEnd:
    """The data plane's end: reads steps, writes results, owns the `data` page and `data_bell`."""

    def __init__(self, fd: int, epoch: int, *, wait_bound_ns: int = ...) -> None:
        """Map `fd` (it may be closed afterwards) and verify the header [H2]. Raises ProtocolError, OSError.

        `wait_bound_ns` is WAIT_BOUND_NS except in stress tests: with a long bound a lost wake-up is a stall, not a hiccup.
        """
    @property
    def capacities(self) -> tuple[int, ...]: ...
    def wait_step(self, timeout_ns: int) -> int | None:
        """Sequence number of the next unread step, waiting at most `timeout_ns`; None on time-out.
        Returns at once if one is there. Interrupted by wake(). Each number is returned once: several steps may be
        open before the first is consumed. One thread at a time waits on an end, else RuntimeError. Python signal handlers
        run during the wait (at the latest after WAIT_BOUND_NS), and may raise."""
    def step(self, sequence: int) -> NDArray[np.uint8]:
        """The slot's bytes, zero-copy, read-only; valid until consume(sequence). IndexError if it is not open.

        The array keeps the mapping alive, even after close(); its contents are the writer's again after consume()."""
    def consume(self, sequence: int) -> None:
        """Done with this step slot and all before it [C1]. IndexError if it is not open."""
    def result_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None:
        """The next result slot to fill, writable, zero-copy; None if the ring stayed full."""
    def publish(self) -> None:
        """Publish the slot from result_slot() [P1] and ring the control plane. RuntimeError if no slot is free."""
    def set_phase(self, phase: int, step: int) -> None: ...
    def interrupted(self) -> int:
        """Steps below this number end after the substep under way [I2]; 0 = none yet. Asked after each substep."""
    def wake(self) -> None:
        """Make wait_step return None soon (from another thread). Sticky until it did. No error after close()."""
    def beat(self) -> None:
        """Write `heartbeat_ns` once."""
    def start_heartbeat(self) -> None:
        """A native thread writes `heartbeat_ns` every HEARTBEAT_NS until close()."""
    def peer(self) -> dict[str, int]:
        """The control plane's page: phase, phase_step, phase_since_ns, heartbeat_ns, published, consumed."""
    def own(self) -> dict[str, int]:
        """Our own page, same keys."""
    @property
    def missed_wakes(self) -> int:
        """Times that news was found only after a full bound and nobody had rung for it. Expected 0."""
    def close(self) -> None:
        """Stop the heartbeat, end a wait of another thread (it returns None), let go of the mapping. Later calls raise
        ValueError. Idempotent."""

class ControlEnd:
    """The control plane's end, for tests and benchmarks; the core has its own in C++ on the same code."""

    def __init__(self, fd: int, epoch: int, *, wait_bound_ns: int = ...) -> None: ...
    @property
    def capacities(self) -> tuple[int, ...]: ...
    def step_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None: ...
    def publish(self) -> None: ...
    def wait_result(self, timeout_ns: int) -> int | None: ...
    def result(self, sequence: int) -> NDArray[np.uint8]: ...
    def interrupt(self, below: int) -> None:
        """Steps below number `below` are to end after the substep under way [I1]. It only grows."""
    def consume(self, sequence: int) -> None: ...
    def set_phase(self, phase: int, step: int) -> None: ...
    def wake(self) -> None: ...
    def beat(self) -> None: ...
    def start_heartbeat(self) -> None: ...
    def peer(self) -> dict[str, int]: ...
    def own(self) -> dict[str, int]: ...
    @property
    def missed_wakes(self) -> int: ...
    def close(self) -> None: ...

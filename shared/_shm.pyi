"""Native half of the shared-memory protocol (PROTOCOL.md): atomics, futexes, mapping, heartbeat.

The control plane's end of the rings is used from C++ by the core (``csrc/*.hpp``); here are the data
plane's end, and both ends for tests and benchmarks. Every call that may wait releases the GIL.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WAIT_BOUND_NS: int  # 20 ms: no futex wait is longer
HEARTBEAT_NS: int  # 20 ms

class ProtocolError(Exception):
    """The mapping is not what it should be: magic, hash, epoch, size. Names both values."""

def format_segment(fd: int, capacities: Sequence[int], epoch: int) -> int:
    """Write the header of a new, zeroed segment and its ready word [H1]; returns the segment's bytes."""

def segment_bytes(capacities: Sequence[int]) -> int: ...

class DataEnd:
    """The data plane's end: reads steps, writes results, owns the `data` page and `data_bell`."""

    def __init__(self, fd: int, epoch: int) -> None:
        """Map `fd` (duplicated) and verify the header [H2]. Raises ProtocolError."""
    @property
    def capacities(self) -> tuple[int, ...]: ...
    def wait_step(self, timeout_ns: int) -> int | None:
        """Sequence number of the next unread step, waiting at most `timeout_ns`; None on time-out.
        Returns at once if one is there. Interrupted by wake()."""
    def step(self, sequence: int) -> NDArray[np.uint8]:
        """The slot's bytes, zero-copy, read-only; valid until consume(sequence)."""
    def consume(self, sequence: int) -> None:
        """Done with the step slot [C1]."""
    def result_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None:
        """The next result slot to fill, writable, zero-copy; None if the ring stayed full."""
    def publish(self) -> None:
        """Publish the slot from result_slot() [P1] and ring the control plane."""
    def set_phase(self, phase: int, step: int) -> None: ...
    def wake(self) -> None:
        """Make wait_step return None soon (from another thread)."""
    def start_heartbeat(self) -> None:
        """A native thread writes `heartbeat_ns` every HEARTBEAT_NS until close()."""
    def peer(self) -> dict[str, int]:
        """The control plane's page: phase, phase_step, phase_since_ns, heartbeat_ns, published, consumed."""
    @property
    def missed_wakes(self) -> int: ...
    def close(self) -> None: ...

class ControlEnd:
    """The control plane's end, for tests and benchmarks; the core has its own in C++ on the same code."""

    def __init__(self, fd: int, epoch: int) -> None: ...
    def step_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None: ...
    def publish(self) -> None: ...
    def wait_result(self, timeout_ns: int) -> int | None: ...
    def result(self, sequence: int) -> NDArray[np.uint8]: ...
    def consume(self, sequence: int) -> None: ...
    def set_phase(self, phase: int, step: int) -> None: ...
    def beat(self) -> None: ...
    def peer(self) -> dict[str, int]: ...
    @property
    def missed_wakes(self) -> int: ...
    def close(self) -> None: ...

"""The production scheduler, and those it is compared to, on a virtual clock. See docs/simulator.md.

Every ``simulate`` function returns a dict:

===================== ============================================================================================
``arrival_s`` ...     float64 ``[requests]``: ``arrival_s``, ``first_scheduled_s``, ``first_token_s``, ``finish_s``;
                      NaN where it did not come to that
``tokens``            uint32 ``[requests]``: emitted, by all samples; also ``preemptions``, ``cached_tokens``
``outcome``           uint8 ``[requests]``: 0 unfinished, 1 finished, 2 refused, 3 given up
``gaps_s``            float32 ``[tokens - first tokens]``: every gap between two tokens of a sequence, in order of time
``memory``            samples: ``at_s``, ``held_tokens``, ``reserved_tokens``, ``allocated_tokens``, ``capacity_tokens``,
                      ``running``, ``waiting``
``averages``          the same over time, exactly, and ``overreserved_tokens``, ``mapped_tokens`` (if sequences shared no
                      block); ``seconds`` it was measured for
``totals``            ``steps``, ``sequence_steps``, ``model_tokens``, ``device_busy_s``, ``end_s``
===================== ============================================================================================
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinplane.control_plane._core import CoreConfig, Pool

Points = Sequence[tuple[float, float]]
Progress = Callable[[int, float], object] | None  # (requests done, virtual seconds), about ten times a real second

class Trace:
    """Requests in order of arrival. Raises ValueError naming the first request that makes no sense.

    Request i's prompt is the runs ``run_offsets[i]`` up to ``run_offsets[i + 1]``; a run is ``run_length`` tokens of the endless
    token stream ``run_stream`` from position ``run_first`` on. The same stretch of the same stream is the same tokens. Stream
    ``2**64 - 1 - i`` is what request i answers, so a later prompt can contain it.
    """

    def __init__(
        self,
        *,
        arrival_ns: NDArray[np.uint64],
        prompt_tokens: NDArray[np.uint32],
        output_tokens: NDArray[np.uint32],
        priority: NDArray[np.int32],
        samples: NDArray[np.uint32],  # answers to the same prompt; other systems than twinplane() take one only
        tenant: NDArray[np.uint32],  # index into `tenants`
        tenants: Sequence[str],
        run_offsets: NDArray[np.uint64],
        run_stream: NDArray[np.uint64],
        run_first: NDArray[np.uint64],
        run_length: NDArray[np.uint32],
    ) -> None: ...
    def __len__(self) -> int: ...
    def prompt(self, i: int) -> NDArray[np.int32]: ...

class Device:
    """How long a step takes: the sum of what is given here. ``by_tokens_ns`` is a polyline over tokens in the step."""

    def __init__(
        self,
        *,
        by_tokens_ns: Points,
        fixed_ns: float = 0.0,
        per_sequence_ns: float = 0.0,
        per_context_token_ns: float = 0.0,
        per_pair_ns: float = 0.0,  # per (query, key) pair of prompt chunks
        per_swapped_block_ns: float = 0.0,  # moved between device and host, either way
    ) -> None: ...
    def time_ns(
        self,
        *,
        tokens: int,
        sequences: int = 1,
        context_tokens: int = 0,
        chunk_pairs: int = 0,
        swapped_blocks: int = 0,
    ) -> int: ...

class Options:
    def __init__(
        self,
        *,
        host_ns: Points = ((0, 0),),  # of planning a step and digesting its results, by sequences in it
        stop_at_ns: int = 0,  # end there, whatever is unfinished; 0 = when everything is done
        sample_interval_ns: int = 1_000_000_000,  # of `memory`
        measure_from_ns: int = 0,  # `averages` leave out what was before
    ) -> None: ...

class BuddyAllocator:
    """Contiguous memory in power-of-two pieces (Knowlton, CACM 1965)."""

    def __init__(self, size: int) -> None: ...
    def allocate(self, size: int) -> int | None:
        """An address, or None if no piece is large enough."""
    def release(self, address: int) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def largest(self) -> int: ...
    @property
    def allocated(self) -> int: ...  # rounded up to powers of two

def twinplane(
    trace: Trace,
    device: Device,
    options: Options,
    *,
    config: CoreConfig,
    pool: Pool,
    check_interval: int = 0,  # steps between checks of the scheduler's invariants; RuntimeError if one is broken
    progress: Progress = None,
) -> dict[str, Any]:
    """The production scheduler. The dict also has ``preempted``, ``prompt_tokens_computed``, ``blocks_swapped_out`` and
    ``blocks_swapped_in``."""

def contiguous(
    trace: Trace,
    device: Device,
    options: Options,
    *,
    reservation: str,  # "max", "pow2" or "oracle"
    capacity_tokens: int,
    max_model_len: int,
    max_batch: int,
    progress: Progress = None,
) -> dict[str, Any]:
    """Orca (OSDI 2022) as arXiv 2309.06180, section 6.1, models it."""

def static(
    trace: Trace, device: Device, options: Options, *, capacity_tokens: int, max_model_len: int, max_batch: int, progress: Progress = None
) -> dict[str, Any]:
    """Batches that are padded, run until their longest output is done, and answer together (arXiv 2309.06180, section 6.1)."""

def prefill_first(
    trace: Trace,
    device: Device,
    options: Options,
    *,
    pool: Pool,
    max_model_len: int,
    max_batch: int,
    max_prefill_tokens: int,
    progress: Progress = None,
) -> dict[str, Any]:
    """A paged scheduler that runs whole prompts first, in steps of their own, and plans one step at a time."""

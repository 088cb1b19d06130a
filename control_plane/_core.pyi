"""Native scheduler of the control plane. Contract: CONTRACT.md."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Why a request ended. Mirrors FinishReason in core/types.hpp.
FINISH_NONE: int = 0  # not finished
FINISH_EOS: int = 1  # an end-of-sequence token of the model
FINISH_STOP_TOKEN: int = 2  # one of the request's stop token ids
FINISH_LENGTH: int = 3  # max_tokens or the context limit
FINISH_CANCELLED: int = 4  # cancel()
FINISH_DEADLINE: int = 5  # its deadline passed
FINISH_NOT_FINITE: int = 6  # its logits were NaN or all -inf
FINISH_QUARANTINED: int = 7  # was in two consecutive failed steps
FINISH_STOPPED: int = 8  # the core was stopped
FINISH_NEVER_FITS: int = 9  # accepted for an earlier session's pool, but the new data plane's pool can never hold it
FINISH_UNREACHABLE: int = 10  # waited, and could not have had its first token before its deadline

class Event(NamedTuple):
    """News about one sequence. Several tokens arrive in one event when the reader was slow; a beam search reports at its end only."""

    request_id: int  # the sequence's own id
    tokens: list[int]  # sampled since the last event; the last one is `match` if an EOS or stop id ended the request
    logprobs: list[float]  # as long as tokens if the request asked for logprobs, else empty
    ranks: list[int]
    finish: int  # FINISH_*
    match: int  # the EOS or stop token id that ended it, else -1
    # Complete in a request's last event; before that, fixed from its first event on, or 0.
    cached_tokens: int  # of the prompt, found in the prefix cache when it was first scheduled
    preemptions: int  # last event only
    queued_ns: int  # submit -> first scheduled
    prefill_ns: int  # first scheduled -> first token
    decode_ns: int  # first token -> last token; last event only
    estimate_ns: int  # FINISH_UNREACHABLE: what its prompt would have taken at least; else 0
    score: float  # of a finished beam; else 0

class RequestParams:
    """What the core and the data plane must know of a request besides its tokens."""

    def __init__(
        self,
        *,
        max_tokens: int,  # >= 1; already clamped to the context limit by the caller
        eos_token_ids: Sequence[int] = (),  # empty = ignore EOS
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,  # EOS and stop ids are suppressed on the device before so many are emitted
        temperature: float = 0.0,  # 0 = greedy
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        stream: int = 0,
        logprobs: bool = False,
        logit_bias: Sequence[tuple[int, float]] = (),
        allowed_token_ids: Sequence[int] = (),
        priority: int = 0,
        deadline_ns: int = 0,  # CLOCK_MONOTONIC; 0 = none
        cache: bool = True,  # finds cached blocks, and leaves its own for others
        cache_key: bytes = b"",  # 32 bytes: only requests with an equal one share blocks; b"" is one of them
        tenant: str = "",  # at most 64 characters; what policy fair shares between
        n: int = 1,  # samples of the prompt, in sequences request_id .. request_id + n - 1; sample i draws from stream + i
        beam_width: int = 0,  # > 1: so many beams instead, likewise; greedy, without penalties and logprobs
        length_penalty: float = 1.0,  # a beam's score is its sum of log-probabilities / length ** length_penalty
        early_stopping: int = 0,  # of a beam search: 0 = False, 1 = True, 2 = "never", as in transformers
    ) -> None: ...

class Refusal(NamedTuple):
    """Why submit() said no. `reason`: NEVER_FITS, QUEUE_FULL, DUPLICATE_ID, PROMPT_TOO_LONG, NO_DATA_PLANE, STOPPING, EMPTY_PROMPT."""

    reason: str
    limit: int
    asked: int
    message: str  # names the limit, its value and what was asked
    unit: str  # of a full queue: "requests" or "tokens"; else ""

class CoreConfig:
    def __init__(
        self,
        *,
        max_rows: int = 64,
        max_step_tokens: int = 2048,
        max_chunk_tokens: int = 512,
        depth: int = 2,
        max_substeps: int = 1,  # tokens per sequence that the data plane may make of one step; at most 64
        max_waiting_requests: int = 1024,
        max_waiting_tokens: int = 1 << 20,
        max_model_len: int = 2048,
        itl_target_us: int = 0,  # 0 = none
        policy: str = "priority",  # fcfs, priority or fair
        tenant_weights: Sequence[tuple[str, int]] = (),  # policy fair: shares of the named tenants; others have 1
        max_overtaken: int = 0,  # times an equal with more of its prompt in the prefix cache may come in before
    ) -> None: ...

class Pool:
    """What a session's data plane offers."""

    def __init__(self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0, swap_block_ns: int = 0) -> None: ...

def capacities_for(config: CoreConfig, pool: Pool) -> tuple[int, ...]:
    """Capacities (in schema order) with which a session's segment suits this config and pool; attach() refuses smaller ones.

    max_extra_words leaves room for the histories of one request of max_model_len and 65,536 words of logit edits.
    """

class Stats(NamedTuple):
    running: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    blocks_fenced: int
    steps_sent: int
    steps_retired: int
    tokens_emitted: int
    prompt_tokens_computed: int
    cached_tokens: int  # found in the prefix cache instead
    preemptions: int
    blocks_swapped_out: int  # to the host, by preemption, and back
    blocks_swapped_in: int
    finished: list[int]  # by FINISH_* reason
    refused: int
    ticks: int
    tick_ns_total: int
    tick_ns_max: int
    host_gap_ns_total: int  # data plane idle while work was runnable
    missed_wakes: int
    last_step_ns: int  # CLOCK_MONOTONIC of the last retired step, 0 = none
    step_us: int  # what the last retired step took in the data plane
    predicted_us: int  # what the cost model had expected of it
    step_margin: float  # 99 % of the steps with prompt chunks take at most so many times what is predicted; 0 before the first step
    chunk_allowance: int  # prompt tokens the last step with some had room for
    steps_with_decodes: int
    steps_over_target: int  # of these, slower than itl_target_us
    dequeued: int  # requests that left the waiting queue since the start, for whatever reason, less those put back
    dequeued_tokens: int  # their tokens
    results_taken: int  # more than steps_retired where steps had several substeps
    steps_interrupted: int  # of several substeps, asked to end early
    apply_us_total: int  # what the results taken say the data plane took: for deltas and batch,
    forward_us_total: int  # for the model,
    sample_us_total: int  # for sampling

class Scheduler:
    """The scheduler without thread, rings and clock: for tests and the simulator. Not thread-safe."""

    def __init__(self, config: CoreConfig) -> None: ...
    def attach(self, pool: Pool, capacities: Sequence[int]) -> None: ...
    def detach(self, *, step_failed: bool = False) -> None: ...
    def submit(self, request_id: int, prompt: NDArray[np.int32], params: RequestParams, now_ns: int) -> Refusal | None: ...
    def cancel(self, request_id: int) -> bool: ...
    def reset_prefix_cache(self) -> None: ...
    def tick(self, now_ns: int) -> bytes | None:
        """Plan and commit one step; the bytes of its slot (StepSlotLayout), or None when there is nothing to send."""
    @property
    def interrupted(self) -> int:
        """Steps below this number are to end after the substep under way; 0 = none. It only grows within a session."""
    def retire(self, result: bytes, now_ns: int) -> None:
        """Take one result slot (ResultSlotLayout)."""
    def poll(self) -> list[Event]: ...
    def stats(self) -> Stats: ...
    def check(self) -> None:
        """Recompute conservation (INV-5) from every owner; raises RuntimeError naming the first difference."""
    def snapshot(self) -> dict[str, Any]:
        """Every sequence, block and row, for tests and diagnosis. Allocates."""

class EngineCore:
    """The scheduler on its native thread, between a command queue, a session's rings and an event queue."""

    def __init__(self, config: CoreConfig) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable when poll() has events; one wake per batch."""
    def start(self) -> None: ...
    def stop(self) -> None:
        """End the thread; live requests get FINISH_STOPPED. Idempotent."""
    def attach(self, segment_fd: int, capacities: Sequence[int], epoch: int, pool: Pool) -> None:
        """Begin a session on a mapped segment (the fd is needed only during the call).

        Raises _shm.ProtocolError if the segment is not this session's, ValueError if a capacity is too small, RuntimeError if a session is
        attached or the core is not running.
        """
    def reset_prefix_cache(self) -> None:
        """Nothing cached so far is found any more. Waits for the core's thread."""
    def activate(self, *, swap_block_ns: int = 0) -> None:
        """The data plane is ready: steps may be sent. ``swap_block_ns``: to move a block to the host's pool and back; 0 = not known."""
    def detach(self, *, step_failed: bool = False) -> None:
        """The data plane is gone: everything running is put back to be recomputed. Returns when the core has let go of the mapping."""
    def submit(self, request_id: int, prompt: NDArray[np.int32], params: RequestParams) -> Refusal | None: ...
    def cancel(self, request_id: int) -> None: ...
    def poll(self) -> list[Event]: ...
    def stats(self) -> Stats: ...
    def peer(self) -> dict[str, Any]:
        """Both planes' pages as the mapping shows them, or {} without a session.

        Keys `data` and `control`: dicts of phase, phase_step, phase_since_ns, heartbeat_ns, published, consumed. Key `fault`: what the data
        plane did against the protocol ("" = nothing); after a fault no step is sent until detach().
        """

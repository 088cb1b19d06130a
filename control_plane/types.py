"""What passes between the front (gRPC, HTTP, CLI) and the engine facade.

Plain data and errors only: no protobuf, no native module, so that a new front needs nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol


class EarlyStopping(enum.IntEnum):
    """When beam search ends before ``max_tokens``, with ``beam_width`` hypotheses complete; the values are the core's.

    HEURISTIC: once the best open one, scored as if it ended now, is no better; FIRST: at once; NEVER: once none can become better.
    """

    HEURISTIC = 0
    FIRST = 1
    NEVER = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and for how many sequences. ``temperature`` 0 is greedy.

    Validated by :mod:`twinplane.control_plane.validation`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: drawn at random by the engine
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    n: int = 1  # sequences the client gets
    best_of: int = 1  # samples drawn; the front returns the best `n` of them
    beam_width: int = 1  # above 1: beam search
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    @property
    def num_sequences(self) -> int:
        """Sequences the engine works on."""
        return self.beam_width if self.beam_width > 1 else self.best_of


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated, tokenized request for ``sampling.num_sequences`` sequences, numbered from 0.

    ``max_tokens`` None means "whatever context remains". ``deadline`` is in ``time.monotonic()`` seconds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""  # requests share cached prefixes only under an equal salt
    prefix_cache: bool = True  # False: neither read nor fill it
    tenant: str = ""  # what policy fair shares between


class FinishReason(enum.Enum):
    STOP = "stop"  # EOS, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"  # CancelGeneration or the client went away


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ``queue``: received to first scheduled; ``prefill``: to first token; ``decode``: to last token."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    time_to_first_token: float = 0.0
    preemptions: int = 0

    def merged(self, other: Timing) -> Timing:
        """Of two sequences of a request: until the first token of either, until the last of both."""
        return Timing(
            queue=min(self.queue, other.queue),
            prefill=min(self.prefill, other.prefill),
            decode=max(self.decode, other.decode),
            time_to_first_token=min(self.time_to_first_token, other.time_to_first_token),
            preemptions=max(self.preemptions, other.preemptions),
        )


@dataclass(slots=True)
class Delta:
    """What one sequence of a request produced since its last delta; tokens in order, each exactly once."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cached_prompt_tokens: int = 0
    timing: Timing | None = None  # with `finish`
    index: int = 0  # of the sequence in its request
    score: float | None = None  # of a beam search's hypothesis, with `finish`


@dataclass(frozen=True, slots=True)
class Load:
    """Snapshot of the scheduler."""

    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    used_kv_blocks: int
    total_kv_blocks: int
    generated_tokens_per_second: float
    scheduler_steps: int
    seconds_since_last_step: float | None
    cached_kv_blocks: int = 0  # unreferenced, but found again by a prompt that begins alike
    prefix_cache_hit_rate: float = 0.0  # share of all prompt tokens since the start that were found instead of computed


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the attached data plane said of itself in its `hello`."""

    device: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int  # already limited to what the pool can hold
    vocab_size: int
    fingerprint: str


class EngineState(enum.Enum):
    WAITING = "waiting for a data plane"
    LOADING = "data plane loads weights"
    READY = "ready"
    STALLED = "data plane does not answer"
    DRAINING = "draining"
    STOPPED = "stopped"


class EngineError(Exception):
    """A request that can not be served. ``reason`` is stable UPPER_SNAKE; ``code`` names a google.rpc.Code."""

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(
        self, message: str, *, field: str | None = None, retry_delay: float | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field  # the request field at fault, dotted
        self.retry_delay = retry_delay  # seconds
        self.metadata = metadata or {}


class InvalidRequestError(EngineError):
    code, reason = "INVALID_ARGUMENT", "INVALID_REQUEST"


class PromptTooLongError(EngineError):
    code, reason = "INVALID_ARGUMENT", "PROMPT_TOO_LONG"


class NeverFitsError(EngineError):
    code, reason = "INVALID_ARGUMENT", "NEVER_FITS"


class ModelNotFoundError(EngineError):
    code, reason = "NOT_FOUND", "MODEL_NOT_FOUND"


class DuplicateRequestError(EngineError):
    code, reason = "ALREADY_EXISTS", "DUPLICATE_REQUEST_ID"


class QueueFullError(EngineError):
    code, reason = "RESOURCE_EXHAUSTED", "QUEUE_FULL"


class UnavailableError(EngineError):
    code, reason = "UNAVAILABLE", "DATA_PLANE_LOST"


class DrainingError(EngineError):
    code, reason = "UNAVAILABLE", "DRAINING"


class DeadlineError(EngineError):
    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class RowFailedError(EngineError):
    code, reason = "INTERNAL", "LOGITS_NOT_FINITE"


class QuarantinedError(EngineError):
    code, reason = "INTERNAL", "QUARANTINED"


class EngineLike(Protocol):
    """What a front asks of the engine. One event loop; no method blocks it."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[list[Delta], None]:
        """What is new in one request, at most one delta a sequence; the last of each has ``finish`` and ``timing``.

        Ends with the last sequence. Raises EngineError subclasses: a request fails as a whole.

        An asynchronous generator: nothing happens before the first ``__anext__``, and ``aclose`` (or an exception or
        cancellation inside) cancels the request. A reader that falls behind finds a sequence's tokens merged into one
        delta, so what waits for it is bounded by ``max_tokens``.
        """

    def cancel(self, request_id: str) -> bool:
        """End a live request, all its sequences, with FinishReason.CANCELLED; False if the id is not live."""

    def cancel_sequence(self, request_id: str, index: int) -> None:
        """End one sample of a live request with FinishReason.CANCELLED. (The beams of a search only end together.)"""

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""

    def load(self) -> Load: ...

    @property
    def info(self) -> EngineInfo | None:
        """None until a data plane said hello."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence served now, in tokens: the model's limit, or less if the KV pool is smaller."""

    @property
    def state(self) -> EngineState: ...

    def watch_state(self) -> AsyncIterator[EngineState]:
        """The present state, then every change, until the engine is stopped or the iterator closed."""

    async def drain(self, grace: float) -> int:
        """Stop admitting (DrainingError from then on), let live requests finish for ``grace`` seconds, end the rest so too.

        Returns how many did not finish in time.
        """

"""What the client takes and gives: plain dataclasses, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by the server with the model's chat template.

    ``messages``: mappings with ``role`` and ``content``, and where they apply ``name``, ``tool_call_id``, ``tool_calls``
    (list, OpenAI shape) and ``reasoning_content``. ``tools``: definitions in the OpenAI shape.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


Prompt = str | Sequence[int] | Chat
"""Text, token ids, or a chat."""


EarlyStopping = Literal["heuristic", "first", "never"]
"""When a beam search ends, with as many hypotheses complete as it is wide."""


class Options(TypedDict, total=False):
    """Parameters of a generation; what is left out takes the model's default. Meaning and ranges: docs/api.md."""

    request_id: str
    model: str
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    # stopping
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    # input and output
    add_special_tokens: bool
    parse_special_tokens: bool
    truncate_prompt_tokens: int
    cache_salt: str
    prefix_cache: bool
    priority: int
    text: bool
    skip_special_tokens: bool
    logprobs: bool
    echo_prompt_tokens: bool


@dataclass(frozen=True)
class Finish:
    """``reason``: "stop", "length" or "cancelled". With "stop", one of the others says what matched."""

    reason: str
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds, as the server measured them. ``receive_time``: seconds since 1970."""

    receive_time: float
    queue: float
    prefill: float
    decode: float
    time_to_first_token: float
    preemptions: int


@dataclass(frozen=True)
class Delta:
    """What a stream brought of one sequence since the last one. ``logprobs`` and ``ranks`` are empty or as long as ``token_ids``."""

    text: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: Finish | None = None  # in the sequence's last one
    usage: Usage | None = None  # in the stream's last one
    timing: Timing | None = None  # in the stream's last one
    index: int = 0  # of the sequence
    score: float | None = None  # of a beam search's hypothesis, with `finish`


@dataclass(frozen=True)
class SequenceResult:
    """One of the sequences of a result. ``score``: of a beam search's hypothesis; with best_of, the mean log-probability."""

    index: int
    text: str
    token_ids: list[int]
    finish: Finish
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    score: float | None = None


@dataclass(frozen=True)
class GenerateResult:
    """``text``, ``token_ids``, ``finish``, ``logprobs`` and ``ranks`` are those of the first sequence."""

    text: str
    token_ids: list[int]
    finish: Finish
    usage: Usage
    timing: Timing
    request_id: str
    model: str
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)  # with echo_prompt_tokens
    system_fingerprint: str = ""
    sequences: list[SequenceResult] = field(default_factory=list)  # all, by index


@dataclass(frozen=True)
class ServerInfo:
    """``state`` is a phrase such as "ready"; what the data plane says is empty or 0 until one is attached."""

    version: str
    instance_id: str
    start_time: float  # seconds since 1970
    state: str
    device: str
    dtype: str
    kv_dtype: str
    kv_block_size: int
    kv_block_count: int
    contracts: tuple[str, ...]
    system_fingerprint: str


@dataclass(frozen=True)
class ModelInfo:
    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    has_chat_template: bool
    default_sampling: dict[str, float]


@dataclass(frozen=True)
class Load:
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    used_kv_blocks: int
    total_kv_blocks: int
    generated_tokens_per_second: float
    scheduler_steps: int
    seconds_since_last_step: float | None
    cached_kv_blocks: int  # used by nobody, but found again by a prompt that begins alike
    prefix_cache_hit_rate: float  # share of all prompt tokens that were found instead of computed

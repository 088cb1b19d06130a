"""From what a client asked to what the engine may be given: every value checked, every default resolved.

No protobuf here: each front translates its own messages into the plain inputs below. Every refusal is an
InvalidRequestError that names the field (dotted, as in the public contract), its value and what is allowed, and is made
before any work is spent on the request.

Defaults of sampling parameters, in falling precedence: the request; the server's flags; the model's
``generation_config.json``; the values of :class:`SamplingParams`. Only sampling parameters are taken from the file:
``max_length`` and ``max_new_tokens`` there never cut an answer, and ``do_sample`` is ignored (an unset temperature
means the default one, not greedy).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from twinplane.control_plane.types import EarlyStopping, InvalidRequestError, PromptTooLongError, SamplingParams

MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_MESSAGES = 16384
MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 256
MAX_SEQUENCES = 16  # of one request: n, best_of, beam_width
MAX_TENANT = 64
# Logits divided by less than this overflow or differ from greedy by rounding only.
GREEDY_BELOW = 0.002

_PRINTABLE = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Range:
    """Closed interval of a float parameter."""

    low: float
    high: float

    def check(self, name: str, value: float) -> float:
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise InvalidRequestError(f"{name} is {value:g}; it must be from {self.low:g} to {self.high:g}", field=name)
        return value


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
_LOGIT_BIAS = Range(-100, 100)
_LENGTH_PENALTY = Range(-10, 10)
# What a sampling field must be, if set, where nothing is drawn: in a beam search.
_NEUTRAL = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "best_of": 1}


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Sampling parameters as asked; None = unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StopInput:
    """Stop conditions as asked; None = unset."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class StopParams:
    """Checked stop conditions; ``max_tokens`` None = whatever context remains."""

    max_tokens: int | None
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows. ``max_model_len``: tokens of prompt and output together."""

    max_model_len: int
    vocab_size: int


# ------------------------------------------------------------------------------------------ sampling


def default_sampling(generation_config: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None) -> SamplingParams:
    """What unset fields mean: ``overrides`` (server flags) over ``generation_config`` over the built-in values.

    Raises InvalidRequestError naming the key that is out of range.
    """
    names = (*RANGES, "top_k")
    chosen: dict[str, Any] = {}
    for name in names:
        for source in (overrides or {}, generation_config or {}):
            if (value := source.get(name)) is not None:
                chosen[name] = value
                break
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(f"{name} is {value!r} in the model's or the server's defaults; it must be a number", field=name)
    return resolve_sampling(SamplingInput(**chosen), SamplingParams(), ModelLimits(max_model_len=0, vocab_size=0), prefix="")


def resolve_sampling(asked: SamplingInput, defaults: SamplingParams, limits: ModelLimits, *, prefix: str = "sampling.") -> SamplingParams:
    """Checked parameters with defaults filled in. Raises InvalidRequestError naming ``prefix`` + the field."""
    beam_width = _num_sequences(asked.beam_width, 1, prefix + "beam_width")
    sampling = _resolve_draws(asked, defaults, limits, prefix) if beam_width == 1 else _resolve_beams(asked, beam_width, prefix)
    if asked.seed is not None and not 0 <= asked.seed < 1 << 64:
        raise InvalidRequestError(f"{prefix}seed is {asked.seed}; it must be from 0 to 2^64 - 1", field=f"{prefix}seed")
    return replace(
        sampling,
        seed=asked.seed,
        logit_bias=_logit_bias(asked.logit_bias or {}, limits, f"{prefix}logit_bias"),
        allowed_token_ids=_token_ids(asked.allowed_token_ids, limits, f"{prefix}allowed_token_ids", MAX_ALLOWED_TOKENS),
    )


def _resolve_draws(asked: SamplingInput, defaults: SamplingParams, limits: ModelLimits, prefix: str) -> SamplingParams:
    """Greedy or random sampling of one sequence or several."""
    for name in ("length_penalty", "early_stopping"):
        if getattr(asked, name) is not None:
            raise InvalidRequestError(f"{prefix}{name} is of beam search: it needs {prefix}beam_width above 1", field=prefix + name)
    values: dict[str, Any] = {name: getattr(defaults, name) for name in (*RANGES, "top_k")}
    for name, allowed in RANGES.items():
        if (value := getattr(asked, name)) is not None:
            values[name] = allowed.check(prefix + name, value)
    if asked.top_k is not None:
        values["top_k"] = _top_k(asked.top_k, limits, prefix)
    if values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    if values["top_p"] == 0:
        values |= {"top_p": 1.0, "top_k": 1}
    n = _num_sequences(asked.n, 1, prefix + "n")
    best_of = n if asked.best_of is None else _num_sequences(asked.best_of, n, prefix + "best_of", "sampling.n")
    return SamplingParams(**values, n=n, best_of=best_of)


def _resolve_beams(asked: SamplingInput, beam_width: int, prefix: str) -> SamplingParams:
    """Beam search takes the likeliest continuations of the model's own distribution: no defaults of sampling apply."""
    if asked.temperature is not None and not 0 <= asked.temperature < GREEDY_BELOW:
        _refuse_with_beams(prefix + "temperature", asked.temperature, 0)
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(asked, name)) not in (None, neutral):
            _refuse_with_beams(prefix + name, value, neutral)
    n = beam_width if asked.n is None else _num_sequences(asked.n, 1, prefix + "n")
    if n > beam_width:
        raise InvalidRequestError(
            f"{prefix}n is {n}; a beam search returns at most {prefix}beam_width, which is {beam_width}", field=f"{prefix}n"
        )
    penalty = 1.0 if asked.length_penalty is None else _LENGTH_PENALTY.check(prefix + "length_penalty", asked.length_penalty)
    return SamplingParams(
        temperature=0.0, n=n, beam_width=beam_width, length_penalty=penalty, early_stopping=asked.early_stopping or EarlyStopping.HEURISTIC
    )


def _refuse_with_beams(name: str, value: float, neutral: float) -> None:
    raise InvalidRequestError(f"{name} is {value:g}; with beam search it must be unset or {neutral:g}", field=name)


def _num_sequences(asked: int | None, least: int, name: str, least_name: str = "") -> int:
    if asked is None:
        return least
    if not least <= asked <= MAX_SEQUENCES:
        whose = f" ({least_name})" if least_name else ""
        raise InvalidRequestError(f"{name} is {asked}; it must be from {least}{whose} to {MAX_SEQUENCES}", field=name)
    return asked


def check_streamable(sampling: SamplingParams) -> None:
    """Which samples are the best is known only at their end. Raises InvalidRequestError."""
    if sampling.best_of > sampling.n and sampling.beam_width == 1:
        raise InvalidRequestError(
            f"sampling.best_of is {sampling.best_of}, more than sampling.n, which is {sampling.n}: which are the best is known only at the"
            " end, so this can not be streamed; use the unary method",
            field="sampling.best_of",
        )


def check_beams(sampling: SamplingParams, stop: StopParams, *, logprobs: bool) -> None:
    """What a beam search can not be combined with outside ``sampling``. Raises InvalidRequestError."""
    if sampling.beam_width > 1 and stop.stop_strings:
        raise InvalidRequestError(
            "stop.stop_strings are not searched for in beam search: use stop.stop_token_ids", field="stop.stop_strings"
        )
    if sampling.beam_width > 1 and logprobs:
        raise InvalidRequestError("output.logprobs is not available in beam search: each hypothesis has a score", field="output.logprobs")


def _top_k(top_k: int, limits: ModelLimits, prefix: str) -> int:
    """-1 (a habit of other servers), 0 and anything from the vocabulary's size up are "off"."""
    if top_k < -1:
        raise InvalidRequestError(f"{prefix}top_k is {top_k}; it must be at least 1, or 0 for off", field=f"{prefix}top_k")
    return 0 if top_k < 1 or (limits.vocab_size and top_k >= limits.vocab_size) else int(top_k)


def _logit_bias(bias: Mapping[int, float], limits: ModelLimits, name: str) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"{name} has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", field=name)
    _token_ids(list(bias), limits, name, MAX_LOGIT_BIAS)
    return {token: _LOGIT_BIAS.check(f"{name}[{token}]", value) for token, value in sorted(bias.items())}


def _token_ids(ids: Sequence[int], limits: ModelLimits, name: str, most: int) -> tuple[int, ...]:
    """Distinct ids of the vocabulary, in the order given."""
    if len(ids) > most:
        raise InvalidRequestError(f"{name} has {len(ids)} entries; at most {most} are allowed", field=name)
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(f"{name} contains token id {token}; the vocabulary ends at {limits.vocab_size - 1}", field=name)
    return tuple(dict.fromkeys(ids))


def describe_defaults(defaults: SamplingParams) -> dict[str, float]:
    """The effective defaults, for the log at start and for clients."""
    shown = (*RANGES, "top_k")
    return {item.name: float(getattr(defaults, item.name)) for item in fields(SamplingParams) if item.name in shown}


# ---------------------------------------------------------------------------------------------- stop


def resolve_stop(asked: StopInput, limits: ModelLimits) -> StopParams:
    """Checked stop conditions, before the prompt's length is known. See :func:`check_room` for after."""
    max_tokens, min_tokens = asked.max_tokens, asked.min_tokens or 0
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequestError(
            f"stop.max_tokens is {max_tokens}; at least 1 token is generated: leave it unset for whatever context remains",
            field="stop.max_tokens",
        )
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        most = "" if max_tokens is None else f" and at most stop.max_tokens, which is {max_tokens}"
        raise InvalidRequestError(f"stop.min_tokens is {min_tokens}; it must be at least 0{most}", field="stop.min_tokens")
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=_stop_strings(asked.stop_strings),
        stop_token_ids=_token_ids(asked.stop_token_ids, limits, "stop.stop_token_ids", MAX_STOP_TOKENS),
    )


def _stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop.stop_strings has {len(strings)} entries; at most {MAX_STOP_STRINGS} are allowed", field="stop.stop_strings"
        )
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARACTERS:
            name = f"stop.stop_strings[{index}]"
            raise InvalidRequestError(
                f"{name} has {len(string)} characters; it must have from 1 to {MAX_STOP_STRING_CHARACTERS}", field=name
            )
    return tuple(dict.fromkeys(strings))


# -------------------------------------------------------------------------------------------- prompt


def check_prompt_ids(ids: Sequence[int], limits: ModelLimits) -> None:
    """Ids sent by a client. Raises InvalidRequestError for one outside the vocabulary."""
    if ids and max(ids) >= limits.vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= limits.vocab_size)
        name = f"tokens.ids[{index}]"
        raise InvalidRequestError(f"{name} is {ids[index]}; the vocabulary ends at {limits.vocab_size - 1}", field=name)


def truncate_prompt(ids: Sequence[int], keep: int | None) -> Sequence[int]:
    """The last ``keep`` tokens. Raises InvalidRequestError for ``keep`` < 1."""
    if keep is None:
        return ids
    if keep < 1:
        raise InvalidRequestError(f"truncate_prompt_tokens is {keep}; it must be at least 1", field="truncate_prompt_tokens")
    return ids[-keep:]


def check_length(num_tokens: int, limits: ModelLimits, *, field: str) -> None:
    """A prompt must leave room for one token. Raises PromptTooLongError, or InvalidRequestError for an empty prompt."""
    if num_tokens == 0:
        raise InvalidRequestError(f"the prompt has no tokens: give some {field}", field=field)
    if num_tokens >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens; at most {limits.max_model_len - 1} fit, since the context length is"
            f" {limits.max_model_len} and at least one token is generated: shorten it, or set truncate_prompt_tokens",
            field=field,
            metadata={"prompt_tokens": str(num_tokens), "max_model_len": str(limits.max_model_len)},
        )


def check_num_messages(count: int) -> None:
    if count > MAX_MESSAGES:
        raise InvalidRequestError(f"chat.messages has {count} entries; at most {MAX_MESSAGES} are allowed", field="chat.messages")


def check_text_size(size: int, most: int, limits: ModelLimits, *, field: str) -> None:
    """Refuse, before tokenizing, a text that can not fit whatever its tokens are. Sizes in bytes (or characters, which are fewer)."""
    if size > most:
        raise PromptTooLongError(
            f"the prompt has {size} bytes; more than {most} can not fit into the context length of {limits.max_model_len} tokens"
            " (the longest token repeated): shorten it",
            field=field,
            metadata={"prompt_bytes": str(size), "max_model_len": str(limits.max_model_len)},
        )


def check_room(num_prompt_tokens: int, stop: StopParams, limits: ModelLimits) -> None:
    """``max_tokens`` and ``min_tokens`` must fit behind the prompt: nothing is cut silently."""
    room = limits.max_model_len - num_prompt_tokens
    for name, value in (("stop.max_tokens", stop.max_tokens), ("stop.min_tokens", stop.min_tokens)):
        if value is not None and value > room:
            raise InvalidRequestError(
                f"{name} is {value}; behind a prompt of {num_prompt_tokens} tokens only {room} fit into the context length of"
                f" {limits.max_model_len}: ask for at most {room}",
                field=name,
                metadata={"prompt_tokens": str(num_prompt_tokens), "max_model_len": str(limits.max_model_len)},
            )


# --------------------------------------------------------------------------------------- identifiers


def check_request_id(request_id: str, *, field: str = "request_id") -> str:
    """A request id goes into headers and logs, so it is short, printable and free of spaces."""
    return _identifier(request_id, MAX_REQUEST_ID, field)


def check_cache_salt(salt: str) -> str:
    return _identifier(salt, MAX_CACHE_SALT, "cache_salt") if salt else ""


def check_tenant(tenant: str) -> str:
    return _identifier(tenant, MAX_TENANT, "x-twinplane-tenant") if tenant else ""


def _identifier(text: str, most: int, field: str) -> str:
    if len(text) > most:
        raise InvalidRequestError(f"{field} has {len(text)} characters; at most {most} are allowed", field=field)
    if not _PRINTABLE.fullmatch(text):
        raise InvalidRequestError(f"{field} must be printable ASCII without spaces", field=field)
    return text

"""Between the client's plain values and the messages of twinplane.v1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from twinplane.client.types import (
    Chat,
    Delta,
    Finish,
    GenerateResult,
    Load,
    ModelInfo,
    Options,
    Prompt,
    SequenceResult,
    ServerInfo,
    Timing,
    Usage,
)
from twinplane.v1 import engine_pb2, generation_pb2, tokenizer_pb2

TENANT = "x-twinplane-tenant"
READY = "twinplane.v1.GenerationService"
ALIVE = "liveness"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

# Options by the message they belong to; `stop` is handled by name.
_TOP = (
    "request_id",
    "model",
    "add_special_tokens",
    "parse_special_tokens",
    "truncate_prompt_tokens",
    "cache_salt",
    "prefix_cache",
    "priority",
)
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias",
    "allowed_token_ids", "n", "best_of", "beam_width", "length_penalty",
)  # fmt: skip
_STOP = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_in_output")
_OUTPUT = ("text", "skip_special_tokens", "logprobs", "echo_prompt_tokens")
_KNOWN = frozenset((*_TOP, *_SAMPLING, *_STOP, *_OUTPUT, "stop", "early_stopping"))
_EARLY_STOPPING: dict[Any, Any] = {
    None: generation_pb2.EARLY_STOPPING_UNSPECIFIED,
    "heuristic": generation_pb2.EARLY_STOPPING_HEURISTIC,
    "first": generation_pb2.EARLY_STOPPING_FIRST,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}
_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def metadata_of(tenant: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call of a client."""
    return ((TENANT, tenant),) if tenant else ()


def generate_request(prompt: Prompt, options: Options) -> generation_pb2.GenerateRequest:
    """Raises TypeError for an unknown option and ValueError for a value protobuf can not hold (a negative count, say)."""
    if unknown := set(options) - _KNOWN:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KNOWN))}")
    given = _given(options)
    request = generation_pb2.GenerateRequest(
        **_pick(given, _TOP),
        sampling=generation_pb2.SamplingParams(**_pick(given, _SAMPLING), early_stopping=_early_stopping(given)),
        stop=generation_pb2.StopParams(**_pick(given, _STOP), stop_strings=_strings(given.get("stop"))),
        output=generation_pb2.OutputParams(**_pick(given, _OUTPUT)),
    )
    _set_prompt(request, prompt)
    return request


def tokenize_request(
    prompt: str | Chat, *, model: str, add_special_tokens: bool | None, parse_special_tokens: bool | None
) -> tokenizer_pb2.TokenizeRequest:
    switches = _given({"add_special_tokens": add_special_tokens, "parse_special_tokens": parse_special_tokens})
    request = tokenizer_pb2.TokenizeRequest(model=model, **switches)
    _set_prompt(request, prompt)
    return request


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """None is as good as left out."""
    return {name: value for name, value in options.items() if value is not None}


def _pick(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _early_stopping(given: Mapping[str, Any]) -> Any:
    name = given.get("early_stopping")
    if name not in _EARLY_STOPPING:
        raise ValueError(f"early_stopping is {name!r}; it must be 'heuristic', 'first' or 'never'")
    return _EARLY_STOPPING[name]


def _strings(stop: Any) -> Sequence[str]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _set_prompt(request: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.tokens.CopyFrom(generation_pb2.TokenIds(ids=prompt))


def _chat(chat: Chat) -> generation_pb2.ChatInput:
    message = generation_pb2.ChatInput(
        messages=[_message(m) for m in chat.messages],
        tools_json=json.dumps(list(chat.tools)) if chat.tools else "",
        continue_final_message=chat.continue_final_message,
        **_given({"add_generation_prompt": chat.add_generation_prompt}),
    )
    if chat.template_arguments is not None:
        message.template_arguments.update(dict(chat.template_arguments))
    return message


def _message(message: Mapping[str, Any]) -> generation_pb2.ChatMessage:
    fields = _given(message)
    calls = fields.pop("tool_calls", None)
    try:
        return generation_pb2.ChatMessage(**fields, tool_calls_json=json.dumps(calls) if calls else "")
    except ValueError as error:
        raise ValueError(f"a chat message has role, content, name, tool_call_id, tool_calls, reasoning_content: {error}") from error


# ------------------------------------------------------------------------------------------- replies


def result_of(response: generation_pb2.GenerateResponse) -> GenerateResult:
    return _result(response, [_sequence(sequence) for sequence in response.sequences], _usage(response.usage), _timing(response.timing))


def _sequence(sequence: generation_pb2.Sequence) -> SequenceResult:
    return SequenceResult(
        index=sequence.index,
        text=sequence.text,
        token_ids=list(sequence.token_ids),
        finish=_finish(sequence.finish),
        logprobs=list(sequence.logprobs.values),
        ranks=list(sequence.logprobs.ranks),
        score=sequence.score if sequence.HasField("score") else None,
    )


def _result(opening: Any, sequences: list[SequenceResult], usage: Usage, timing: Timing) -> GenerateResult:
    """``opening``: the message that names request, model and prompt."""
    first = sequences[0]
    return GenerateResult(
        text=first.text,
        token_ids=first.token_ids,
        finish=first.finish,
        usage=usage,
        timing=timing,
        request_id=opening.request_id,
        model=opening.model,
        logprobs=first.logprobs,
        ranks=first.ranks,
        prompt_token_ids=list(opening.prompt.token_ids),
        system_fingerprint=opening.system_fingerprint,
        sequences=sequences,
    )


def deltas_of(response: generation_pb2.StreamGenerateResponse) -> list[Delta]:
    """At least one. What is said of the request as a whole is in the last."""
    parts = list(response.deltas) or [generation_pb2.SequenceDelta()]
    deltas = [
        Delta(
            text=part.text,
            token_ids=list(part.token_ids),
            logprobs=list(part.logprobs.values),
            ranks=list(part.logprobs.ranks),
            finish=_finish(part.finish) if part.HasField("finish") else None,
            index=part.index,
            score=part.score if part.HasField("score") else None,
        )
        for part in parts
    ]
    deltas[-1] = replace(
        deltas[-1],
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timing=_timing(response.timing) if response.HasField("timing") else None,
    )
    return deltas


def _finish(finish: generation_pb2.Finish) -> Finish:
    match = finish.WhichOneof("match")
    return Finish(_REASONS.get(finish.reason, "unspecified"), **({match: getattr(finish, match)} if match else {}))


def _usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


def _timing(timing: generation_pb2.Timing) -> Timing:
    return Timing(
        receive_time=timing.receive_time.ToNanoseconds() / 1e9,
        queue=timing.queue.ToNanoseconds() / 1e9,
        prefill=timing.prefill.ToNanoseconds() / 1e9,
        decode=timing.decode.ToNanoseconds() / 1e9,
        time_to_first_token=timing.time_to_first_token.ToNanoseconds() / 1e9,
        preemptions=timing.preemptions,
    )


def server_info_of(response: engine_pb2.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=response.version,
        instance_id=response.instance_id,
        start_time=response.start_time.ToNanoseconds() / 1e9,
        state=response.state,
        device=response.device,
        dtype=response.dtype,
        kv_dtype=response.kv_dtype,
        kv_block_size=response.kv_block_size,
        kv_block_count=response.kv_block_count,
        contracts=tuple(response.contracts),
        system_fingerprint=response.system_fingerprint,
    )


def model_info_of(model: engine_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        aliases=tuple(model.aliases),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        architecture=model.architecture,
        has_chat_template=model.has_chat_template,
        default_sampling=json_format.MessageToDict(model.default_sampling),
    )


def load_of(load: engine_pb2.Load) -> Load:
    since = load.since_last_step.ToNanoseconds() / 1e9 if load.HasField("since_last_step") else None
    return Load(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_prompt_tokens=load.waiting_prompt_tokens,
        used_kv_blocks=load.used_kv_blocks,
        total_kv_blocks=load.total_kv_blocks,
        generated_tokens_per_second=load.generated_tokens_per_second,
        scheduler_steps=load.scheduler_steps,
        seconds_since_last_step=since,
        cached_kv_blocks=load.cached_kv_blocks,
        prefix_cache_hit_rate=load.prefix_cache_hit_rate,
    )


# -------------------------------------------------------------------------------------------- health


def health_request(service: str) -> bytes:
    """A grpc.health.v1.HealthCheckRequest, written by hand (field 1, length, name) to spare a dependency."""
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name


def is_serving(response: bytes) -> bool:
    """Whether a grpc.health.v1.HealthCheckResponse says SERVING (field 1 = 1)."""
    return response == b"\x08\x01"


class Collector:
    """Puts the messages of a stream together."""

    def __init__(self) -> None:
        self.opening = generation_pb2.StreamGenerateResponse()  # the first message: ids, model, prompt
        self.deltas: list[Delta] = []
        self._taken = 0  # of `deltas`, by whoever iterates

    def add(self, response: generation_pb2.StreamGenerateResponse) -> None:
        if not self.deltas:
            self.opening = response
        self.deltas += deltas_of(response)

    def take(self) -> Delta | None:
        """The next delta nobody has taken yet."""
        if self._taken == len(self.deltas):
            return None
        self._taken += 1
        return self.deltas[self._taken - 1]

    def result(self) -> GenerateResult:
        """Raises ValueError if the stream did not come to its end."""
        last = self.deltas[-1] if self.deltas else None
        if last is None or last.usage is None or last.timing is None:
            raise ValueError("the stream was cancelled before its end: there is no result")
        by_index: dict[int, list[Delta]] = {}
        for delta in self.deltas:
            by_index.setdefault(delta.index, []).append(delta)
        return _result(self.opening, [_joined(by_index[index]) for index in sorted(by_index)], last.usage, last.timing)


def _joined(deltas: Sequence[Delta]) -> SequenceResult:
    """One sequence from all its deltas."""
    last = deltas[-1]
    assert last.finish is not None
    return SequenceResult(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish=last.finish,
        logprobs=[value for delta in deltas for value in delta.logprobs],
        ranks=[rank for delta in deltas for rank in delta.ranks],
        score=last.score,
    )

"""Between the messages of twinplane.v1 and plain values. No rule is checked here but well-formedness."""

from __future__ import annotations

import functools
import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from twinplane.control_plane.generation import Answer
from twinplane.control_plane.text.chat import Conversation
from twinplane.control_plane.text.output import Piece
from twinplane.control_plane.types import EarlyStopping, Finish, FinishReason, InvalidRequestError, Timing
from twinplane.control_plane.validation import SamplingInput, StopInput
from twinplane.v1 import generation_pb2 as pb

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """A field this server does not know may change what the answer means, so it is not ignored. Raises InvalidRequestError."""
    for unknown in UnknownFieldSet(message):  # type: ignore[no-untyped-call, attr-defined]
        name = f"{path or 'the request'} ({message.DESCRIPTOR.full_name})"
        raise InvalidRequestError(
            f"{name} has field number {unknown.field_number}, which this server does not know: it is not supported in this version",
            field=path or None,
        )
    for name, repeated in _message_fields(message.DESCRIPTOR):
        inner = f"{path}.{name}" if path else name
        if repeated:
            for index, item in enumerate(getattr(message, name)):
                refuse_unknown_fields(item, f"{inner}[{index}]")
        elif message.HasField(name):
            refuse_unknown_fields(getattr(message, name), inner)


@functools.cache
def _message_fields(descriptor: Any) -> list[tuple[str, bool]]:
    """Name of each field that holds messages of ours, and whether it is repeated. Never touches a (large) string."""
    fields = []
    for field in descriptor.fields:
        kind = field.message_type
        if kind is not None and kind.full_name.startswith("twinplane.") and not kind.GetOptions().map_entry:
            fields.append((field.name, field.is_repeated))
    return fields


def optional(message: Any, name: str) -> Any:
    """The value of a proto3 optional field, None if unset."""
    return getattr(message, name) if message.HasField(name) else None


def sampling_input(params: pb.SamplingParams) -> SamplingInput:
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n",
        "best_of", "beam_width", "length_penalty",
    )  # fmt: skip
    set_fields = {name: optional(params, name) for name in names}
    return SamplingInput(
        **set_fields,
        early_stopping=_early_stopping(params.early_stopping),
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
    )


def _early_stopping(value: int) -> EarlyStopping | None:
    if value == pb.EARLY_STOPPING_UNSPECIFIED:
        return None
    if value not in _EARLY_STOPPING:
        name = "sampling.early_stopping"
        raise InvalidRequestError(f"{name} is {value}, which this server does not know", field=name)
    return _EARLY_STOPPING[value]


def stop_input(params: pb.StopParams) -> StopInput:
    return StopInput(
        max_tokens=optional(params, "max_tokens"),
        min_tokens=optional(params, "min_tokens"),
        stop_strings=params.stop_strings,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def conversation(chat: pb.ChatInput) -> Conversation:
    """Raises InvalidRequestError for JSON that is none."""
    try:
        arguments = json_format.MessageToDict(chat.template_arguments) if chat.HasField("template_arguments") else None
    except json_format.Error as error:
        raise InvalidRequestError(f"chat.template_arguments can not be used: {error}", field="chat.template_arguments") from error
    return Conversation(
        messages=[_message(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)],
        tools=_json_array(chat.tools_json, "chat.tools_json"),
        arguments=arguments,
        add_generation_prompt=optional(chat, "add_generation_prompt"),
        continue_final_message=chat.continue_final_message,
    )


def _message(message: pb.ChatMessage, path: str) -> dict[str, Any]:
    """As templates expect it: what is empty is absent, except the content."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            plain[name] = value
    if (calls := _json_array(message.tool_calls_json, f"{path}.tool_calls_json")) is not None:
        plain["tool_calls"] = calls
    return plain


def _json_array(text: str, path: str) -> list[Any] | None:
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not valid JSON: {error}", field=path) from error
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path} must be a JSON array, not {type(value).__name__}", field=path)
    return value


def filled(message: Any, part: Piece | Answer) -> Any:
    """A Sequence or SequenceDelta with the columns and the end of ``part``; its text and index are there already."""
    message.token_ids.extend(part.token_ids)
    if part.logprobs:
        message.logprobs.values.extend(part.logprobs)
        message.logprobs.ranks.extend(part.ranks)
    if part.finish is not None:
        message.finish.CopyFrom(finish_message(part.finish))
    if part.score is not None:
        message.score = part.score
    return message


def finish_message(finish: Finish) -> pb.Finish:
    message = pb.Finish(reason=_REASONS[finish.reason])
    if finish.eos_token_id is not None:
        message.eos_token_id = finish.eos_token_id
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    elif finish.stop_string is not None:
        message.stop_string = finish.stop_string
    return message


def timing_message(timing: Timing | None, receive_time_ns: int) -> pb.Timing:
    message = pb.Timing()
    message.receive_time.FromNanoseconds(receive_time_ns)
    if timing is not None:
        for name in ("queue", "prefill", "decode", "time_to_first_token"):
            getattr(message, name).FromNanoseconds(int(getattr(timing, name) * 1e9))
        message.preemptions = timing.preemptions
    return message

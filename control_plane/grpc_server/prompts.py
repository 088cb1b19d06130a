"""From the input of a request to prompt token ids. Large inputs are worked on in a thread, and hopeless ones not at all."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message
from twinplane.control_plane.grpc_server import convert
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.validation import (
    ModelLimits,
    check_length,
    check_num_messages,
    check_prompt_ids,
    check_text_size,
    truncate_prompt,
)
from twinplane.v1 import generation_pb2 as pb


def limits_of(model: ServedModel, max_model_len: int) -> ModelLimits:
    return ModelLimits(max_model_len=max_model_len, vocab_size=model.vocab_size)


def check_shape(request: Message, chat: pb.ChatInput) -> None:
    """Nothing unknown, and no more messages than it is worth looking at one by one. Raises InvalidRequestError."""
    check_num_messages(len(chat.messages))
    convert.refuse_unknown_fields(request)


async def text_ids(model: ServedModel, text: str, limits: ModelLimits, *, add_special: bool, parse_special: bool) -> Sequence[int]:
    tokenizer = model.tokenizer
    check_text_size(len(text), tokenizer.max_bytes(limits.max_model_len), limits, field="text")
    return await tokenizer.run(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special, parse_special_tokens=parse_special)
    )


async def chat_ids(model: ServedModel, chat: pb.ChatInput, limits: ModelLimits, *, parse_special: bool) -> Sequence[int]:
    tokenizer = model.tokenizer
    size = chat.ByteSize()
    check_text_size(size, tokenizer.max_bytes(limits.max_model_len), limits, field="chat")
    return await tokenizer.run(size, lambda: tokenizer.encode_chat(convert.conversation(chat), parse_special_tokens=parse_special))


async def prompt_ids(model: ServedModel, request: pb.GenerateRequest, limits: ModelLimits) -> tuple[int, ...]:
    """The prompt of a generation: checked, truncated if asked, with room for at least one more token.

    Raises InvalidRequestError or PromptTooLongError naming the field of the input.
    """
    parse_special = convert.optional(request, "parse_special_tokens")
    keep = convert.optional(request, "truncate_prompt_tokens")
    kind = request.WhichOneof("input")
    ids: Sequence[int] = ()
    if kind == "text":
        add_special = convert.optional(request, "add_special_tokens")
        ids = await text_ids(model, request.text, limits, add_special=add_special is not False, parse_special=parse_special is not False)
    elif kind == "chat":
        ids = await chat_ids(model, request.chat, limits, parse_special=parse_special is True)
    elif kind == "tokens":
        ids = request.tokens.ids
    ids = truncate_prompt(ids, keep)
    check_length(len(ids), limits, field=kind or "input (text, tokens or chat)")
    if kind == "tokens":
        check_prompt_ids(ids, limits)
    return tuple(ids)

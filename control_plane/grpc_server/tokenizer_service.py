"""twinplane.v1.TokenizerService."""

from __future__ import annotations

from typing import Any

import grpc
from twinplane.control_plane.grpc_server import convert
from twinplane.control_plane.grpc_server.prompts import chat_ids, check_shape, limits_of, text_ids
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.types import EngineLike, InvalidRequestError
from twinplane.v1 import tokenizer_pb2 as pb
from twinplane.v1 import tokenizer_pb2_grpc

MAX_DETOKENIZED = 1 << 20


class TokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Needs no data plane. Handlers raise EngineError; the interceptor turns it into a status."""

    def __init__(self, engine: EngineLike, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TokenizeResponse:
        check_shape(request, request.chat)
        self._model.check_name(request.model)
        limits = limits_of(self._model, self._engine.max_model_len)
        parse_special = convert.optional(request, "parse_special_tokens")
        match request.WhichOneof("input"):
            case "text":
                add_special = convert.optional(request, "add_special_tokens")
                ids = await text_ids(
                    self._model, request.text, limits, add_special=add_special is not False, parse_special=parse_special is not False
                )
            case "chat":
                ids = await chat_ids(self._model, request.chat, limits, parse_special=parse_special is True)
            case _:
                raise InvalidRequestError("nothing to tokenize: set `text` or `chat`", field="input")
        pieces = self._model.tokenizer.bytes.pieces
        return pb.TokenizeResponse(
            token_ids=ids, pieces=[pieces[index] for index in ids] if request.return_pieces else (), max_model_len=limits.max_model_len
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DetokenizeResponse:
        convert.refuse_unknown_fields(request)
        self._model.check_name(request.model)
        if len(request.token_ids) > MAX_DETOKENIZED:
            raise InvalidRequestError(
                f"token_ids has {len(request.token_ids)} entries; at most {MAX_DETOKENIZED} are allowed", field="token_ids"
            )
        vocab_size = self._model.vocab_size
        if (largest := max(request.token_ids, default=0)) >= vocab_size:
            raise InvalidRequestError(f"token_ids contains {largest}; the vocabulary ends at {vocab_size - 1}", field="token_ids")
        tokenizer = self._model.tokenizer
        skip = convert.optional(request, "skip_special_tokens") is not False
        text = await tokenizer.run(len(request.token_ids), lambda: tokenizer.decode(request.token_ids, skip_special_tokens=skip))
        return pb.DetokenizeResponse(text=text)

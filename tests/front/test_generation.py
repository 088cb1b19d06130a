"""The generation service over a real connection: what comes out, and how a request is described."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import pytest
import structlog
from fake_engine import FakeEngine
from front_support import EOS, serving
from twinplane.client import AsyncClient, Chat, Finish, TwinplaneError
from twinplane.control_plane.text.chat import Conversation
from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.control_plane.types import EarlyStopping, RowFailedError
from twinplane.v1 import generation_pb2, generation_pb2_grpc

FOX = "The quick brown fox"


async def test_unary_and_stream_give_the_same_result(client: AsyncClient) -> None:
    whole = await client.generate("Say it", logprobs=True, echo_prompt_tokens=True)
    streamed = await client.stream("Say it", logprobs=True, echo_prompt_tokens=True).result()
    assert whole.text == streamed.text == FOX
    for name in ("token_ids", "logprobs", "ranks", "finish", "usage", "prompt_token_ids", "model", "system_fingerprint"):
        assert getattr(whole, name) == getattr(streamed, name), name
    assert whole.finish == Finish("length")
    assert len(whole.token_ids) == len(whole.logprobs) == len(whole.ranks) == whole.usage.completion_tokens


async def test_timing_travels_with_the_last_message_only(client: AsyncClient) -> None:
    async with client.stream("Say it") as stream:
        deltas = [delta async for delta in stream]
    assert [delta.timing is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    timing = deltas[-1].timing
    assert timing is not None
    assert (timing.queue, timing.prefill, timing.decode, timing.time_to_first_token, timing.preemptions) == (0.25, 0.5, 0.75, 0.75, 2)


async def test_D15_every_stream_ends_with_one_finish_and_one_usage(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat(Conversation([{"role": "user", "content": "Hi"}]))
    answers = {"stop": [*tokenizer.encode("👋🏽 é"), EOS], "length": tokenizer.encode("plain"), "nothing": [EOS]}
    for name, answer in answers.items():
        engine = FakeEngine(lambda request, answer=answer: answer, eos=EOS, cached_prompt_tokens=3)
        async with serving(engine) as (target, _), AsyncClient(target) as client:
            async with client.stream(Chat([{"role": "user", "content": "Hi"}])) as stream:
                deltas = [delta async for delta in stream]
            usages = [delta.usage for delta in deltas if delta.usage is not None]
            assert len(usages) == 1 == sum(delta.finish is not None for delta in deltas), name
            assert usages[0].completion_tokens == len(answer) == sum(len(delta.token_ids) for delta in deltas)
            assert usages[0].prompt_tokens == len(prompt) == stream.prompt_tokens
            assert usages[0].cached_prompt_tokens == 3
            unary = await client.chat([{"role": "user", "content": "Hi"}])
            assert unary.usage == usages[0]


async def test_D15_continuous_usage_counts_up(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.StreamGenerateRequest(request=generation_pb2.GenerateRequest(text="x"), continuous_usage=True)
        messages = [message async for message in stub.StreamGenerate(request)]
    received = 0
    for message in messages:
        received += len(message.deltas[0].token_ids)
        assert message.usage.completion_tokens == received
    assert received > 1


async def test_eos_is_in_the_ids_but_its_text_is_not_in_the_text(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request: [*tokenizer.encode("ab"), EOS, 99], eos=EOS)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        result = await client.generate("x", skip_special_tokens=False)
        shown = await client.generate("x", skip_special_tokens=False, include_stop_in_output=True)
        ignored = await client.generate("x", ignore_eos=True, skip_special_tokens=False, max_tokens=2)
    assert (result.text, result.token_ids[-1], result.finish) == ("ab", EOS, Finish("stop", eos_token_id=EOS))
    assert shown.text == "ab<|im_end|>"
    assert (ignored.text, ignored.finish.reason) == ("ab<|im_end|>", "length")


async def test_B10_a_stop_string_across_tokens_never_shows_its_beginning(client: AsyncClient, engine: FakeEngine) -> None:
    engine.step_s = 0.001  # so that the engine has not ended by itself when the string is found
    async with client.stream("x", stop=["own f"]) as stream:
        deltas = [delta async for delta in stream]
    unary = await client.generate("x", stop=["own f"])
    assert "".join(delta.text for delta in deltas) == unary.text == "The quick br"
    assert deltas[-1].finish == unary.finish == Finish("stop", stop_string="own f")
    assert unary.timing.queue == 0.25  # the engine was asked for it although it did not end the request
    assert engine.live == {}
    assert (await client.generate("x", stop="own fox", include_stop_in_output=True)).text == FOX


async def test_token_ids_alone_can_be_asked_for(client: AsyncClient, tokenizer: Tokenizer) -> None:
    result = await client.generate("x", text=False)
    assert (result.text, result.token_ids) == ("", tokenizer.encode(FOX))
    assert (await client.generate("x", text=False, stop="brown")).finish.stop_string == "brown"


async def test_token_prompts_are_used_as_they_are(client: AsyncClient, engine: FakeEngine) -> None:
    await client.generate([5, 6, 7, 8])
    await client.generate([5, 6, 7, 8], truncate_prompt_tokens=2)
    assert [request.prompt_token_ids for request in engine.requests] == [(5, 6, 7, 8), (7, 8)]


async def test_every_sampling_field_reaches_the_engine(client: AsyncClient, engine: FakeEngine) -> None:
    await client.generate(
        "x", temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        seed=2**64 - 1, logit_bias={3: -2.0}, allowed_token_ids=[4, 5], max_tokens=9, min_tokens=2, stop_token_ids=[8],
        ignore_eos=True, logprobs=True, cache_salt="tenant", prefix_cache=False, priority=-3, n=2, best_of=3,
    )  # fmt: skip
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 7, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (sampling.seed, sampling.logit_bias, sampling.allowed_token_ids) == (2**64 - 1, {3: -2.0}, (4, 5))
    assert (request.max_tokens, request.min_tokens, request.stop_token_ids, request.ignore_eos) == (9, 2, (8,), True)
    assert (sampling.n, sampling.best_of, sampling.beam_width) == (2, 3, 1)
    assert (request.logprobs, request.cache_salt, request.prefix_cache) == (True, "tenant", False)
    assert (request.deadline, request.priority) == (None, -3)
    await client.generate("x", beam_width=3, n=2, length_penalty=-0.5, early_stopping="never")
    beams = engine.requests[1].sampling
    assert (beams.beam_width, beams.n, beams.length_penalty, beams.early_stopping) == (3, 2, -0.5, EarlyStopping.NEVER)
    assert (engine.requests[1].cache_salt, engine.requests[1].prefix_cache) == ("", True)


async def test_the_tenant_of_the_metadata_reaches_the_engine_and_is_checked(address: str, engine: FakeEngine) -> None:
    async with AsyncClient(address, tenant="team-a") as client:
        await client.generate("x")
        async with client.stream("x") as stream:
            async for _ in stream:
                pass
    async with AsyncClient(address) as client:
        await client.generate("x")
    assert [request.tenant for request in engine.requests] == ["team-a", "team-a", ""]
    async with AsyncClient(address, tenant="x" * 65) as client:
        with pytest.raises(TwinplaneError) as caught:
            await client.generate("x")
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "x-twinplane-tenant")


async def test_the_model_can_be_named_by_alias_and_no_other_name(client: AsyncClient) -> None:
    assert (await client.generate("x", model="alias")).model == "tiny"
    with pytest.raises(TwinplaneError) as caught:
        await client.generate("x", model="other" * 100_000)
    assert (caught.value.code, caught.value.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert "tiny, alias" in caught.value.message


async def test_cancel_ends_the_stream_with_a_message(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request: [10] * 1000, step_s=0.005)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        stream = client.stream("x", request_id="mine")
        first = await anext(aiter(stream))
        assert await client.cancel("mine", "not-live") == ["mine"]
        result = await stream.result()
        assert (result.finish, len(first.token_ids) > 0) == (Finish("cancelled"), True)
        assert result.usage.completion_tokens == len(result.token_ids) < 1000
        assert engine.live == {}


async def test_D13_the_second_of_two_equal_ids_is_refused_and_the_first_goes_on() -> None:
    engine = FakeEngine(lambda request: [10] * 20, step_s=0.01)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        first = client.stream("x", request_id="same")
        await anext(aiter(first))
        with pytest.raises(TwinplaneError) as caught:
            await client.generate("y", request_id="same")
        assert (caught.value.code, caught.value.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        first.cancel()
        while engine.live:
            await client.load()
        assert (await client.generate("y", request_id="same")).request_id == "same"


async def test_D13_ids_are_checked_echoed_and_made_up_when_missing(address: str, client: AsyncClient) -> None:
    for bad in ("a b", "a\nb", "é", "x" * 129, "x" * 1_000_000):
        with pytest.raises(TwinplaneError) as caught:
            await client.generate("x", request_id=bad)
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "request_id")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=(("x-request-id", "from-header"),))
        assert (await call).request_id == dict(await call.initial_metadata())["x-request-id"] == "from-header"
        call = stub.Generate(generation_pb2.GenerateRequest(text="x", request_id="field"), metadata=(("x-request-id", "header"),))
        assert (await call).request_id == dict(await call.initial_metadata())["x-request-id"] == "field"
        call = stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=(("x-request-id", "y" * 129),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len({(await client.generate("x")).request_id for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "wire",
    [
        b"\x1a\x02\xff\xfe",  # text (field 3) that is no UTF-8
        b"\x12\x01\xc3\x1a\x01x",  # model: half a character
        b"\x0a\x02\xed\xa0\x1a\x01x",  # request_id: a surrogate
        b"\x1a\x7fx",  # length beyond the end
        b"\xff",
    ],
)
async def test_D10_bytes_that_are_no_utf8_or_no_protobuf_are_the_clients_fault(address: str, wire: bytes) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for method in ("Generate", "StreamGenerate"):
            framed = wire if method == "Generate" else b"\x0a" + bytes([len(wire)]) + wire
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/twinplane.v1.GenerationService/{method}")(framed)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert (await stub.Generate(generation_pb2.GenerateRequest(text="\0 \ufeff e\u0301\u0302"))).sequences[0].text == FOX


async def test_B06_fields_the_server_does_not_know_are_refused_by_path(address: str) -> None:
    request = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(top_k=1))
    request.sampling.MergeFromString(b"\xa0\x06\x01")  # field 100
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling" in caught.value.details()
    assert "100" in caught.value.details()
    assert "not supported" in caught.value.details()


async def test_B06_a_list_of_nonsense_disturbs_no_stream_beside_it() -> None:
    engine = FakeEngine(lambda request: [10] * 100, step_s=0.002)
    nonsense: list[dict[str, Any]] = [
        *({"temperature": value} for value in (-1, 1e9, math.nan, math.inf)),
        {"top_p": -1},
        {"repetition_penalty": 0},
        {"presence_penalty": 100},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": ["x"] * 10_000},
        {"stop": [""]},
        {"logit_bias": {512: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"stop_token_ids": [512]},
        {"max_tokens": 0},
    ]
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        beside = client.stream("x")
        await anext(aiter(beside))
        for options in nonsense:
            with pytest.raises(TwinplaneError) as caught:
                await client.generate("x", **options)
            assert caught.value.code == "INVALID_ARGUMENT", options
            name = next(iter(options))
            assert caught.value.field is not None
            assert name in caught.value.field
        assert len((await beside.result()).token_ids) == 100


@pytest.mark.parametrize("prompt", ["", [], Chat([])])
async def test_A23_an_empty_prompt_is_refused_and_the_server_goes_on(client: AsyncClient, prompt: Any) -> None:
    with pytest.raises(TwinplaneError) as caught:
        await client.generate(prompt)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert (await client.generate("x")).text == FOX


async def test_A23_neither_text_nor_ids_is_refused(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text, tokens or chat" in caught.value.details()


@pytest.mark.parametrize("excess", [-2, -1, 0, 1, 100])
async def test_A22_prompts_around_the_context_limit(client: AsyncClient, engine: FakeEngine, excess: int) -> None:
    prompt = [10] * (engine.max_model_len + excess)
    if excess < 0:
        result = await client.generate(prompt)
        assert (result.usage.completion_tokens, result.finish.reason) == (-excess, "length")
    else:
        with pytest.raises(TwinplaneError) as caught:
            await client.generate(prompt)
        assert (caught.value.code, caught.value.reason, caught.value.field) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "tokens")
        assert str(len(prompt)) in caught.value.message
        assert str(engine.max_model_len) in caught.value.message
    assert (await client.generate("x")).text == FOX


async def test_A22_a_chat_that_its_template_pushes_over_the_limit_is_refused(client: AsyncClient, engine: FakeEngine) -> None:
    engine.max_model_len = 20
    with pytest.raises(TwinplaneError, match="PROMPT_TOO_LONG"):
        await client.chat([{"role": "user", "content": "123456789"}])


async def test_a_bug_is_reported_as_internal_with_the_request_id_and_no_trace(address: str, engine: FakeEngine) -> None:
    def bug(request: object) -> list[int]:
        raise RowFailedError("logits are not finite")

    engine.answer = bug
    async with AsyncClient(address) as client:
        with pytest.raises(TwinplaneError) as caught:
            await client.generate("x", request_id="r1")
        assert (caught.value.code, caught.value.reason, caught.value.request_id) == ("INTERNAL", "LOGITS_NOT_FINITE", "r1")
        engine.load = lambda: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(TwinplaneError) as caught:
            await client.load()
    assert caught.value.code == "INTERNAL"
    assert caught.value.request_id in caught.value.message
    assert "division" not in caught.value.message


async def test_one_line_is_logged_per_request_and_never_its_text(client: AsyncClient) -> None:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        result = await client.generate("secret words", request_id="r2")
        with pytest.raises(TwinplaneError):
            await client.generate("secret words", temperature=-1)
    (line,) = [entry for entry in logs if entry["event"] == "request_finished"]
    assert (line["request_id"], line["outcome"]) == ("r2", "length")
    assert line["completion_tokens"] == result.usage.completion_tokens
    assert "secret" not in json.dumps(logs, default=str)
    assert "fox" not in json.dumps(logs, default=str)


async def test_trace_context_is_bound_to_the_logs(address: str) -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=(("traceparent", f"00-{trace}-{span}-01"),))
    (line,) = [entry for entry in logs if entry["event"] == "request_finished"]
    assert (line["trace_id"], line["span_id"]) == (trace, span)

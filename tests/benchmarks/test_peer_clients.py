"""The clients of other engines, against a server that sends what those engines send."""

from __future__ import annotations

import asyncio
import json

import fake_http
import pytest
from twinplane.benchmarks.load import Request
from twinplane.benchmarks.peers import llama_cpp, openvino, sse, vllm


async def collect(port: int) -> list[dict[str, object]]:
    return [event async for event in sse.stream(port, "/path", {"question": 1})]


async def test_events_arrive_whole_however_the_answer_is_cut():
    whole = b"".join(fake_http.events({"a": 1}, {"text": "é€"}, {"b": 2}, "[DONE]"))
    for size in (1, 2, 3, 7, len(whole)):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        async with fake_http.serving(fake_http.chunked(pieces)) as server:
            assert await collect(server.port) == [{"a": 1}, {"text": "é€"}, {"b": 2}]
        assert server.requests == [{"question": 1}] and server.paths == ["/path"]


async def test_an_answer_without_chunks_ends_with_its_connection():
    async with fake_http.serving(fake_http.events({"a": 1}, {"b": 2}), head="HTTP/1.1 200 OK\r\n\r\n") as server:
        assert await collect(server.port) == [{"a": 1}, {"b": 2}]


async def test_comments_and_other_fields_are_no_events_and_lines_of_data_are_joined():
    stream = b': ping\r\n\r\nevent: x\r\ndata: {"a":\r\ndata: 1}\r\n\r\n\r\ndata:{"b": 2}\n\n'
    async with fake_http.serving(fake_http.chunked([stream])) as server:
        assert await collect(server.port) == [{"a": 1}, {"b": 2}]


async def test_a_refusal_is_reported_with_its_words():
    refusal = [b"the prompt is too long"]
    async with fake_http.serving(refusal, head="HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        with pytest.raises(sse.HttpError, match="HTTP 400: the prompt is too long"):
            await collect(server.port)


async def test_an_answer_that_breaks_off_is_an_error():
    async with fake_http.serving(fake_http.chunked(fake_http.events({"a": 1}))[:-1]) as server:
        with pytest.raises(sse.HttpError, match="in the middle of its answer"):
            await collect(server.port)


def llama_event(count: int, *tokens: int, index: int = 0, **rest: object) -> dict[str, object]:
    return {"index": index, "content": "x", "tokens": list(tokens), "stop": False, "tokens_predicted": count, **rest}


async def test_llama_cpp_tokens_are_counted_also_where_their_text_was_held_back():
    answer = fake_http.events(
        llama_event(1),  # opens the stream: no token was sent yet
        llama_event(1, 11),
        llama_event(4, 14),  # the text of two tokens before was no whole character
        {"index": 0, "stop": True, "tokens_predicted": 5, "timings": {"cache_n": 96}},
    )
    async with fake_http.serving(fake_http.chunked(answer)) as server:
        outcome = await llama_cpp.generate(server.port, Request((7, 8, 9), 5))
    assert (outcome.error, outcome.generated, outcome.counts, outcome.cached_tokens) == ("", 5, [1, 3, 1], 96)
    assert len(outcome.gaps) == 2 and outcome.first_token > 0
    (asked,) = server.requests
    assert (asked["prompt"], asked["n_predict"], asked["ignore_eos"], asked["temperature"]) == ([7, 8, 9], 5, True, 0.0)


async def test_llama_cpp_samples_are_counted_each_for_itself():
    answer = fake_http.events(
        *(llama_event(count, 5, index=index) for count in (1, 2) for index in (0, 1)),
        *({"index": index, "stop": True, "tokens_predicted": 2} for index in (0, 1)),
    )
    async with fake_http.serving(fake_http.chunked(answer)) as server:
        outcome = await llama_cpp.generate(server.port, Request((7,), 2, samples=2))
    assert outcome.error == "" and outcome.generated == 4
    assert server.requests[0]["n_cmpl"] == 2


async def test_openai_chunks_bring_token_ids_and_usage():
    answer = fake_http.events(
        {"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]},
        {"choices": [{"index": 0, "text": "b", "token_ids": [7]}]},
        {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}},
        "[DONE]",
    )
    async with fake_http.serving(fake_http.chunked(answer)) as server:
        outcome = await vllm.generate(server.port, Request((1, 2), 3))
    assert (outcome.tokens, outcome.counts, outcome.cached_tokens, outcome.error) == ([5, 6, 7], [2, 1], 32, "")
    assert server.paths == ["/v1/completions"] and server.requests[0]["ignore_eos"] is True


@pytest.mark.parametrize("generate", [llama_cpp.generate, vllm.generate])
async def test_an_error_within_the_stream_ends_the_request(generate):
    async with fake_http.serving(fake_http.chunked(fake_http.events({"error": {"message": "out of slots"}}))) as server:
        outcome = await generate(server.port, Request((1,), 3))
    assert "out of slots" in outcome.error and outcome.generated == 0


async def test_nobody_listening_is_an_error_of_the_request():
    async with fake_http.serving([]) as server:
        port = server.port
    outcome = await llama_cpp.generate(port, Request((1,), 3))
    assert "Error" in outcome.error


async def test_a_cancelled_request_closes_its_connection():
    async with fake_http.serving(fake_http.chunked(fake_http.events(llama_event(1, 5)))[:-1], hold=True) as server:
        request = asyncio.create_task(llama_cpp.generate(server.port, Request((1,), 3)))
        while not server.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        while not server.left_early:
            await asyncio.sleep(0.01)


async def test_openvino_worker_lines_are_read_to_the_end():
    asked: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(await reader.readline()))
        writer.write(b'{"tokens": [5]}\n{"tokens": [6, 7]}\n{"done": true}\n')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        outcome = await openvino.generate(server.sockets[0].getsockname()[1], Request((1, 2), 3))
    assert (outcome.tokens, outcome.counts, outcome.error) == ([5, 6, 7], [1, 2], "")
    assert asked == [{"prompt": [1, 2], "max_tokens": 3, "samples": 1, "top_k": 40}]

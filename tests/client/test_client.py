"""Both clients against a real server: results, streams, cancelling, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from twinplane.client import AsyncClient, Chat, Client, Delta, Finish, RetryPolicy, TwinplaneError

LIVENESS_S = 10.0


def test_generate_returns_everything_typed(served: Any) -> None:
    with Client(served.target) as client:
        result = client.generate("Hi", logprobs=True, max_tokens=5, request_id="r1", echo_prompt_tokens=True)
    assert (len(result.token_ids), len(result.logprobs), len(result.ranks)) == (5, 5, 5)
    assert (result.finish, result.request_id, result.model) == (Finish("length"), "r1", "tiny")
    assert (result.usage.completion_tokens, result.usage.prompt_tokens) == (5, len(result.prompt_token_ids))
    assert (result.timing.queue, result.timing.preemptions) == (0.25, 2)
    assert abs(result.timing.receive_time - time.time()) < 3600
    assert result.system_fingerprint == "f00d"


def test_a_stream_is_an_iterator_of_deltas_with_a_result_at_the_end(served: Any) -> None:
    with Client(served.target) as client, client.stream("Hi") as stream:
        first = next(stream)
        assert isinstance(first, Delta)
        assert (stream.model, stream.prompt_tokens, len(stream.request_id)) == ("tiny", 2, 32)
        result = stream.result()
    assert result.token_ids == client_free_reference(served)
    assert result.text.startswith(first.text)


def client_free_reference(served: Any) -> list[int]:
    return list(served.engine.answer(None))


def test_several_sequences_are_typed_and_a_streams_deltas_name_theirs(served: Any) -> None:
    served.engine.answers = [[40, 41], [50, 51, 52]]
    with Client(served.target) as client:
        whole = client.generate("Hi", n=2)
        with client.stream("Hi", n=2) as stream:
            deltas = list(stream)
            streamed = stream.result()
        beams = client.generate("Hi", beam_width=2, early_stopping="first")
        with pytest.raises(ValueError, match="heuristic"):
            client.generate("Hi", beam_width=2, early_stopping="soon")  # type: ignore[arg-type]
        client.reset_prefix_cache()
    for result in (whole, streamed):
        assert [(s.index, s.token_ids, s.score) for s in result.sequences] == [(0, [40, 41], None), (1, [50, 51, 52], None)]
        assert (result.token_ids, result.text) == ([40, 41], result.sequences[0].text)
    by_index = {index: [t for delta in deltas if delta.index == index for t in delta.token_ids] for index in (0, 1)}
    assert by_index == {0: [40, 41], 1: [50, 51, 52]}
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [s.score for s in beams.sequences] == [-0.5, -1.5]
    assert served.engine.resets == 1


def test_leaving_the_block_cancels_what_was_not_read(served: Any) -> None:
    served.engine.answer = lambda request: [10] * 2000
    with Client(served.target) as client:
        with client.stream("Hi") as stream:
            next(stream)
        assert list(stream) == []
        with pytest.raises(ValueError, match="no result"):
            stream.result()
        deadline = time.monotonic() + LIVENESS_S
        while served.engine.live and time.monotonic() < deadline:
            time.sleep(0.01)
    assert served.engine.live == {}


def test_a_stream_can_be_cancelled_from_another_thread(served: Any) -> None:
    served.engine.answer = lambda request: [10] * 2000
    with Client(served.target) as client:
        stream = client.stream("Hi")
        threading.Timer(0.2, stream.cancel).start()
        assert 0 < sum(len(delta.token_ids) for delta in stream) < 2000


def test_chat_tokenize_detokenize_models_info_load_and_health(served: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with Client(served.target) as client:
        ids = client.tokenize(Chat(messages))
        assert client.chat(messages).usage.prompt_tokens == len(ids) == client.generate(ids).usage.prompt_tokens
        assert client.detokenize(client.tokenize("Ünï")) == "Ünï"
        assert client.detokenize(ids, skip_special_tokens=False).startswith("<|im_start|>user\nHi")
        assert client.models()[0].name == "tiny"
        assert client.server_info().device == "cpu"
        load = client.load()
        assert (load.total_kv_blocks, load.cached_kv_blocks, load.prefix_cache_hit_rate) == (256, 3, 0.25)
        assert (client.is_alive(), client.is_ready()) == (True, True)
        assert client.cancel("nobody") == []
        assert client.chat(Chat(messages, continue_final_message=True)).usage.prompt_tokens < len(ids)


def test_tool_calls_and_template_arguments_travel(served: Any) -> None:
    chat = Chat(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], "name": None}],
        tools=[{"type": "function"}],
        template_arguments={"enable_thinking": False},
    )
    with Client(served.target) as client:
        assert client.tokenize(chat)
        with pytest.raises(ValueError, match="role, content, name"):
            client.tokenize(Chat([{"role": "user", "content": "x", "colour": "blue"}]))


def test_errors_carry_code_reason_and_field(served: Any) -> None:
    with Client(served.target) as client:
        with pytest.raises(TwinplaneError) as caught:
            client.generate("Hi", temperature=-1, request_id="bad")
        error = caught.value
        assert (error.code, error.reason, error.field, error.retryable) == (
            "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.temperature", False,
        )  # fmt: skip
        assert error.request_id == "bad"
        assert str(error).startswith("INVALID_ARGUMENT (INVALID_REQUEST): sampling.temperature is -1")
        with pytest.raises(TwinplaneError, match="INVALID_ARGUMENT"):
            next(client.stream("Hi", top_p=2))


def test_mistakes_that_need_no_server_are_found_here() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="temprature"):
            client.generate("Hi", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"range|negative"):
            client.generate("Hi", max_tokens=-1)


def test_the_timeout_is_the_servers_deadline(served: Any) -> None:
    served.engine.answer = lambda request: [10] * 2000
    with Client(served.target) as client:
        with pytest.raises(TwinplaneError, match="DEADLINE_EXCEEDED"):
            client.generate("Hi", timeout=0.3)
        with pytest.raises(TwinplaneError, match="DEADLINE_EXCEEDED"):
            list(client.stream("Hi", timeout=0.3))


def test_a_server_that_is_not_there_is_unavailable_and_not_alive() -> None:
    with Client("127.0.0.1:1", retry=RetryPolicy(attempts=2, base=0.01)) as client:
        assert (client.is_alive(timeout=1), client.is_ready(timeout=1)) == (False, False)
        with pytest.raises(TwinplaneError) as caught:
            client.generate("Hi")
        assert (caught.value.code, caught.value.reason, caught.value.retryable) == ("UNAVAILABLE", "", True)


async def test_the_async_client_gives_the_same_results(served: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with Client(served.target) as blocking:
        async with AsyncClient(served.target) as client:
            mine, theirs = await client.chat(messages, max_tokens=7), blocking.chat(messages, max_tokens=7)
            assert (mine.text, mine.token_ids, mine.usage) == (theirs.text, theirs.token_ids, theirs.usage)
            async with client.stream("Hi") as stream:
                tokens = [token async for delta in stream for token in delta.token_ids]
            assert tokens == blocking.stream("Hi").result().token_ids
            async with client.stream("Hi", n=3) as stream:
                assert {delta.index async for delta in stream} == {0, 1, 2}
                assert (await stream.result()).sequences == blocking.generate("Hi", n=3).sequences
            assert await client.models() == blocking.models()
            assert await client.server_info() == blocking.server_info()
            assert await client.detokenize(await client.tokenize("x")) == "x"
            assert await client.is_alive()
            assert await client.is_ready()


async def test_an_async_stream_ends_when_cancelled_and_a_cancelled_task_stays_cancelled(served: Any) -> None:
    served.engine.answer = lambda request: [10] * 2000
    async with AsyncClient(served.target) as client:
        stream = client.stream("Hi")
        await anext(stream)
        stream.cancel()
        assert [delta async for delta in stream] == []
        task = asyncio.create_task(client.stream("Hi").result())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(LIVENESS_S):
            while served.engine.live:
                await asyncio.sleep(0.01)


async def test_many_streams_share_one_channel(served: Any) -> None:
    async with AsyncClient(served.target) as client:
        results = await asyncio.gather(*(client.stream("Hi").result() for _ in range(64)))
    assert {tuple(result.token_ids) for result in results} == {tuple(client_free_reference(served))}
    assert len({result.request_id for result in results}) == 64

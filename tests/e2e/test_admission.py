"""What a full, late or impossible request meets on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from twinplane.benchmarks.load import Request, closed_loop
from twinplane.benchmarks.server import Server
from twinplane.client import AsyncClient, Client, RetryPolicy, TwinplaneError

pytestmark = [pytest.mark.model, pytest.mark.slow]

BLOCK_BYTES = 16 * 46080  # 16 tokens x 2 x 30 layers x 3 heads x 64 x 4 bytes
BLOCKS = 40
ONCE = RetryPolicy(attempts=1)
Prompts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def narrow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two sequences at once, three in the queue, 640 tokens of KV."""
    options = ["--max-num-seqs", "2", "--max-waiting-requests", "3", "--kv-cache-bytes", str(BLOCKS * BLOCK_BYTES)]
    with Server(model, *options, log=tmp_path_factory.mktemp("narrow") / "server.log") as server:
        yield server


def at_rest(server: Server) -> bool:
    with Client(server.address) as client:
        load = client.load()
        return load.running_requests == load.waiting_requests == load.used_kv_blocks == 0


def wait_at_rest(server: Server) -> None:
    deadline = time.monotonic() + 10
    while not at_rest(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def running(client: AsyncClient, requests: int) -> None:
    while (await client.load()).running_requests < requests:
        await asyncio.sleep(0.01)


def test_A01_a_prompt_larger_than_the_pool_is_refused_with_the_numbers_and_others_are_served(narrow: Server, prompts: Prompts) -> None:
    with Client(narrow.address) as client:
        with pytest.raises(TwinplaneError) as refused:
            client.generate(list(prompts[-1]) + list(prompts[-2]), max_tokens=4, temperature=0.0)  # 1,112 tokens
        assert refused.value.code == "INVALID_ARGUMENT"
        assert "1112" in str(refused.value) and "640" in str(refused.value)
        assert len(client.generate(list(prompts[6]), max_tokens=4, temperature=0.0, ignore_eos=True).token_ids) == 4


def test_A02_a_request_that_would_outgrow_the_pool_ends_at_its_size(narrow: Server, prompts: Prompts) -> None:
    with Client(narrow.address) as client:
        result = client.generate(list(prompts[-1])[:600], temperature=0.0, ignore_eos=True)
    assert result.finish.reason == "length"
    assert len(result.token_ids) == BLOCKS * 16 - 600
    assert result.timing.preemptions <= 2


def test_A24_without_a_limit_each_request_ends_at_the_context_length_and_the_queue_moves(narrow: Server, prompts: Prompts) -> None:
    outcomes, _ = asyncio.run(closed_loop(narrow.address, [Request(prompts[28][:560], 80) for _ in range(4)], 4))
    assert [len(outcome.tokens) for outcome in outcomes] == [80] * 4


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(narrow: Server, prompts: Prompts) -> None:
    async with AsyncClient(narrow.address, retry=ONCE) as client:

        async def ask() -> TwinplaneError | int:
            try:
                result = await client.generate(list(prompts[6]), max_tokens=60, temperature=0.0, ignore_eos=True)
                return len(result.token_ids)
            except TwinplaneError as error:
                return error

        answers = await asyncio.gather(*(ask() for _ in range(12)))
    refused = [answer for answer in answers if isinstance(answer, TwinplaneError)]
    assert refused and all(error.code == "RESOURCE_EXHAUSTED" and error.reason == "QUEUE_FULL" for error in refused)
    assert all(error.retry_delay for error in refused)
    assert [answer for answer in answers if answer not in refused] == [60] * (12 - len(refused))
    await asyncio.to_thread(wait_at_rest, narrow)


async def test_D04_deadlines_end_waiting_and_running_requests(narrow: Server, prompts: Prompts) -> None:
    async with AsyncClient(narrow.address, retry=ONCE) as client:
        long = [
            asyncio.ensure_future(client.generate(list(prompts[6]), max_tokens=300, temperature=0.0, ignore_eos=True)) for _ in range(2)
        ]
        await running(client, 2)
        before = (await client.load()).scheduler_steps
        for _ in range(3):
            with pytest.raises(TwinplaneError) as late:
                await client.generate(list(prompts[6]), max_tokens=100, ignore_eos=True, timeout=0.2)
            assert late.value.code == "DEADLINE_EXCEEDED"
        assert (await client.load()).scheduler_steps > before
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        started = time.monotonic()
        with pytest.raises(TwinplaneError) as late:
            await client.generate(list(prompts[6]), max_tokens=500, ignore_eos=True, timeout=1.0)
        assert late.value.code == "DEADLINE_EXCEEDED" and time.monotonic() - started < 3
    await asyncio.to_thread(wait_at_rest, narrow)


async def test_D13_a_live_request_id_is_refused_and_free_again_afterwards(narrow: Server, prompts: Prompts) -> None:
    async with AsyncClient(narrow.address, retry=ONCE) as client:
        first = asyncio.ensure_future(client.generate(list(prompts[6]), request_id="same", max_tokens=300, ignore_eos=True))
        await running(client, 1)
        with pytest.raises(TwinplaneError) as refused:
            await client.generate(list(prompts[6]), request_id="same", max_tokens=5)
        assert refused.value.code == "ALREADY_EXISTS"
        assert await client.cancel("same") == ["same"]
        assert (await first).finish.reason == "cancelled"
        assert len((await client.generate(list(prompts[6]), request_id="same", max_tokens=5, ignore_eos=True)).token_ids) == 5


def test_B01_a_seeded_answer_does_not_depend_on_its_neighbours(server: Server, prompts: Prompts) -> None:
    asked = {"temperature": 0.8, "top_p": 0.95, "seed": 42, "max_tokens": 24, "ignore_eos": True, "logprobs": True}

    async def crowd(neighbours: int) -> tuple[list[int], list[float]]:
        async with AsyncClient(server.address) as client:
            others = [asyncio.ensure_future(client.generate(list(p), seed=i, max_tokens=8 + i)) for i, p in enumerate(prompts[:neighbours])]
            result = await client.generate("The weather today is", **asked)  # type: ignore[arg-type]
            await asyncio.gather(*others)
            return result.token_ids, result.logprobs

    alone = asyncio.run(crowd(0))
    assert len(alone[0]) == len(alone[1]) == 24
    assert asyncio.run(crowd(1)) == alone
    assert asyncio.run(crowd(7)) == alone

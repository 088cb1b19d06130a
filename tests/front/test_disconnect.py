"""Clients that go away, run out of time, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest
import structlog
from fake_engine import FakeEngine
from front_support import serving
from twinplane.client import AsyncClient, RetryPolicy, TwinplaneError
from twinplane.v1 import generation_pb2, generation_pb2_grpc

LIVENESS_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not condition():
            await asyncio.sleep(0.005)


def endless(**options: object) -> FakeEngine:
    return FakeEngine(lambda request: [10] * 2000, step_s=0.002, **options)  # type: ignore[arg-type]


async def test_D01_a_cancelled_stream_ends_in_the_engine() -> None:
    engine = endless()
    with structlog.testing.capture_logs() as logs:
        async with serving(engine) as (target, _), AsyncClient(target) as client:
            stream = client.stream("x")
            await anext(aiter(stream))
            stream.cancel()
            await until(lambda: not engine.live)
    assert len(engine.closed) == 1
    assert [entry["outcome"] for entry in logs if entry["event"] == "request_finished"] == ["disconnected"]


async def test_D01_a_cancelled_unary_call_ends_in_the_engine() -> None:
    engine = endless()
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        call = asyncio.create_task(client.generate("x"))
        await until(lambda: bool(engine.live))
        call.cancel()
        await until(lambda: not engine.live)
        assert len(engine.closed) == 1


async def test_D01_a_closed_channel_ends_its_requests_in_the_engine() -> None:
    engine = endless()
    async with serving(engine) as (target, _):
        client = AsyncClient(target)
        calls = [client.stream("x") for _ in range(3)]
        for call in calls:
            await anext(aiter(call))
        await client.close()
        await until(lambda: not engine.live)
        assert len(engine.closed) == 3


@pytest.mark.parametrize("kind", ["stream", "generate"])
async def test_D01_a_killed_client_process_ends_its_request_in_the_engine(kind: str) -> None:
    engine = endless()
    async with serving(engine) as (target, _):
        program = (
            "import sys; from twinplane.client import Client\n"
            f"call = Client(sys.argv[1]).{kind}('x')\n"
            "for _ in call: pass"
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, target, stderr=subprocess.DEVNULL)
        await until(lambda: bool(engine.live))
        process.kill()
        await process.wait()
        await until(lambda: not engine.live)
        assert len(engine.closed) == 1


async def test_D02_disconnects_at_random_moments_leave_nothing_behind() -> None:
    engine = FakeEngine(lambda request: [10] * 20, step_s=0.001)
    rng = random.Random(2)
    with structlog.testing.capture_logs() as logs:
        async with serving(engine) as (target, _), AsyncClient(target) as client, AsyncClient(target) as probe:

            async def leave_at_random() -> None:
                stream = client.stream("x", stop="never")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 0.04)):
                        await stream.result()
                stream.cancel()

            gate = asyncio.Semaphore(20)

            async def limited() -> None:
                async with gate:
                    await leave_at_random()

            leaving = [asyncio.create_task(limited()) for _ in range(300)]
            while not all(task.done() for task in leaving):
                assert len((await probe.generate("probe", timeout=LIVENESS_S)).token_ids) == 20
            await asyncio.gather(*leaving)
            await until(lambda: not engine.live)
    assert [entry for entry in logs if entry["log_level"] in ("error", "warning", "critical")] == []


async def test_D04_expired_requests_are_never_scheduled_and_a_running_one_is_stopped() -> None:
    engine = FakeEngine(lambda request: [10] * 2000, step_s=0.002, slots=1)
    async with serving(engine) as (target, _), AsyncClient(target, retry=RetryPolicy(attempts=1)) as client:
        running = asyncio.create_task(client.generate("x", request_id="running", timeout=1.0))
        await until(lambda: engine.scheduled == ["running"])
        behind = await asyncio.gather(*(client.generate("x", timeout=0.3) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(error, TwinplaneError) and error.code == "DEADLINE_EXCEEDED" for error in behind)
        with pytest.raises(TwinplaneError, match="DEADLINE_EXCEEDED"):
            await running
        await until(lambda: not engine.live)
        assert engine.scheduled == ["running"]


async def test_D04_the_grpc_deadline_becomes_the_engines() -> None:
    engine = FakeEngine()
    loop = asyncio.get_running_loop()
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        before = loop.time()
        await client.generate("x", timeout=30.0)
        await client.generate("x")
        await client.generate("x", timeout=1e9)
    first, second, third = (request.deadline for request in engine.requests)
    assert first is not None
    # The header `grpc-timeout` holds so many digits of the time that is left, rounded up: 30.0 s may arrive as 30.1.
    assert before + 25 < first <= loop.time() + 30.1
    assert second is None
    assert third is None  # a year and more is as good as none


async def test_D08_a_reader_that_stops_gets_everything_later_in_order_and_holds_back_nobody() -> None:
    answer = [index % 256 + 3 for index in range(1900)]
    engine = FakeEngine(lambda request: answer, step_s=0.0005)
    async with serving(engine) as (target, _), AsyncClient(target) as other:
        # A small window, so that flow control acts after a few messages rather than after 64 KiB.
        window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(target, options=window) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(text="x" * 10, output=generation_pb2.OutputParams(logprobs=True))
            call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request))
            messages = [await call.read()]
            await until(lambda: any(live.produced == len(answer) for live in engine.live.values()) or not engine.live)
            assert len((await other.generate("y")).token_ids) == len(answer)
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
    received = [token for message in messages for token in message.deltas[0].token_ids]
    assert received == answer
    assert len([value for message in messages for value in message.deltas[0].logprobs.values]) == len(answer)
    assert len(messages) < len(answer)  # what piled up was merged: never one message per token behind a slow reader
    assert engine.most_pending <= len(answer)

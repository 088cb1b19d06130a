"""The server around the services: health, limits, addresses, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from front_support import serving, tiny_model
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from twinplane.client import AsyncClient, RetryPolicy, TwinplaneError
from twinplane.control_plane.grpc_server.server import BindError, GrpcServer
from twinplane.control_plane.types import EngineState
from twinplane.v1 import generation_pb2, generation_pb2_grpc

READY = "twinplane.v1.GenerationService"
LIVENESS_S = 10.0
_Status = health_pb2.HealthCheckResponse


async def check(target: str, service: str) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_D12_alive_from_the_start_ready_only_when_a_request_would_be_served() -> None:
    engine = FakeEngine()
    engine.set_state(EngineState.WAITING)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        for state in EngineState:
            engine.set_state(state)
            await asyncio.sleep(0.02)
            assert await check(target, "") == await check(target, "liveness") == _Status.SERVING
            assert await client.is_alive()
            assert await client.is_ready() is (state is EngineState.READY)
            assert (await client.server_info()).state == state.value
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(target, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def watched(target: str, service: str) -> AsyncIterator[int]:
    async with grpc.aio.insecure_channel(target) as channel:
        async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
            yield int(response.status)


async def test_D12_watch_delivers_each_transition_and_ends_at_stop_without_holding_it_up() -> None:
    engine = FakeEngine()
    engine.set_state(EngineState.LOADING)
    server = GrpcServer(engine, tiny_model())
    target = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    seen: list[int] = []
    watch = watched(target, READY)
    async with asyncio.timeout(LIVENESS_S):
        for state in (EngineState.LOADING, EngineState.READY, EngineState.STALLED, EngineState.READY):
            engine.set_state(state)
            seen.append(await anext(watch))
        unknown = watched(target, "nobody")
        assert await anext(unknown) == _Status.SERVICE_UNKNOWN
        started = time.monotonic()
        await server.stop(grace=60.0)
        assert time.monotonic() - started < 30.0  # an open Watch would take the whole grace
        seen += [status async for status in watch]
    down, up = _Status.NOT_SERVING, _Status.SERVING
    assert seen == [down, up, down, up, down]


async def test_a_withdrawn_server_is_not_ready_and_still_serves() -> None:
    engine = FakeEngine()
    async with serving(engine) as (target, server), AsyncClient(target) as client:
        await client.generate("x")
        assert await client.is_ready()
        server.withdraw()
        assert not await client.is_ready()
        engine.set_state(EngineState.STALLED)
        engine.set_state(EngineState.READY)
        assert not await client.is_ready()
        assert (await client.generate("x")).token_ids


async def test_C09_drain_refuses_new_requests_lets_running_ones_finish_and_tells_the_rest() -> None:
    engine = FakeEngine(lambda request: [10] * (20 if request.request_id == "short" else 2000), step_s=0.005)
    async with serving(engine) as (target, server), AsyncClient(target, retry=RetryPolicy(attempts=1)) as client:
        short, long = client.stream("x", request_id="short"), client.stream("x", request_id="long")
        await anext(aiter(short))
        await anext(aiter(long))
        draining = asyncio.create_task(server.drain(0.5))
        await asyncio.sleep(0.02)
        assert not await client.is_ready()
        assert await client.is_alive()
        with pytest.raises(TwinplaneError) as refused:
            await client.generate("x")
        assert (refused.value.code, refused.value.reason, refused.value.retry_delay) == ("UNAVAILABLE", "DRAINING", 2.5)
        assert (await short.result()).finish.reason == "length"
        assert await draining == 1
        with pytest.raises(TwinplaneError) as ended:
            await long.result()
        assert (ended.value.code, ended.value.reason) == ("UNAVAILABLE", "DRAINING")
        assert engine.live == {}


async def test_C09_stop_gives_open_calls_an_explicit_end() -> None:
    engine = FakeEngine(lambda request: [10] * 2000, step_s=0.005)
    server = GrpcServer(engine, tiny_model())
    target = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    async with AsyncClient(target) as client:
        stream = client.stream("x", request_id="open")
        await anext(aiter(stream))
        async with asyncio.timeout(LIVENESS_S):
            await server.stop(grace=0.05)
        with pytest.raises(TwinplaneError) as ended:
            await stream.result()
        assert (ended.value.code, ended.value.reason, ended.value.request_id) == ("UNAVAILABLE", "DRAINING", "open")
    assert engine.live == {}
    await server.stop()  # twice is once


async def test_drain_by_rpc_answers_with_what_did_not_finish() -> None:
    engine = FakeEngine(lambda request: [10] * 2000, step_s=0.005)
    async with serving(engine) as (target, _), AsyncClient(target, retry=RetryPolicy(attempts=1)) as client:
        stream = client.stream("x")
        await anext(aiter(stream))
        assert await client.drain(grace=0.05) == 1
        with pytest.raises(TwinplaneError, match="grace is -1"):
            await client.drain(grace=-1)


async def test_D06_requests_up_to_64_mib_arrive_and_are_judged_by_their_content(tokenizer: Any) -> None:
    engine = FakeEngine(max_model_len=3_000_000)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        for size in (3_900_000, 4_300_000):
            engine.max_model_len = 2048
            with pytest.raises(TwinplaneError) as caught:
                await client.generate("x" * size)
            assert (caught.value.code, caught.value.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
        with pytest.raises(TwinplaneError, match=r"1000000 tokens.*2047 fit"):
            await client.generate([10] * 1_000_000)
        engine.max_model_len = 1_100_000
        result = await client.generate([10] * 1_000_000, echo_prompt_tokens=True)
        assert len(result.prompt_token_ids) == 1_000_000  # a large reply arrives
        with pytest.raises(TwinplaneError) as caught:
            await client.generate("x" * (65 << 20))
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert str(64 << 20) in caught.value.message
        assert not caught.value.retryable


@pytest.mark.slow
async def test_D07_a_client_that_pings_all_the_time_is_not_sent_away() -> None:
    engine = FakeEngine(lambda request: [10] * 3, step_s=7.0)
    options = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 1000),
    )
    async with serving(engine) as (target, _), grpc.aio.insecure_channel(target, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        response = await stub.Generate(generation_pb2.GenerateRequest(text="x"))  # silent for 21 s
        assert len(response.sequences[0].token_ids) == 3
        await asyncio.sleep(6)  # idle, still pinging
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        engine.step_s = 0.0
        assert (await stub.Generate(generation_pb2.GenerateRequest(text="x"))).usage.completion_tokens == 3


async def test_D09_a_taken_port_is_an_error_that_names_the_address() -> None:
    engine = FakeEngine()
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        with pytest.raises(BindError, match=target):
            await GrpcServer(FakeEngine(), tiny_model()).start(target)
        for _ in range(20):
            await client.generate("x")
        assert len(engine.requests) == 20


async def test_D09_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(BindError, match=r"192\.0\.2\.1:50051"):
        await GrpcServer(FakeEngine(), tiny_model()).start("192.0.2.1:50051")


async def test_a_unix_socket_serves_and_is_gone_after_stop(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with serving(FakeEngine(), address=f"unix:{path}") as (target, _), AsyncClient(target) as client:
        assert (await client.generate("x")).token_ids == [10, 11, 12]
        assert path.is_socket()
    assert not path.exists()


async def test_reflection_lists_every_service() -> None:
    async with serving(FakeEngine()) as (target, _), grpc.aio.insecure_channel(target) as channel:

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        (answer,) = [r async for r in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask())]
    names = {service.name for service in answer.list_services_response.service}
    assert {READY, "twinplane.v1.TokenizerService", "twinplane.v1.EngineService", "grpc.health.v1.Health"} <= names


async def test_what_the_server_says_of_itself() -> None:
    engine = FakeEngine()
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        info = await client.server_info()
        assert (info.instance_id, info.state, info.device, info.kv_block_size) == ("test", "ready", "cpu", 16)
        assert (info.system_fingerprint, READY in info.contracts) == ("f00d", True)
        engine.info = None
        assert (await client.server_info()).device == ""
        (model,) = await client.models()
        assert (model.name, model.aliases, model.max_model_len, model.vocab_size) == ("tiny", ("alias",), 2048, 512)
        assert (model.eos_token_ids, model.has_chat_template, model.architecture) == ((2,), True, "TinyForCausalLM")
        assert model.default_sampling["temperature"] == 1.0
        load = await client.load()
        assert (load.running_requests, load.total_kv_blocks, load.seconds_since_last_step) == (0, 256, 0.5)


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back() -> None:
    engine = FakeEngine(lambda request: [10] * 2000, step_s=0.01, slots=1, queue=0)
    async with serving(engine) as (target, _), AsyncClient(target, retry=RetryPolicy(attempts=1)) as client:
        async with client.stream("x") as stream:
            await anext(aiter(stream))
            with pytest.raises(TwinplaneError) as caught:
                await client.generate("y")
        assert (caught.value.code, caught.value.reason, caught.value.retry_delay) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 0.05)

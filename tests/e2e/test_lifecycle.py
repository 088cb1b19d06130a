"""Death, restart and orderly ends of real servers with real streams."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from oracle import Oracle
from twinplane.benchmarks.load import Outcome, Request, at_concurrency, closed_loop, connect
from twinplane.benchmarks.server import Server
from twinplane.client import Client, TwinplaneError
from twinplane.shared import wire
from twinplane.shared.lifeline import LifelineClient, RefusedError
from twinplane.shared.messages import Hello
from twinplane.shared.segment import instance_names

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

Serve = Callable[..., Server]
Prompts = list[tuple[int, ...]]
SMALL = ("--kv-cache-bytes", "128MiB")


async def with_streams(server: Server, requests: Sequence[Request], act: Callable[[], None], tokens: int) -> list[Outcome]:
    """Run all requests at once and ``act`` (in a thread) as soon as each has ``tokens`` tokens: on a machine of any speed, all of
    them are then under way, and far from their end as long as ``tokens`` is."""
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def watch(outcome: Outcome) -> None:
        if outcome.generated >= tokens:
            begun.add(id(outcome))
        if len(begun) == len(requests):
            all_begun.set()

    async with connect(server.address, watch=watch) as send:
        running = asyncio.ensure_future(at_concurrency(send, requests, len(requests)))
        await asyncio.wait_for(all_begun.wait(), 60)
        await asyncio.to_thread(act)
        outcomes, _ = await running
    return outcomes


def wait_gone(pids: Sequence[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.05)


@pytest.mark.parametrize("substeps", ["1", "8"])
def test_C05_streams_go_on_when_the_data_plane_is_killed_under_load(serve: Serve, prompts: Prompts, oracle: Oracle, substeps: str) -> None:
    requests = [Request(prompt, 80) for prompt in prompts[6:14]]
    with serve(*SMALL, "--max-substeps", substeps) as server:
        outcomes = asyncio.run(with_streams(server, requests, lambda: server.plane("data-plane").kill(), tokens=8))
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert max(max(outcome.gaps) for outcome in outcomes) > 0.5, "the kill came too late to be noticed"
        for request, outcome in zip(requests, outcomes, strict=True):
            assert len(outcome.tokens) == 80  # none lost, none repeated
            assert oracle.mistakes(request.prompt, outcome.tokens) == []


def test_C05_a_stopped_data_plane_is_replaced_after_the_timeout(serve: Serve, prompts: Prompts, oracle: Oracle) -> None:
    request = Request(prompts[10], 120)
    with serve(*SMALL, "--data-plane-timeout", "2") as server:
        first = server.plane("data-plane")
        [outcome] = asyncio.run(with_streams(server, [request], first.suspend, tokens=8))
        assert outcome.error == "" and oracle.mistakes(request.prompt, outcome.tokens) == []
        assert server.plane("data-plane").pid != first.pid
        stalls = [event for event in server.log_events() if event["event"] == "stall"]
        assert stalls and f"pid {first.pid}" in str(stalls[0]["report"])


@pytest.mark.parametrize("substeps", ["1", "8"])
def test_a_killed_control_plane_comes_back_to_the_loaded_data_plane(serve: Serve, prompts: Prompts, substeps: str) -> None:
    with serve(*SMALL, "--max-substeps", substeps) as server:
        data_plane = server.plane("data-plane")
        [outcome] = asyncio.run(with_streams(server, [Request(prompts[10], 400)], lambda: server.plane("control-plane").kill(), tokens=8))
        assert outcome.error.startswith("UNAVAILABLE")
        server.wait_ready()
        assert server.plane("data-plane").pid == data_plane.pid  # its weights stayed
        outcomes, _ = asyncio.run(closed_loop(server.address, [Request(prompts[5], 8)], 1))
        assert len(outcomes[0].tokens) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_C09_running_streams_finish_after_a_signal_and_nothing_is_left(serve: Serve, prompts: Prompts, number: int) -> None:
    server = serve(*SMALL)
    server.start()
    server.wait_ready()
    pids = [child.pid for child in server.children()]
    assert server.process is not None
    requests = [Request(prompt, 40) for prompt in prompts[6:10]]
    outcomes = asyncio.run(with_streams(server, requests, lambda: os.kill(server.process.pid, number), tokens=4))  # type: ignore[union-attr]
    assert [len(outcome.tokens) for outcome in outcomes] == [40] * 4
    assert server.process.wait(20) == 0
    wait_gone(pids)
    assert server.leftovers() == []


@pytest.mark.parametrize("substeps", ["1", "8"])
def test_C09_the_grace_ends_streams_with_a_status(serve: Serve, prompts: Prompts, substeps: str) -> None:
    server = serve(*SMALL, "--drain-grace", "0.5", "--max-substeps", substeps)
    server.start()
    server.wait_ready()
    started: list[float] = []

    def terminate() -> None:
        started.append(time.monotonic())
        server.process.terminate()  # type: ignore[union-attr]

    [outcome] = asyncio.run(with_streams(server, [Request(prompts[10], 2800)], terminate, tokens=8))
    assert outcome.error.startswith("UNAVAILABLE") and outcome.tokens
    assert server.process.wait(20) == 0  # type: ignore[union-attr]
    assert time.monotonic() - started[0] < 8
    assert server.leftovers() == []


def test_an_idle_server_gets_memory_for_its_cache(serve: Serve) -> None:
    with serve("--kv-cache-bytes", "512MiB") as server:
        data_plane = psutil.Process(server.plane("data-plane").pid)
        deadline = time.monotonic() + 30
        while data_plane.memory_info().rss < (512 << 20) + (100 << 20):  # and the weights
            assert time.monotonic() < deadline, data_plane.memory_info()
            time.sleep(0.05)


def test_C02_C06_kill_9_of_everything_leaves_no_process_and_the_next_start_works(serve: Serve, model, prompts: Prompts) -> None:
    server = serve(*SMALL)
    for _ in range(3):
        server.start()
        server.wait_ready()
        pids = [child.pid for child in server.children()]
        outcomes, _ = asyncio.run(closed_loop(server.address, [Request(prompts[5], 4)], 1))
        assert len(outcomes[0].tokens) == 4
        server.process.kill()  # type: ignore[union-attr]  # the supervisor; the kernel ends both planes
        server.process.wait(10)  # type: ignore[union-attr]
        wait_gone(pids)
    server.start()
    server.wait_ready()
    assert server.stop() == 0
    assert server.leftovers() == []


def test_C04_two_instances_do_not_disturb_each_other(serve: Serve, prompts: Prompts, oracle: Oracle) -> None:
    with serve(*SMALL) as survivor:
        other = serve(*SMALL)
        other.start()
        other.wait_ready()
        request = Request(prompts[8], 60)
        [outcome] = asyncio.run(with_streams(survivor, [request], other.kill, tokens=4))
        assert outcome.error == "" and oracle.mistakes(request.prompt, outcome.tokens) == []


def test_C04_a_second_control_plane_of_one_instance_is_refused_and_the_first_serves_on(serve: Serve, prompts: Prompts) -> None:
    with serve(*SMALL) as server:
        second = serve(*SMALL, command="control-plane")
        second.command[second.command.index("--instance") + 1] = server.instance
        second.command = [part for part in second.command if part not in SMALL]
        second.start()
        assert second.process is not None and second.process.wait(30) != 0
        assert f"pid {server.plane('control-plane').pid}" in second.tail()
        outcomes, _ = asyncio.run(closed_loop(server.address, [Request(prompts[5], 4)], 1))
        assert len(outcomes[0].tokens) == 4


def test_D09_a_second_server_on_the_same_port_exits_at_once_and_says_so(serve: Serve) -> None:
    with serve(*SMALL) as server:
        second = serve(*SMALL)
        second.command[second.command.index("--port") + 1] = str(server.port)
        second.start()
        assert second.process is not None and second.process.wait(10) == 78
        assert str(server.port) in second.tail() and "in use" in second.tail()


def test_C11_C12_an_idle_server_sleeps_and_is_woken_by_the_next_request(serve: Serve, prompts: Prompts) -> None:
    with serve(*SMALL) as server:
        time.sleep(2)
        processes = [psutil.Process(server.process.pid), *server.children()]  # type: ignore[union-attr]
        before = sum(sum(p.cpu_times()[:2]) for p in processes)
        time.sleep(10)
        used = sum(sum(p.cpu_times()[:2]) for p in processes) - before
        assert used / 10 < 0.03, f"{used / 10:.1%} of a core while idle"
        [outcome], _ = asyncio.run(closed_loop(server.address, [Request(prompts[5], 4)], 1))
        assert len(outcome.tokens) == 4


def test_A17_D01_D02_blocks_come_back_after_clients_that_leave_at_any_moment(server: Server, prompts: Prompts) -> None:
    requests = [Request(prompts[i % 14], 40, cancel_after=i % 12) for i in range(96)]
    asyncio.run(closed_loop(server.address, requests, 24))
    with Client(server.address) as client:
        deadline = time.monotonic() + 5
        while (load := client.load()).running_requests or load.used_kv_blocks:
            assert time.monotonic() < deadline, load
            time.sleep(0.05)
        assert load.waiting_requests == 0
        total = client.server_info().kv_block_count
        assert load.total_kv_blocks == total


def test_A22_the_context_limit_is_exact(serve: Serve, prompts: Prompts) -> None:
    with serve(*SMALL, "--max-model-len", "128") as server, Client(server.address) as client:
        result = client.generate(list(prompts[20][:127]), temperature=0.0, ignore_eos=True)
        assert len(result.token_ids) == 1 and result.finish.reason == "length"
        with pytest.raises(TwinplaneError) as refused:
            client.generate(list(prompts[21][:128]), temperature=0.0)
        assert refused.value.code == "INVALID_ARGUMENT" and "128" in str(refused.value)
        assert len(client.generate(list(prompts[5]), max_tokens=3, temperature=0.0, ignore_eos=True).token_ids) == 3


def test_C18_planes_inherit_no_listening_socket(server: Server) -> None:
    data_plane = server.plane("data-plane")
    assert [c for c in data_plane.net_connections() if c.status == psutil.CONN_LISTEN] == []


def test_C17_shared_memory_is_for_its_owner_alone(server: Server) -> None:
    modes = {name: oct(Path("/dev/shm", name).stat().st_mode & 0o777) for name in server.leftovers()}
    assert len(modes) == 3 and set(modes.values()) == {"0o600"}


def test_D12_health_turns_with_the_data_plane(server: Server) -> None:
    with Client(server.address) as client:
        assert client.is_alive() and client.is_ready()
        server.plane("data-plane").kill()
        deadline = time.monotonic() + 5
        while client.is_ready():
            assert time.monotonic() < deadline
        assert client.is_alive()
        server.wait_ready()
        assert len(client.generate("Hello", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_the_command_line_client_streams_an_answer(server: Server) -> None:
    command = [server.command[0], "-m", "twinplane.cli.main", "chat", "--addr", server.address, "--temperature", "0"]
    answer = subprocess.run([*command, "What is the capital of France?"], capture_output=True, timeout=60, check=True, text=True)
    assert "The capital of France is Paris." in answer.stdout


def test_A14_a_data_plane_with_other_weights_is_refused(serve: Serve) -> None:
    """Nobody replaces the weights below a served model, and with them the meaning of what is cached."""
    server = serve(command="control-plane").start()
    hello = Hello(
        layout_hash=f"{wire.LAYOUT_HASH:x}", pid=os.getpid(), start_time=0, device="cpu", model="/somewhere/else", fingerprint="other",
        block_size=16, num_blocks=8, num_host_blocks=0, kv_dtype="float32", dtype="float32", kv_bytes_per_block=64, max_model_len=128,
        vocab_size=100, num_layers=2, loaded=False,
    )  # fmt: skip
    lifeline = LifelineClient.connect(instance_names(server.instance).socket, timeout=60)
    with pytest.raises(RefusedError, match=r"it serves /somewhere/else \(fingerprint other\), the control plane was started for"):
        lifeline.handshake(hello)
    lifeline.close()
    assert server.stop() == 0

"""The scheduler's thread between real rings, real bells and several callers."""

import gc
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from core_device import Request
from core_planes import ALIVE_S, Client, DataPlane
from core_rig import Record
from twinplane.control_plane import _core
from twinplane.shared import _shm, wire

CONFIG = {"max_rows": 8, "max_step_tokens": 64, "max_chunk_tokens": 16, "max_model_len": 128, "max_waiting_requests": 4096}


def some_request(i: int, **options: object) -> Request:
    dice = random.Random(i)
    prompt = tuple(dice.randint(1, 49) for _ in range(dice.randint(1, 40)))
    return Request(prompt, **({"max_tokens": dice.randint(1, 20), "seed": i, "eos": (0,)} | options))  # type: ignore[arg-type]


@pytest.fixture(params=[(1, 1), (2, 1), (2, 4)], ids=["depth1", "depth2", "substeps4"])
def config(request: pytest.FixtureRequest) -> _core.CoreConfig:
    depth, substeps = request.param
    return _core.CoreConfig(depth=depth, max_substeps=substeps, **CONFIG)


@pytest.fixture
def core(config: _core.CoreConfig) -> Iterator[_core.EngineCore]:
    core = _core.EngineCore(config)
    core.start()
    yield core
    core.stop()


def settle(core: _core.EngineCore, plane: DataPlane) -> _core.Stats:
    """Once all requests have ended: the numbers after the last closes have retired."""
    deadline = time.monotonic() + ALIVE_S
    while (stats := core.stats()).blocks_free + stats.blocks_cached != stats.blocks_total or plane.device.rows:
        assert time.monotonic() < deadline, stats
        time.sleep(0.001)
    return stats


def test_requests_are_served_through_the_rings(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        client = Client(core)
        for i in range(40):
            assert client.submit(i, some_request(i)) is None
        client.wait()
        stats = settle(core, plane)
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert stats.tokens_emitted == sum(len(record.tokens) for record in client.records.values())
    assert stats.tick_ns_max > 0 and stats.missed_wakes == 0


def test_the_eventfd_is_readable_once_per_batch_and_quiet_otherwise(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        assert core.poll() == []
        assert select.select([core.event_fd], [], [], 0.05)[0] == []
        client = Client(core)
        client.submit(1, some_request(1))
        assert select.select([core.event_fd], [], [], ALIVE_S)[0]
        client.wait()
        assert core.poll() == []
        assert select.select([core.event_fd], [], [], 0.05)[0] == []


def test_several_threads_may_submit_and_cancel_at_once(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        client = Client(core)

        def submit_some(thread: int) -> None:
            for i in range(thread * 1000, thread * 1000 + 60):
                assert client.submit(i, some_request(i)) is None
                if i % 3 == 0:
                    core.cancel(i)

        threads = [threading.Thread(target=submit_some, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.wait()
        settle(core, plane)
    assert len(client.records) == 240
    assert {record.finish for record in client.records.values()} <= {_core.FINISH_EOS, _core.FINISH_LENGTH, _core.FINISH_CANCELLED}


def test_A17_a_storm_of_cancels_leaves_nothing_behind(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    dice = random.Random(7)
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        client = Client(core)
        for i in range(500):
            client.submit(i, some_request(i, max_tokens=30))
            core.cancel(dice.randrange(max(0, i - 20), i + 1))
            client.poll()
        for i in range(500):
            core.cancel(i)
        client.wait()
        settle(core, plane)
        assert client.submit(1000, Request((1,) * 100, max_tokens=28)) is None
        client.wait()
    assert client.records[1000].finish == _core.FINISH_LENGTH


def test_a_killed_data_plane_loses_and_repeats_no_token(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    client = Client(core)
    next_id = 0
    for epoch in range(1, 9):
        with DataPlane(config, epoch, num_blocks=40 + epoch) as plane:
            plane.dies_after = 3 * epoch
            plane.attach_to(core)
            for _ in range(6):
                client.submit(next_id, some_request(next_id, max_tokens=40))
                next_id += 1
            client.wait(lambda plane=plane: plane.is_dead)
            core.detach()
        assert core.stats().running == 0
        assert core.peer() == {}
    with DataPlane(config, 99) as plane:
        plane.attach_to(core)
        client.wait()
        settle(core, plane)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ALIVE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("comes", ["request", "cancel", "stop"])
def test_what_comes_in_the_middle_of_a_step_ends_it_after_the_substep_under_way(comes: str) -> None:
    config = _core.CoreConfig(max_substeps=8, **CONFIG)
    core = _core.EngineCore(config)
    core.start()
    gate = threading.Semaphore(0)
    with DataPlane(config, 1) as plane:
        plane.before_substep = gate.acquire
        plane.attach_to(core)
        client = Client(core)
        client.submit(1, Request((1, 2, 3), max_tokens=100))
        while not (plane.device.in_flight and plane.device.in_flight[0][0].num_substeps == 8 and plane.device.substeps_run == 2):
            before = plane.results_run
            gate.release()
            until(lambda before=before: plane.results_run > before and (plane.device.in_flight != [] or plane.results_run < 3))
        step = plane.device.in_flight[0][0]
        assert plane.end.interrupted() == 0
        if comes == "request":
            client.submit(2, Request((4, 5), max_tokens=3))
        elif comes == "cancel":
            core.cancel(1)
        else:
            core.stop()
        until(lambda: plane.end.interrupted() == step.number + 1)
        done = plane.results_run
        gate.release()
        until(lambda: plane.steps_run == step.number + 1)
        assert plane.results_run == done + 1, "the substep under way was the step's last"
        plane.before_substep = lambda: None
        gate.release(9)  # for the one that waits at the gate
        client.wait()
        if comes == "request":
            assert client.records[1].finish == client.records[2].finish == _core.FINISH_LENGTH
        core.stop()
        assert core.stats().steps_interrupted == 1


def test_a_data_plane_killed_in_the_middle_of_a_step_loses_and_repeats_no_token() -> None:
    config = _core.CoreConfig(max_substeps=8, **CONFIG)
    core = _core.EngineCore(config)
    core.start()
    client = Client(core)
    for epoch in range(1, 8):
        with DataPlane(config, epoch) as plane:
            plane.dies_after_substep = epoch
            plane.attach_to(core)
            if epoch < 4:
                client.submit(epoch, Request((epoch, 2, 3), max_tokens=120, seed=epoch))
            client.wait(lambda plane=plane: plane.is_dead)
            assert plane.device.in_flight[0][0].num_substeps > plane.device.substeps_run == epoch
            seen = sum(len(record.tokens) for record in client.records.values())
            core.detach()
            client.poll()
            assert sum(len(record.tokens) for record in client.records.values()) >= seen
    with DataPlane(config, 99) as plane:
        plane.attach_to(core)
        client.wait()
        settle(core, plane)
    assert {len(record.tokens) for record in client.records.values()} == {120}
    core.stop()


def test_a_step_that_fails_twice_quarantines_and_the_next_request_runs(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    client = Client(core)
    for epoch in (1, 2):
        with DataPlane(config, epoch) as plane:
            plane.answer = lambda _, plane=plane: plane.device.result(plane.steps_run, [], status=int(wire.StepStatus.FAILED))
            plane.dies_after = 1
            plane.attach_to(core)
            if epoch == 1:
                client.submit(1, some_request(1))
            client.wait(lambda plane=plane: plane.is_dead)
            core.detach(step_failed=True)
    client.wait()
    assert client.records[1].finish == _core.FINISH_QUARANTINED
    with DataPlane(config, 3) as plane:
        plane.attach_to(core)
        client.submit(2, some_request(2))
        client.wait()


def test_no_step_is_sent_before_activate(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        core.attach(plane.fd, list(plane.capacities), 1, plane.pool)
        client = Client(core)
        client.submit(1, some_request(1))
        time.sleep(0.05)
        assert core.stats().steps_sent == 0
        assert core.peer()["control"]["phase"] == wire.Phase.STARTING
        core.activate()
        client.wait()


def test_a_waiting_request_meets_its_deadline_although_the_data_plane_still_loads(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        core.attach(plane.fd, list(plane.capacities), 1, plane.pool)
        client = Client(core)
        client.submit(1, some_request(1, deadline_ns=time.monotonic_ns() + 30_000_000))
        client.wait()
    assert client.records[1].finish == _core.FINISH_DEADLINE


def test_a_data_plane_that_breaks_the_protocol_is_named_and_gets_no_more_steps(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        plane.answer = lambda _: plane.device.result(77, [])
        plane.attach_to(core)
        client = Client(core)
        client.submit(1, some_request(1))
        client.wait(lambda: core.peer()["fault"] != "")
        assert "step 77" in core.peer()["fault"]
        core.detach()
    with DataPlane(config, 2) as plane:
        plane.attach_to(core)
        assert core.peer()["fault"] == ""
        client.wait()


def test_the_peer_is_shown_with_its_heartbeat_and_phase(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    assert core.peer() == {}
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        plane.end.start_heartbeat()
        plane.end.set_phase(int(wire.Phase.FORWARD), 5)
        peer = core.peer()
        assert (peer["data"]["phase"], peer["data"]["phase_step"]) == (wire.Phase.FORWARD, 5)
        assert all(time.monotonic_ns() - peer[plane]["heartbeat_ns"] < ALIVE_S * 10**9 for plane in ("data", "control"))
        first = core.peer()["control"]["heartbeat_ns"]
        deadline = time.monotonic() + ALIVE_S
        while core.peer()["control"]["heartbeat_ns"] == first:  # the idle core keeps beating
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_attach_refuses_a_segment_of_another_session_and_stays_usable(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 5) as plane:
        with pytest.raises(_shm.ProtocolError, match="epoch"):
            core.attach(plane.fd, list(plane.capacities), 6, plane.pool)
        with pytest.raises(_shm.ProtocolError, match="capacities"):
            core.attach(plane.fd, list(plane.capacities._replace(max_copies=99)), 5, plane.pool)
        with pytest.raises(RuntimeError, match="no session"):
            core.activate()
        plane.attach_to(core)
        with pytest.raises(RuntimeError, match="attached already"):
            plane.attach_to(core)
        client = Client(core)
        client.submit(1, some_request(1))
        client.wait()


def test_stop_ends_every_live_request_and_refuses_new_ones(core: _core.EngineCore, config: _core.CoreConfig) -> None:
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        client = Client(core)
        for i in range(300):  # many more than can be finished before the stop
            client.submit(i, some_request(i, max_tokens=60, eos=()))
        client.wait(lambda: any(record.tokens for record in client.records.values()))
        core.stop()
        core.stop()
        client.wait()
    assert _core.FINISH_STOPPED in {record.finish for record in client.records.values()}
    refusal = client.submit(999, some_request(999))
    assert refusal is not None and refusal.reason == "STOPPING"
    assert core.stats().running == core.stats().waiting == 0
    with pytest.raises(RuntimeError, match="not running"):
        core.activate()
    with pytest.raises(RuntimeError, match="started before"):
        core.start()


def test_stop_while_threads_submit_leaves_no_request_without_an_end(config: _core.CoreConfig) -> None:
    for round_number in range(5):
        core = _core.EngineCore(config)
        core.start()
        with DataPlane(config, 1) as plane:
            plane.attach_to(core)
            accepted: dict[int, Record] = {}
            client = Client(core)
            client.records = accepted

            def submit_until_refused(first: int, client: Client = client) -> None:
                for i in range(first, first + 10_000):
                    if client.submit(i, some_request(i)) is not None:
                        return

            threads = [threading.Thread(target=submit_until_refused, args=(n * 10_000,)) for n in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.002 * round_number)
            core.stop()
            for thread in threads:
                thread.join()
            client.wait()
        assert all(record.finish for record in accepted.values())


def test_a_core_that_was_never_started_or_polled_goes_away_quietly(config: _core.CoreConfig) -> None:
    _core.EngineCore(config).stop()
    core = _core.EngineCore(config)
    core.start()
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        for i in range(20):
            core.submit(i, np.array([1, 2, 3], np.int32), some_request(i).params())
        fd = core.event_fd
        assert select.select([fd], [], [], ALIVE_S)[0]
        del core
        gc.collect()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_F04_ten_thousand_requests_leave_no_memory_behind(config: _core.CoreConfig) -> None:
    """Every record goes back to the thread that polls; what stays allocated does not grow with the requests served."""
    core = _core.EngineCore(config)
    core.start()
    with DataPlane(config, 1) as plane:
        plane.attach_to(core)
        sizes = []
        for batch in range(6):
            for i in range(batch * 1000, batch * 1000 + 300):
                core.submit(i, np.ones(4, np.int32), Request((1,), max_tokens=1).params())
            ended = 0
            deadline = time.monotonic() + ALIVE_S
            while ended < 300:
                assert time.monotonic() < deadline
                select.select([core.event_fd], [], [], 0.01)
                ended += sum(event.finish != 0 for event in core.poll())
            sizes.append(_anonymous_bytes())
        core.stop()
    assert sizes[-1] - sizes[1] < 2 << 20


def _anonymous_bytes() -> int:
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_wait_bound_is_the_protocols() -> None:
    assert _shm.WAIT_BOUND_NS == 20_000_000

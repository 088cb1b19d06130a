"""EngineCore on real rings: a segment in memory, and a data plane thread that runs the fake device behind it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np
from core_device import FakeDevice, Request
from core_rig import Record
from twinplane.control_plane import _core
from twinplane.shared import _shm, wire

ALIVE_S = 60  # nothing takes so long unless it hangs


class DataPlane:
    """One session: a segment, and the thread behind it. Leaving the block ends the thread, as a death would."""

    def __init__(self, config: _core.CoreConfig, epoch: int, *, num_blocks: int = 64, block_size: int = 4) -> None:
        self.pool = _core.Pool(num_blocks=num_blocks, block_size=block_size)
        self.capacities = wire.Capacities(*_core.capacities_for(config, self.pool))
        self.epoch = epoch
        self.fd = os.memfd_create("core-test")
        os.ftruncate(self.fd, _shm.segment_bytes(self.capacities))
        _shm.format_segment(self.fd, self.capacities, epoch)
        self.end = _shm.DataEnd(self.fd, epoch)
        self.device = FakeDevice(self.capacities, num_blocks, block_size)
        self.answer: Callable[[bytes], bytes] = lambda result: result  # what becomes of a result on its way
        self.steps_run = 0
        self.dies_after: int | None = None
        self.results_run = 0
        self.dies_after_substep: int | None = None  # of a step that has more
        self.before_substep: Callable[[], object] = lambda: None
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> DataPlane:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.end.close()
        os.close(self.fd)
        if self.error is not None:
            raise self.error

    def attach_to(self, core: _core.EngineCore) -> None:
        core.attach(self.fd, list(self.capacities), self.epoch, self.pool)
        core.activate()

    def kill(self) -> None:
        self._stop.set()
        self.end.wake()
        self._thread.join(ALIVE_S)
        assert not self._thread.is_alive()

    @property
    def is_dead(self) -> bool:
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set() and self.steps_run != self.dies_after and not self.dies_now:
                sequence = self.end.wait_step(_shm.WAIT_BOUND_NS)
                if sequence is not None:
                    self._run(sequence)
        except BaseException as error:
            self.error = error

    def _run(self, sequence: int) -> None:
        step = self.device.send(self.end.step(sequence))
        assert step.number == sequence
        while self.device.in_flight and not self._stop.is_set() and not self.dies_now:
            result = self.end.result_slot(ALIVE_S * 10**9)
            assert result is not None
            self.before_substep()
            result[:] = np.frombuffer(self.answer(self.device.run_next(self.end.interrupted())), np.uint8)
            self.end.publish()
            self.results_run += 1
        if not self.device.in_flight:
            self.end.consume(sequence)
            self.steps_run += 1

    @property
    def dies_now(self) -> bool:
        return self.device.in_flight != [] and self.device.substeps_run == self.dies_after_substep


class Client:
    """Submits, and reads events the way the facade does: when the eventfd says so."""

    def __init__(self, core: _core.EngineCore) -> None:
        self.core = core
        self.records: dict[int, Record] = {}

    def submit(self, request_id: int, request: Request) -> _core.Refusal | None:
        self.records[request_id] = Record(request)
        refusal = self.core.submit(request_id, np.array(request.prompt, np.int32), request.params())
        if refusal is not None:
            del self.records[request_id]
        return refusal

    def poll(self) -> None:
        for event in self.core.poll():
            record = self.records[event.request_id]
            assert not record.finish, "an event after the last"
            record.tokens += event.tokens
            record.logprobs += event.logprobs
            record.finish, record.match = event.finish, event.match
            if event.finish:
                record.last = event
            record.verify()

    def wait(self, done: Callable[[], bool] | None = None) -> None:
        """Until `done`, or else until every request has ended."""
        done = done or (lambda: all(record.finish for record in self.records.values()))
        deadline = time.monotonic() + ALIVE_S
        while not done():
            assert time.monotonic() < deadline, f"hangs: {self.core.stats()}, {self.core.peer()}"
            select.select([self.core.event_fd], [], [], 0.01)
            self.poll()

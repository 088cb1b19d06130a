"""The step loop: wait for a step, apply its deltas, run the model, sample, publish (shared/PROTOCOL.md, section 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from twinplane.data_plane.device import Device
from twinplane.data_plane.moves import BlockMover
from twinplane.data_plane.rows import Rows
from twinplane.data_plane.sampler import Sampler
from twinplane.data_plane.step import ResultView, StepView
from twinplane.shared.log import Limiter, get_logger
from twinplane.shared.wire import Capacities, Phase, ResultFlag, ResultSlotLayout, SeqFlag, StepSlotLayout, StepStatus

log = get_logger(__name__)

WAIT_NS = 100_000_000  # longest wait for a step or a result slot before the loop asks again whether to stop


class Rings(Protocol):
    """The part of twinplane.shared._shm.DataEnd that the loop uses."""

    @property
    def capacities(self) -> tuple[int, ...]: ...
    def wait_step(self, timeout_ns: int) -> int | None: ...
    def step(self, sequence: int) -> NDArray[np.uint8]: ...
    def consume(self, sequence: int) -> None: ...
    def result_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None: ...
    def publish(self) -> None: ...
    def set_phase(self, phase: int, step: int) -> None: ...


class StepFailedError(Exception):
    """A step raised; its result was published as FAILED. The cause is chained. The process must end."""


class Worker:
    """One session's loop over one device. Rows begin empty."""

    def __init__(
        self,
        device: Device,
        rings: Rings,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        num_host_blocks: int = 0,
    ) -> None:
        self._capacities = capacities = Capacities(*rings.capacities)
        self._device = device
        self._rings = rings
        self._step_layout = StepSlotLayout(capacities)
        self._result_layout = ResultSlotLayout(capacities)
        self._rows = Rows(capacities, block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, vocab_size=vocab_size)
        self._mover = BlockMover(device, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        self._sampler = Sampler(self._rows, device.ops)
        self._limiter = Limiter()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve steps until ``stopped()``, which is asked after every step and every wake-up.

        Raises StepFailedError once a step has failed and said so in the ring.
        """
        next_step = 0
        while not stopped():
            self._rings.set_phase(Phase.IDLE, next_step)
            sequence = self._rings.wait_step(WAIT_NS)
            if sequence is not None:
                self._serve(sequence, stopped)
                next_step = sequence + 1
        self._rings.set_phase(Phase.STOPPED, next_step)

    def _serve(self, sequence: int, stopped: Callable[[], bool]) -> None:
        received_ns = time.monotonic_ns()
        slot = self._result_slot(sequence, stopped)
        if slot is None:
            return
        result = ResultView(slot, self._result_layout, self._capacities)
        header = result.header
        header["step"], header["received_ns"], header["last"] = sequence, received_ns, 1
        header["status"], header["num_entries"], header["num_candidates"] = StepStatus.OK, 0, 0
        header["apply_us"] = header["forward_us"] = header["sample_us"] = 0
        try:
            self._execute(sequence, result)
        except Exception as error:
            header["status"], header["num_entries"], header["num_candidates"] = StepStatus.FAILED, 0, 0
            self._publish(sequence, result)
            raise StepFailedError(f"step {sequence} failed: {type(error).__name__}: {error}") from error
        self._publish(sequence, result)

    def _execute(self, sequence: int, result: ResultView) -> None:
        """Apply, forward, sample; fills the result but for its time of publication."""
        header, started = result.header, time.monotonic_ns()
        self._rings.set_phase(Phase.APPLY, sequence)
        step = StepView(self._rings.step(sequence), self._step_layout)
        self._rows.apply(step)
        self._mover.apply(step)
        if not len(step.seqs):
            _clock(header, "apply_us", started)
            return
        batch = self._rows.batch(step)
        started = _clock(header, "apply_us", started)
        self._rings.set_phase(Phase.FORWARD, sequence)
        logits = self._device.forward(batch)
        started = _clock(header, "forward_us", started)
        self._rings.set_phase(Phase.SAMPLE, sequence)
        self._sample(step, logits, result)
        _clock(header, "sample_us", started)

    def _sample(self, step: StepView, logits: NDArray[np.float32], result: ResultView) -> None:
        sampling = step.seqs[(step.seqs["flags"] & SeqFlag.SAMPLES) != 0]
        if not len(sampling):
            return
        entries = result.entries(len(sampling))
        rows = sampling["row"].astype(np.int64)
        positions = sampling["position"].astype(np.int64) + sampling["num_tokens"]
        candidates = result.candidates(self._rows.num_candidates(rows))
        used = self._sampler.sample(logits, rows, positions, entries, candidates)
        result.header["num_entries"], result.header["num_candidates"] = len(entries), used
        bad = entries["row"][(entries["flags"] & ResultFlag.NOT_FINITE) != 0]
        if len(bad):
            self._limiter.log(log.error, "logits_not_finite", rows=bad.tolist(), step=step.step)

    def _publish(self, sequence: int, result: ResultView) -> None:
        self._rings.set_phase(Phase.PUBLISH, sequence)
        result.header["finished_ns"] = time.monotonic_ns()
        self._rings.publish()
        self._rings.consume(sequence)  # after the step's last result: the planner may now reuse what the slot named

    def _result_slot(self, sequence: int, stopped: Callable[[], bool]) -> NDArray[np.uint8] | None:
        """A free result slot; None when stopped while the ring was full (then nobody reads results any more)."""
        self._rings.set_phase(Phase.PUBLISH, sequence)
        while (slot := self._rings.result_slot(WAIT_NS)) is None:
            if stopped():
                return None
            self._limiter.log(log.warning, "result_ring_full", step=sequence)
        return slot


def _clock(header: NDArray[Any], field: str, started_ns: int) -> int:
    """Write the microseconds since `started_ns` into the header; returns now."""
    now = time.monotonic_ns()
    header[field] = (now - started_ns) // 1000
    return now

"""The step loop: wait for a step, apply its deltas, run the model, sample, publish (shared/PROTOCOL.md, section 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.device import Device
from twinplane.data_plane.moves import BlockMover
from twinplane.data_plane.rows import Decodes, Ids, Rows
from twinplane.data_plane.sampler import Sampler
from twinplane.data_plane.step import ResultView, StepView
from twinplane.shared.log import Limiter, get_logger
from twinplane.shared.wire import Capacities, Phase, ResultFlag, ResultSlotLayout, SeqFlag, StepSlotLayout, StepStatus

log = get_logger(__name__)

IDLE_NS = 2_000_000  # without a step for so long, the device may do what waits for idleness
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
    def interrupted(self) -> int: ...
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
        """Serve steps until ``stopped()``, which is asked after every step, every wake-up and between substeps.

        Raises StepFailedError once a step has failed and said so in the ring.
        """
        next_step, unsettled = 0, True
        while not stopped():
            self._rings.set_phase(Phase.IDLE, next_step)
            sequence = self._rings.wait_step(IDLE_NS if unsettled else WAIT_NS)
            if sequence is not None:
                self._serve(sequence, stopped)
                next_step = sequence + 1
            elif unsettled:
                unsettled = self._device.settle()
        self._rings.set_phase(Phase.STOPPED, next_step)

    def _serve(self, sequence: int, stopped: Callable[[], bool]) -> None:
        """Each substep is answered by a result of its own. Between two, the control plane may ask for the end, and so may whoever
        stops this loop; the result then is the step's last."""
        received_ns, decodes, substep = time.monotonic_ns(), None, 0
        is_last = False
        while not is_last:
            slot = self._result_slot(sequence, stopped)
            if slot is None:
                return
            result = ResultView(slot, self._result_layout, self._capacities)
            header = result.header
            header["step"], header["substep"], header["received_ns"] = sequence, substep, received_ns
            header["status"], header["num_entries"], header["num_candidates"] = StepStatus.OK, 0, 0
            header["apply_us"] = header["forward_us"] = header["sample_us"] = 0
            try:
                decodes = self._execute(sequence, result) if substep == 0 else self._go_on(sequence, decodes, result)
            except Exception as error:
                header["status"], header["num_entries"], header["num_candidates"] = StepStatus.FAILED, 0, 0
                self._publish(sequence, result, is_last=True)
                raise StepFailedError(f"step {sequence} failed: {type(error).__name__}: {error}") from error
            is_last = decodes is None or self._rings.interrupted() > sequence or stopped()
            self._publish(sequence, result, is_last=is_last)
            substep += 1

    def _execute(self, sequence: int, result: ResultView) -> Decodes | None:
        """Apply, forward, sample; fills the result but for its time of publication. Returns what further substeps compute, if any."""
        header, started = result.header, time.monotonic_ns()
        self._rings.set_phase(Phase.APPLY, sequence)
        step = StepView(self._rings.step(sequence), self._step_layout)
        self._rows.apply(step)
        self._mover.apply(step)
        if not len(step.seqs):
            _clock(header, "apply_us", started)
            return None
        batch = self._rows.batch(step)
        decodes = self._rows.decodes(step) if step.num_substeps > 1 else None
        _clock(header, "apply_us", started)
        sampling = step.seqs[(step.seqs["flags"] & SeqFlag.SAMPLES) != 0]
        positions = sampling["position"].astype(np.int64) + sampling["num_tokens"]
        entries = self._compute(sequence, batch, sampling["row"].astype(np.int64), positions, result)
        return decodes if decodes is not None and self._rows.go_on(decodes, entries) else None

    def _go_on(self, sequence: int, decodes: Decodes | None, result: ResultView) -> Decodes | None:
        """The next substep: nothing is applied, the inputs are the last substep's samples."""
        assert decodes is not None
        batch = self._rows.next_batch(decodes)
        entries = self._compute(sequence, batch, decodes.rows, decodes.positions, result)
        return decodes if self._rows.go_on(decodes, entries) else None

    def _compute(self, sequence: int, batch: Batch, rows: Ids, positions: Ids, result: ResultView) -> NDArray[np.void]:
        """Forward and sample: `rows` [R], whose new tokens take `positions` [R]. Returns the result's entries."""
        header, started = result.header, time.monotonic_ns()
        self._rings.set_phase(Phase.FORWARD, sequence)
        logits = self._device.forward(batch)
        started = _clock(header, "forward_us", started)
        self._rings.set_phase(Phase.SAMPLE, sequence)
        entries = result.entries(len(rows))
        if len(rows):
            self._sample(sequence, logits, rows, positions, entries, result)
        _clock(header, "sample_us", started)
        return entries

    def _sample(
        self, sequence: int, logits: NDArray[np.float32], rows: Ids, positions: Ids, entries: NDArray[np.void], result: ResultView
    ) -> None:
        candidates = result.candidates(self._rows.num_candidates(rows))
        used = self._sampler.sample(logits, rows, positions, entries, candidates)
        result.header["num_entries"], result.header["num_candidates"] = len(entries), used
        bad = entries["row"][(entries["flags"] & ResultFlag.NOT_FINITE) != 0]
        if len(bad):
            self._limiter.log(log.error, "logits_not_finite", rows=bad.tolist(), step=sequence)

    def _publish(self, sequence: int, result: ResultView, *, is_last: bool) -> None:
        self._rings.set_phase(Phase.PUBLISH, sequence)
        result.header["last"] = is_last
        result.header["finished_ns"] = time.monotonic_ns()
        self._rings.publish()
        if is_last:
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

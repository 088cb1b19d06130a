"""The step loop: wait for a step, apply its deltas, run the model, sample, publish (shared/PROTOCOL.md, section 5)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.device import Device
from twinplane.data_plane.moves import BlockMover
from twinplane.data_plane.rows import Rows, Sampling
from twinplane.data_plane.sampler import Sampler
from twinplane.data_plane.step import ResultHeader, ResultView, StepView
from twinplane.shared.log import Limiter, get_logger
from twinplane.shared.wire import Capacities, Phase, ResultSlotLayout, StepSlotLayout, StepStatus

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

    @torch.inference_mode()
    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve steps until ``stopped()``, which is asked after every step, every wake-up and between substeps.

        Raises StepFailedError once a step has failed and said so in the ring.
        """
        next_step, wait_ns = 0, IDLE_NS
        while not stopped():
            self._rings.set_phase(Phase.IDLE, next_step)
            sequence = self._rings.wait_step(wait_ns)
            if sequence is not None:
                self._serve(sequence, stopped)
                next_step, wait_ns = sequence + 1, IDLE_NS
            else:
                wait_ns = 0 if self._device.settle() else WAIT_NS
        self._rings.set_phase(Phase.STOPPED, next_step)

    def _serve(self, sequence: int, stopped: Callable[[], bool]) -> None:
        """Each substep is answered by a result of its own. Between two, the control plane may ask for the end, and so may whoever
        stops this loop; the result then is the step's last."""
        received_ns, sampling, substep = time.monotonic_ns(), None, 0
        is_last = False
        while not is_last:
            slot = self._result_slot(sequence, stopped)
            if slot is None:
                return
            result = ResultView(slot, self._result_layout, self._capacities)
            header = ResultHeader(sequence, substep, received_ns)
            try:
                sampling = self._execute(header, result) if sampling is None else self._go_on(sampling, header, result)
            except Exception as error:
                header.status, header.num_entries, header.num_candidates = StepStatus.FAILED, 0, 0
                self._publish(header, result, is_last=True)
                raise StepFailedError(f"step {sequence} failed: {type(error).__name__}: {error}") from error
            is_last = sampling is None or self._rings.interrupted() > sequence or stopped()
            self._publish(header, result, is_last=is_last)
            substep += 1

    def _execute(self, header: ResultHeader, result: ResultView) -> Sampling | None:
        """Apply, forward, sample; fills the result and most of its header. Returns what further substeps compute, if any."""
        started = time.monotonic_ns()
        self._rings.set_phase(Phase.APPLY, header.step)
        step = StepView(self._rings.step(header.step), self._step_layout)
        self._rows.apply(step)
        self._mover.apply(step)
        if not len(step.seqs):
            header.apply_us = _microseconds(started, time.monotonic_ns())
            return None
        batch, sampling = self._rows.batch(step)
        header.apply_us = _microseconds(started, time.monotonic_ns())
        return self._compute(batch, sampling, header, result)

    def _go_on(self, sampling: Sampling, header: ResultHeader, result: ResultView) -> Sampling | None:
        """The next substep: nothing is applied, the inputs are the last substep's samples."""
        return self._compute(self._rows.next_batch(sampling), sampling, header, result)

    def _compute(self, batch: Batch, sampling: Sampling, header: ResultHeader, result: ResultView) -> Sampling | None:
        """Forward and sample. Returns what of `sampling` goes on in a further substep, if any."""
        started = time.monotonic_ns()
        self._rings.set_phase(Phase.FORWARD, header.step)
        logits = self._device.forward(batch)
        computed = time.monotonic_ns()
        self._rings.set_phase(Phase.SAMPLE, header.step)
        goes_on = bool(sampling.rows) and self._sample(logits, sampling, header, result)
        header.forward_us, header.sample_us = _microseconds(started, computed), _microseconds(computed, time.monotonic_ns())
        return sampling if goes_on else None

    def _sample(self, logits: Tensor, sampling: Sampling, header: ResultHeader, result: ResultView) -> bool:
        """Returns whether a further substep follows."""
        sampled = self._sampler.sample(logits, sampling.rows, sampling.positions)
        result.write_samples(sampled.entries, sampled.candidates)
        header.num_entries, header.num_candidates = len(sampled.entries), len(sampled.candidates)
        if -1 in sampled.tokens:
            bad = [row for row, token in zip(sampling.rows, sampled.tokens, strict=True) if token < 0]
            self._limiter.log(log.error, "logits_not_finite", rows=bad, step=header.step)
        return self._rows.go_on(sampling, sampled.tokens)

    def _publish(self, header: ResultHeader, result: ResultView, *, is_last: bool) -> None:
        self._rings.set_phase(Phase.PUBLISH, header.step)
        header.last, header.finished_ns = is_last, time.monotonic_ns()
        result.write_header(header)
        self._rings.publish()
        if is_last:
            self._rings.consume(header.step)  # after the step's last result: the planner may now reuse what the slot named

    def _result_slot(self, sequence: int, stopped: Callable[[], bool]) -> NDArray[np.uint8] | None:
        """A free result slot; None when stopped while the ring was full (then nobody reads results any more)."""
        self._rings.set_phase(Phase.PUBLISH, sequence)
        while (slot := self._rings.result_slot(WAIT_NS)) is None:
            if stopped():
                return None
            self._limiter.log(log.warning, "result_ring_full", step=sequence)
        return slot


def _microseconds(started_ns: int, ended_ns: int) -> int:
    return (ended_ns - started_ns) // 1000

"""The production scheduler on a device that computes nothing but takes time, on a virtual clock.

What a step costs is a function of its decoded slot, so a test knows the truth that the scheduler's cost model has to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from core_device import Step, decode_step
from twinplane.control_plane import _core
from twinplane.shared import wire

Cost = Callable[[Step], float]  # microseconds


@dataclass
class Stream:
    """What one request showed: when its tokens came, in nanoseconds of the virtual clock."""

    submitted: int
    token_times: list[int] = field(default_factory=list)
    finish: int = _core.FINISH_NONE
    last: _core.Event | None = None

    @property
    def gaps_us(self) -> list[float]:
        return [(b - a) / 1e3 for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def linear_cost(*, constant: float, decode: float, token: float, context: float = 0.0, pair: float = 0.0, swap: float = 0.0) -> Cost:
    """A device whose steps cost exactly what the model supposes; microseconds per unit."""

    def cost(step: Step) -> float:
        total = constant + swap * (len(step.swap_outs) + len(step.swap_ins))
        for seq in step.seqs:
            n, past = int(seq["num_tokens"]), int(seq["position"])
            if seq["flags"] & wire.SeqFlag.CHUNK:
                total += token * n + pair * (n * past + n * (n + 1) / 2)
            else:
                total += decode + context * (past + 1)
        return total

    return cost


class TimedRig:
    """Runs steps back to back, as a data plane does that always finds the next one in the ring."""

    def __init__(
        self, cost: Cost, *, num_blocks: int = 4096, block_size: int = 16, host_blocks: int = 0, swap_block_ns: int = 0, **config: Any
    ) -> None:
        settings = {"max_rows": 32, "max_step_tokens": 2048, "max_chunk_tokens": 2048, "max_model_len": 8192} | config
        self.cost = cost
        self.depth = int(settings.get("depth", 2))
        core_config = _core.CoreConfig(**settings)
        self.scheduler = _core.Scheduler(core_config)
        pool = _core.Pool(num_blocks=num_blocks, block_size=block_size, num_host_blocks=host_blocks, swap_block_ns=swap_block_ns)
        self.capacities = wire.Capacities(*_core.capacities_for(core_config, pool))
        self.scheduler.attach(pool, list(self.capacities))
        self.now = 1_000
        self.streams: dict[int, Stream] = {}
        self.steps: list[tuple[Step, float]] = []  # with the time they took, in microseconds
        self._in_flight: list[Step] = []

    def submit(self, prompt_tokens: int, max_tokens: int, **params: Any) -> int:
        """A request whose prompt is like no other; its id. Raises AssertionError if it is refused."""
        request_id = len(self.streams)
        refusal = self.scheduler.submit(
            request_id,
            np.arange(prompt_tokens, dtype=np.int32) + 100_000 * request_id,
            _core.RequestParams(max_tokens=max_tokens, **params),
            self.now,
        )
        assert refusal is None, refusal
        self.streams[request_id] = Stream(self.now)
        return request_id

    def turn(self) -> bool:
        """Fill the pipeline, run one step. False if there was nothing to do."""
        while len(self._in_flight) < self.depth:
            slot = self.scheduler.tick(self.now)
            if slot is None:
                break
            self._in_flight.append(decode_step(slot, self.capacities))
            assert self._in_flight[-1].num_substeps == 1
        if self._in_flight:
            step = self._in_flight.pop(0)
            microseconds = self.cost(step)
            received, self.now = self.now, self.now + int(microseconds * 1e3)
            self.steps.append((step, microseconds))
            self.scheduler.retire(self._result(step, received), self.now)
            self._poll()
            return True
        self._poll()
        return False

    def _poll(self) -> None:
        for event in self.scheduler.poll():
            stream = self.streams[event.request_id]
            stream.token_times += [self.now] * len(event.tokens)
            if event.finish:
                stream.finish, stream.last = event.finish, event

    def _result(self, step: Step, received: int) -> bytes:
        layout = wire.ResultSlotLayout(self.capacities)
        slot = np.zeros(layout.bytes, np.uint8)
        header = slot[layout.header :].view()[: wire.RESULT_HEADER.itemsize].view(wire.RESULT_HEADER)[0]
        rows = [int(seq["row"]) for seq in step.seqs if seq["flags"] & wire.SeqFlag.SAMPLES]
        header["step"], header["num_entries"], header["last"] = step.number, len(rows), 1
        header["received_ns"], header["finished_ns"] = received, self.now
        entries = slot[layout.entries : layout.entries + len(rows) * wire.RESULT_ENTRY.itemsize].view(wire.RESULT_ENTRY)
        entries["row"], entries["token"] = rows, 7
        return slot.tobytes()


def chunk_tokens(step: Step) -> int:
    return int(step.seqs["num_tokens"][(step.seqs["flags"] & wire.SeqFlag.CHUNK) != 0].sum())

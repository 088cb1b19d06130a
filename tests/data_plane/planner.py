"""A small planner and rings in plain memory: they drive the production worker with real step bytes.

The planner does what the control plane's core does, at random: sequences arrive, get chunks of random length beside decodes, take
blocks in random order, and may be preempted; with ``depth`` 2 a decode's input is relayed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from twinplane.data_plane.worker import Worker
from twinplane.shared.wire import (
    BLOCK_COPY,
    BLOCK_SWAP,
    CANDIDATE,
    NO_TOKEN,
    RESULT_ENTRY,
    RESULT_HEADER,
    ROW_OPEN,
    SEQ_ENTRY,
    STEP_HEADER,
    TABLE_WRITE,
    Capacities,
    ExtraKind,
    ResultSlotLayout,
    RowFlag,
    SeqFlag,
    StepSlotLayout,
)

CAPACITIES = Capacities(
    ring_depth=4,
    max_rows=16,
    max_step_tokens=512,
    max_table_writes=1024,
    max_copies=64,
    max_extra_words=65536,
    max_results=16,
    max_swaps=64,
    max_candidates=256,
)


class MemoryRings:
    """Both ends of the rings, without shared memory; steps are queued by the test, results collected."""

    def __init__(self, capacities: Capacities = CAPACITIES) -> None:
        self.capacities = tuple(capacities)
        self.layout = ResultSlotLayout(capacities)
        self.steps: deque[np.ndarray] = deque()
        self.results: list[np.ndarray] = []
        self.phases: list[int] = []
        self.interrupt_after: Callable[[int], int] = lambda results: 0  # what the control plane has said, by results published
        self._slot = np.zeros(self.layout.bytes, dtype=np.uint8)
        self._next = 0
        self._open: dict[int, np.ndarray] = {}

    def wait_step(self, timeout_ns: int) -> int | None:
        if not self.steps:
            return None
        self._open[self._next] = self.steps.popleft()
        self._next += 1
        return self._next - 1

    def step(self, sequence: int) -> np.ndarray:
        return self._open[sequence]

    def consume(self, sequence: int) -> None:
        self._open.pop(sequence)[:] = 0xAA  # the slot is the writer's again: nobody may look at it

    def result_slot(self, timeout_ns: int) -> np.ndarray | None:
        self._slot[:] = 0xAA
        return self._slot

    def publish(self) -> None:
        self.results.append(self._slot.copy())

    def interrupted(self) -> int:
        return self.interrupt_after(len(self.results))

    def set_phase(self, phase: int, step: int) -> None:
        self.phases.append(int(phase))


@dataclass
class Result:
    header: Any
    entries: np.ndarray
    candidates: np.ndarray

    @classmethod
    def parse(cls, slot: np.ndarray, capacities: Capacities = CAPACITIES) -> Result:
        layout = ResultSlotLayout(capacities)
        header = slot[layout.header : layout.header + RESULT_HEADER.itemsize].view(RESULT_HEADER)[0]
        end = layout.entries + int(header["num_entries"]) * RESULT_ENTRY.itemsize
        end_of_candidates = layout.candidates + int(header["num_candidates"]) * CANDIDATE.itemsize
        return cls(header, slot[layout.entries : end].view(RESULT_ENTRY), slot[layout.candidates : end_of_candidates].view(CANDIDATE))


@dataclass
class StepBuilder:
    """Collects one step's parts and lays out its bytes."""

    step: int
    seqs: list[tuple[int, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    opens: list[Any] = field(default_factory=list)
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    substeps: int = 1

    def sequence(self, row: int, position: int, tokens: Sequence[int], *, samples: bool) -> None:
        flags = (SeqFlag.SAMPLES if samples else 0) | (SeqFlag.CHUNK if len(tokens) > 1 else 0)
        self.seqs.append((row, position, len(tokens), len(self.tokens), flags, 0))
        self.tokens += tokens

    def open(self, row: int, **parameters: Any) -> None:
        record = np.zeros(1, dtype=ROW_OPEN)[0]
        record["row"], record["temperature"], record["top_p"], record["repetition_penalty"] = row, 1.0, 1.0, 1.0
        for name, value in parameters.items():
            record[name] = value
        self.opens.append(record)

    def extra(self, row: int, kind: ExtraKind, words: Sequence[int]) -> None:
        self.extras += [row, int(kind), len(words), *words]

    def build(self, capacities: Capacities = CAPACITIES) -> np.ndarray:
        layout = StepSlotLayout(capacities)
        slot = np.zeros(layout.bytes, dtype=np.uint8)
        header = np.zeros(1, dtype=STEP_HEADER)
        header["step"], header["num_substeps"] = self.step, self.substeps
        header["num_decodes"] = sum(not flags & SeqFlag.CHUNK for *_, flags, _ in self.seqs)
        parts = (
            ("seqs", "num_seqs", np.array(self.seqs, dtype=SEQ_ENTRY)),
            ("token_ids", "num_tokens", np.array(self.tokens, dtype=np.int32)),
            ("closes", "num_closes", np.array(self.closes, dtype=np.uint32)),
            ("opens", "num_opens", np.array(self.opens, dtype=ROW_OPEN)),
            ("table_writes", "num_table_writes", np.array(self.writes, dtype=TABLE_WRITE)),
            ("swap_outs", "num_swap_outs", np.array(self.swap_outs, dtype=BLOCK_SWAP)),
            ("swap_ins", "num_swap_ins", np.array(self.swap_ins, dtype=BLOCK_SWAP)),
            ("copies", "num_copies", np.array(self.copies, dtype=BLOCK_COPY)),
            ("extras", "num_extra_words", np.array(self.extras, dtype=np.uint32)),
        )
        for region, count, values in parts:
            header[count] = len(values)
            at = getattr(layout, region)
            slot[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)
        slot[layout.header : layout.header + STEP_HEADER.itemsize] = header.view(np.uint8)
        return slot


def run_step(worker: Worker, rings: MemoryRings, step: StepBuilder) -> Result:
    """Run one step through the worker's own loop, and return its only result."""
    (result,) = run_substeps(worker, rings, step)
    return result


def run_substeps(worker: Worker, rings: MemoryRings, step: StepBuilder) -> list[Result]:
    """Run one step through the worker's own loop, and return its results."""
    capacities = Capacities(*rings.capacities)
    rings.steps.append(step.build(capacities))
    before = len(rings.results)
    worker.run(lambda: len(rings.results) > before and bool(Result.parse(rings.results[-1], capacities).header["last"]))
    return [Result.parse(result, capacities) for result in rings.results[before:]]


@dataclass
class Request:
    """What the planner serves; `sampled` fills up to `max_tokens`."""

    prompt: list[int]
    max_tokens: int
    params: dict[str, Any] = field(default_factory=lambda: {"flags": int(RowFlag.GREEDY)})
    extras: list[tuple[ExtraKind, list[int]]] = field(default_factory=list)
    arrival: int = 0  # step before which it is not admitted
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    row: int | None = None
    computed: int = 0
    pending: int = 0  # sampled by steps whose result is not read yet
    blocks: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def done(self) -> bool:
        return len(self.sampled) >= self.max_tokens


class Planner:
    """Serves requests in a random but reproducible way. Every step's bytes go through `worker`."""

    def __init__(
        self,
        worker: Worker,
        rings: MemoryRings,
        *,
        block_size: int,
        num_blocks: int,
        seed: int = 0,
        max_chunk: int = 23,
        preempt: float = 0.0,
        relay: bool = True,
    ) -> None:
        self._worker, self._rings = worker, rings
        self._random = random.Random(seed)
        self._block_size, self._max_chunk, self._preempt, self._relay = block_size, max_chunk, preempt, relay
        self._free = list(range(num_blocks))
        self._random.shuffle(self._free)
        self._rows = list(range(rings.capacities[1]))
        self._random.shuffle(self._rows)
        self._step = 0
        self._closing: list[int] = []
        self.preemptions = 0

    def serve(self, requests: list[Request]) -> list[list[int]]:
        """Run until all are done; returns their sampled tokens."""
        while not all(r.done for r in requests):
            step = StepBuilder(self._step, closes=self._take_closing())
            scheduled = [r for r in requests if not r.done and r.arrival <= self._step and self._schedule(r, step)]
            result = run_step(self._worker, self._rings, step)
            assert int(result.header["status"]) == 0
            self._step += 1
            self._collect(scheduled, result)
        return [r.sampled[: r.max_tokens] for r in requests]

    def _take_closing(self) -> list[int]:
        closing, self._closing = self._closing, []
        return closing

    def _schedule(self, request: Request, step: StepBuilder) -> bool:
        """Give a request its part of the step; True if it samples."""
        if request.row is not None and self._random.random() < self._preempt and request.sampled:
            self._release(request)
            self.preemptions += 1
            return False
        if request.row is None:
            self._admit(request, step)
        known = request.prompt + request.sampled
        rest = len(known) - request.computed
        count = 1 if rest == 1 else min(rest, self._random.randint(1, self._max_chunk))
        self._grow(request, request.computed + count, step)
        tokens = known[request.computed : request.computed + count]
        samples = request.computed + count == len(known)
        if self._relay and request.steps and count == 1 and samples and request.sampled:
            tokens = [NO_TOKEN]
        step.sequence(request.row, request.computed, tokens, samples=samples)  # type: ignore[arg-type]
        request.computed += count
        request.steps += samples
        return samples

    def _admit(self, request: Request, step: StepBuilder) -> None:
        request.row = self._rows.pop()
        step.open(request.row, **request.params)
        for kind, words in request.extras:
            step.extra(request.row, kind, words)
        step.extra(request.row, ExtraKind.PROMPT_HISTORY, request.prompt)
        if request.sampled:
            step.extra(request.row, ExtraKind.OUTPUT_HISTORY, request.sampled)
        request.steps = 0

    def _grow(self, request: Request, tokens: int, step: StepBuilder) -> None:
        while len(request.blocks) * self._block_size < tokens:
            block = self._free.pop()
            step.writes.append((request.row, len(request.blocks), block))  # type: ignore[arg-type]
            request.blocks.append(block)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        self._closing.append(request.row)
        self._rows.insert(0, request.row)
        self._free[:0] = request.blocks
        request.row, request.blocks, request.computed = None, [], 0

    def _collect(self, scheduled: list[Request], result: Result) -> None:
        assert len(result.entries) == len(scheduled)
        by_row = {r.row: r for r in scheduled}
        for entry in result.entries:
            request = by_row[int(entry["row"])]
            request.sampled.append(int(entry["token"]))
            request.logprobs.append(float(entry["logprob"]))
            request.flags.append(int(entry["flags"]))
            if request.done:
                self._release(request)

"""A fake data plane for the scheduler's tests: a device whose answers depend on every byte it was sent.

It keeps rows, block tables and KV blocks as a real one would, but a KV slot holds (position, token) instead of vectors, and the
next token is a hash of all tokens *read back through the block table*. A wrong position, table entry, relay, history or a block
reused too early therefore ends in an assertion or a wrong token. :func:`expected_output` gives the right ones without any device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from twinplane.control_plane import _core
from twinplane.shared import wire

VOCAB = 50
EOS = 0
COPIES = -1  # stands for the copies of a step where rows are named
PHASES_US = (3, 500, 20)  # what each result says applying, the model and sampling took
NAN_TOKEN = VOCAB  # a prompt that holds it makes the logits of its row NaN


@dataclass(frozen=True)
class Request:
    """A request as the tests think of it; ``params()`` is what the core gets."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    eos: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    allowed: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    priority: int = 0
    deadline_ns: int = 0
    cache: bool = True
    cache_key: bytes = b""
    tenant: str = ""
    n: int = 1
    stream: int = 0
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: int = 0

    def params(self) -> _core.RequestParams:
        return _core.RequestParams(
            max_tokens=self.max_tokens,
            eos_token_ids=list(self.eos),
            stop_token_ids=list(self.stops),
            min_tokens=self.min_tokens,
            temperature=1.0 if self.seed else 0.0,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
            allowed_token_ids=list(self.allowed),
            logit_bias=list(self.bias),
            priority=self.priority,
            deadline_ns=self.deadline_ns,
            cache=self.cache,
            cache_key=self.cache_key,
            tenant=self.tenant,
            n=self.n,
            stream=self.stream,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


def draw(tokens: Iterable[int], seed: int, allowed: Iterable[int], suppressed: Iterable[int], edits: int) -> int:
    """The next token: a pure function of everything before it and of the row's edits."""
    state = zlib.crc32(np.fromiter(tokens, np.int32).tobytes(), (seed + 7919 * edits) & 0xFFFFFFFF)
    banned = set(suppressed)
    candidates = [token for token in (sorted(allowed) or range(VOCAB)) if token not in banned]
    return candidates[state % len(candidates)]


def candidates_of(tokens: Iterable[int], suppressed: Iterable[int]) -> list[tuple[int, float]]:
    """Every token that may follow, likeliest first, lower ids first among equals."""
    state = zlib.crc32(np.fromiter(tokens, np.int32).tobytes())
    banned = set(suppressed)
    logprobs = {token: float(np.float32(-((state >> (token % 7)) * (token + 3) % 997 + 1) / 300)) for token in range(VOCAB)}
    return sorted(((token, -1e9 if token in banned else value) for token, value in logprobs.items()), key=lambda c: (-c[1], c[0]))


def logprob_of(token: int, position: int) -> float:
    return float(np.float32(-(token + 1) / (position + 1)))


def edits_of(request: Request) -> int:
    """What the biases and penalties of a row add up to in the fake."""
    bias = sum(token * int(value) for token, value in request.bias)
    return bias + int(request.repetition_penalty * 8) + int(request.frequency_penalty * 64)


def expected_output(request: Request) -> tuple[list[int], int, int]:
    """(tokens, FINISH_*, match) of the request, had it the device for itself."""
    tokens = list(request.prompt)
    output: list[int] = []
    if NAN_TOKEN in tokens:
        return [], _core.FINISH_NOT_FINITE, -1
    while len(output) < request.max_tokens:
        early = len(output) < request.min_tokens
        token = draw(
            tokens, request.seed + 101 * request.stream, request.allowed, request.eos + request.stops if early else (), edits_of(request)
        )
        tokens.append(token)
        output.append(token)
        if not early and token in request.eos:
            return output, _core.FINISH_EOS, token
        if not early and token in request.stops:
            return output, _core.FINISH_STOP_TOKEN, token
    return output, _core.FINISH_LENGTH, -1


@dataclass
class Step:
    """A decoded step slot."""

    number: int
    num_decodes: int
    num_substeps: int
    seqs: NDArray[np.void]
    token_ids: NDArray[np.int32]
    closes: NDArray[np.uint32]
    opens: NDArray[np.void]
    table_writes: NDArray[np.void]
    copies: NDArray[np.void]
    forks: NDArray[np.void]
    swap_outs: NDArray[np.void]
    swap_ins: NDArray[np.void]
    extras: list[tuple[int, int, list[int]]]  # (row, kind, words)

    @property
    def rows(self) -> set[int]:
        return {int(entry["row"]) for entry in self.seqs}


def decode_step(slot: bytes | NDArray[np.uint8], capacities: wire.Capacities) -> Step:
    layout = wire.StepSlotLayout(capacities)
    header = np.frombuffer(slot, wire.STEP_HEADER, 1, layout.header)[0]

    def region(dtype: np.dtype | str, offset: int, count: str) -> NDArray:  # type: ignore[type-arg]
        return np.frombuffer(slot, dtype, int(header[count]), offset).copy()

    words = region("<u4", layout.extras, "num_extra_words").tolist()
    extras = []
    while words:
        row, kind, n = words[:3]
        extras.append((row, kind, words[3 : 3 + n]))
        words = words[3 + n :]
    return Step(
        int(header["step"]),
        int(header["num_decodes"]),
        int(header["num_substeps"]),
        region(wire.SEQ_ENTRY, layout.seqs, "num_seqs"),
        region("<i4", layout.token_ids, "num_tokens"),
        region("<u4", layout.closes, "num_closes"),
        region(wire.ROW_OPEN, layout.opens, "num_opens"),
        region(wire.TABLE_WRITE, layout.table_writes, "num_table_writes"),
        region(wire.BLOCK_COPY, layout.copies, "num_copies"),
        region(wire.ROW_FORK, layout.forks, "num_forks"),
        region(wire.BLOCK_SWAP, layout.swap_outs, "num_swap_outs"),
        region(wire.BLOCK_SWAP, layout.swap_ins, "num_swap_ins"),
        extras,
    )


@dataclass
class Row:
    open: np.void
    table: dict[int, int] = field(default_factory=dict)
    last_token: int | None = None
    prompt_history: list[int] | None = None
    output_history: list[int] = field(default_factory=list)
    bias: int = 0
    allowed: list[int] = field(default_factory=list)
    suppressed: tuple[int, list[int]] = (0, [])
    stops: tuple[int, list[int]] = (0, [])

    def attach(self, kind: int, words: list[int]) -> None:
        if kind == wire.ExtraKind.PROMPT_HISTORY:
            self.prompt_history = words
        elif kind == wire.ExtraKind.OUTPUT_HISTORY:
            self.output_history = list(words)
        elif kind == wire.ExtraKind.LOGIT_BIAS:
            values = np.array(words[1::2], np.uint32).view(np.float32)
            self.bias = sum(token * int(value) for token, value in zip(words[::2], values, strict=True))
        elif kind == wire.ExtraKind.ALLOWED_TOKENS:
            self.allowed = words
        elif kind == wire.ExtraKind.STOP_TOKENS:
            self.stops = (words[0], words[1:])
        else:
            assert kind == wire.ExtraKind.SUPPRESSED_TOKENS
            self.suppressed = (words[0], words[1:])

    def ends_with(self, token: int, position: int) -> bool:
        """Its sequence ends with this token at this position."""
        return position + 1 == self.open["limit"] or (position >= self.stops[0] and token in self.stops[1])


class FakeDevice:
    """Steps are taken by :meth:`send` and executed, strictly in order, substep by substep, by :meth:`run_next`."""

    def __init__(self, capacities: wire.Capacities, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.capacities = capacities
        self.block_size = block_size
        self.kv = np.full((num_blocks, block_size, 2), -1, np.int64)  # (position, token)
        self.host = np.full((num_host_blocks, block_size, 2), -1, np.int64)
        self.now_ns = 0  # the clock of whoever drives it
        self.rows: dict[int, Row] = {}
        self._tokens: dict[int, list[int]] = {}  # by row, what its last sample was made of
        self._candidates: list[tuple[int, float]] = []  # of the step being executed
        self.in_flight: list[tuple[Step, dict[int, set[int]]]] = []  # with the blocks each row may touch; copies are nobody's row
        self.substeps_run = 0  # of the oldest step in flight
        self._going_on: list[tuple[int, int]] = []  # rows of it that have not ended, and the position of their last token
        self.sent_tables: dict[int, dict[int, int]] = {}  # block tables as they will be after all sent steps

    def send(self, slot: bytes | NDArray[np.uint8]) -> Step:
        """Takes a step, and checks INV-3: nothing it hands out may be named by a step that has not retired."""
        step = decode_step(slot, self.capacities)
        if step.num_substeps > 1:
            assert not self.in_flight and step.num_decodes == len(step.seqs) > 0 and not len(step.copies), "INV-12"
            assert not len(step.opens) and not len(step.forks) and not len(step.swap_outs) and not len(step.swap_ins)
        assert all(earlier.num_substeps == 1 for earlier, _ in self.in_flight), "INV-12: sent behind a step of several substeps"
        busy_rows = {row for earlier, _ in self.in_flight for row in earlier.rows}
        for row in step.closes.tolist():
            del self.sent_tables[row]
        for opened in step.opens:
            row = int(opened["row"])
            assert row not in self.sent_tables, f"row {row} opened twice"
            assert row not in busy_rows, f"row {row} opened while a step in flight names it"
            self.sent_tables[row] = {}
        for row, index, block in step.table_writes.tolist():
            self.sent_tables[row][index] = block
        children = {row for row, _, _ in step.forks.tolist()}
        for row, parent, count in step.forks.tolist():
            assert parent not in children, "a parent of a fork is the child of another one"
            self.sent_tables[row] |= {index: self.sent_tables[parent][index] for index in range(count)}
        named = {int(seq["row"]): self._named_by(step, seq) for seq in step.seqs}
        named[COPIES] = {source for source, _ in step.copies.tolist()}  # the target is in a row's table
        self._check_writes(step)
        self.in_flight.append((step, named))
        return step

    def _named_by(self, step: Step, seq: np.void) -> set[int]:
        """The blocks a row may touch: those of its context. Entries beyond it are left over, and mean nothing."""
        context = int(seq["position"]) + int(seq["num_tokens"]) + step.num_substeps - 1
        return {block for index, block in self.sent_tables[int(seq["row"])].items() if index * self.block_size < context}

    def _check_writes(self, step: Step) -> None:
        """What the step writes, no other row of it writes, and no step in flight names for anybody else."""
        writers = [(COPIES, target) for _, target in step.copies.tolist()]
        for seq in step.seqs:
            row, first, count = int(seq["row"]), int(seq["position"]), int(seq["num_tokens"])
            last = first + count - 1
            if step.num_substeps > 1:
                last = min(last + step.num_substeps - 1, max(self.sent_tables[row]) * self.block_size + self.block_size - 1)
            indices = range(first // self.block_size, last // self.block_size + 1)
            writers += [(row, self.sent_tables[row][index]) for index in indices]
        for _, block in writers:
            rows = {other for other, written in writers if written == block}
            assert len(rows - {COPIES}) <= 1, f"block {block} is written by rows {rows}"
            for _, named in self.in_flight:
                users = {user for user, blocks in named.items() if block in blocks}
                if users & rows - {COPIES}:
                    users -= {COPIES}  # its owner goes on in it, behind what was copied
                assert users <= rows - {COPIES}, f"block {block} of {rows} reused while a step in flight names it for {users}"

    def run_next(self, interrupted: int = 0) -> bytes:
        """Executes a substep of the oldest step in flight; the bytes of its result slot. The step retires when the scheduler gets its last.

        ``interrupted``: steps below this number end with this substep.
        """
        step, _ = self.in_flight[0]
        entries = self._run_first(step) if self.substeps_run == 0 else self._run_on()
        self.substeps_run += 1
        ended = {entry[0] for entry in entries if entry[4] or self.rows[entry[0]].ends_with(entry[1], len(self._tokens[entry[0]]))}
        self._going_on = [(row, len(self._tokens[row])) for row, *_ in entries if row not in ended]
        last = self.substeps_run == step.num_substeps or not self._going_on or interrupted > step.number
        result = self.result(step.number, entries, self._candidates, substep=self.substeps_run - 1, last=last)
        if last:
            self.in_flight.pop(0)
            self.substeps_run = 0
        return result

    def _run_on(self) -> list[tuple[int, int, float, int, int]]:
        """Every row that goes on takes the token it sampled last."""
        self._candidates = []
        for number, position in self._going_on:
            self._slot(self.rows[number], position)[:] = (position, self.rows[number].last_token)
        return [self._sample(number, self.rows[number], self._context(number, position + 1)) for number, position in self._going_on]

    def _run_first(self, step: Step) -> list[tuple[int, int, float, int, int]]:
        for row in step.closes.tolist():
            del self.rows[row]
        for opened in step.opens:
            self.rows[int(opened["row"])] = Row(opened)
        for row, kind, words in step.extras:
            self.rows[row].attach(kind, words)
        for row, index, block in step.table_writes.tolist():
            self.rows[row].table[index] = block
        for row, parent, count in step.forks.tolist():
            self.rows[row].table |= {index: self.rows[parent].table[index] for index in range(count)}
        for block, host in step.swap_outs.tolist():
            self.host[host] = self.kv[block]
        for block, host in step.swap_ins.tolist():
            self.kv[block] = self.host[host]
        for source, target in step.copies.tolist():
            self.kv[target] = self.kv[source]
        # All KV of a step is written before any is read, layer by layer.
        for seq in step.seqs:
            self._write(seq, step.token_ids)
        self._candidates = []
        return [entry for seq in step.seqs if (entry := self._read(seq)) is not None]

    def _write(self, seq: np.void, token_ids: NDArray[np.int32]) -> None:
        row = self.rows[int(seq["row"])]
        first, count, start = int(seq["position"]), int(seq["num_tokens"]), int(seq["token_start"])
        assert count > 0
        for i, token in enumerate(token_ids[start : start + count].tolist()):
            if token == wire.NO_TOKEN:
                assert i == count - 1 and row.last_token is not None, "only the last token can be relayed"
                token = row.last_token
            self._slot(row, first + i)[:] = (first + i, token)

    def _read(self, seq: np.void) -> tuple[int, int, float, int, int] | None:
        if not seq["flags"] & wire.SeqFlag.SAMPLES:
            return None
        number = int(seq["row"])
        return self._sample(number, self.rows[number], self._context(number, int(seq["position"]) + int(seq["num_tokens"])))

    def _context(self, number: int, past: int) -> list[int]:
        """The tokens before position ``past``, read back through the block table."""
        content = np.array([self._slot(self.rows[number], p) for p in range(past)])
        assert (content[:, 0] == np.arange(past)).all(), "the block table leads to somebody else's KV"
        self._tokens[number] = content[:, 1].tolist()
        return self._tokens[number]

    def _slot(self, row: Row, position: int) -> NDArray[np.int64]:
        return self.kv[row.table[position // self.block_size], position % self.block_size]

    def _sample(self, number: int, row: Row, tokens: list[int]) -> tuple[int, int, float, int, int]:
        if NAN_TOKEN in tokens:
            row.last_token = 0  # a step sent meanwhile may relay it; what comes of that is dropped
            return number, 0, 0.0, 0, int(wire.ResultFlag.NOT_FINITE)
        opened = row.open
        if row.prompt_history is not None:
            assert row.prompt_history + row.output_history == tokens, "penalty history differs from the tokens"
        if opened["frequency_penalty"] != 0:
            assert tokens[len(tokens) - len(row.output_history) :] == row.output_history
        edits = row.bias + int(opened["repetition_penalty"] * 8) + int(opened["frequency_penalty"] * 64)
        position = len(tokens)
        suppressed = row.suppressed[1] if position < row.suppressed[0] else []
        if opened["num_candidates"]:
            self._candidates += candidates_of(tokens, suppressed)[: int(opened["num_candidates"])]
        token = draw(tokens, int(opened["seed"]) + 101 * int(opened["stream"]), row.allowed, suppressed, edits)
        row.last_token = token
        row.output_history.append(token)
        rank = 1 if opened["flags"] & wire.RowFlag.LOGPROBS else 0
        return number, token, logprob_of(token, position), rank, 0

    def result(
        self,
        step: int,
        entries: list[tuple[int, int, float, int, int]],
        candidates: Iterable[tuple[int, float]] = (),
        *,
        status: int = 0,
        substep: int = 0,
        last: bool = True,
    ) -> bytes:
        """A result slot's bytes; entries are (row, token, logprob, rank, flags)."""
        layout = wire.ResultSlotLayout(self.capacities)
        slot = np.zeros(layout.bytes, np.uint8)
        header = slot[layout.header :].view()[: wire.RESULT_HEADER.itemsize].view(wire.RESULT_HEADER)[0]
        header["step"], header["status"], header["num_entries"], header["last"] = step, status, len(entries), last
        header["finished_ns"], header["substep"] = self.now_ns, substep
        header["apply_us"], header["forward_us"], header["sample_us"] = PHASES_US
        target = slot[layout.entries : layout.entries + len(entries) * wire.RESULT_ENTRY.itemsize].view(wire.RESULT_ENTRY)
        for i, entry in enumerate(entries):
            target[i] = entry
        given = np.array(list(candidates), wire.CANDIDATE)
        header["num_candidates"] = len(given)
        slot[layout.candidates : layout.candidates + given.nbytes] = given.view(np.uint8)
        return slot.tobytes()

"""Permanent rows: one seat per resident sequence, updated by the deltas of each step (shared/PROTOCOL.md, section 5).

A row holds its line of the block table, its sampling parameters and attachments, and the token it sampled last.
Everything else about a sequence is known to the control plane alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.step import StepView
from twinplane.shared.wire import NO_TOKEN, ROW_OPEN, Capacities, ExtraKind, ResultFlag, SeqFlag

Ids = NDArray[np.int64]


class StepError(ValueError):
    """A step that contradicts the protocol; the message names row and value."""


@dataclass(slots=True)
class Attachments:
    """What a row carries beyond its fixed parameters. None = not given."""

    bias_ids: Ids | None = None
    bias_values: NDArray[np.float32] | None = None
    allowed: Ids | None = None
    suppressed: Ids | None = None
    suppressed_before: int = 0  # first position at which `suppressed` are allowed again
    output_counts: NDArray[np.int32] | None = None  # [vocab]; present if the row has penalties
    seen: NDArray[np.bool_] | None = None  # [vocab], in prompt or output; present if the row has penalties


@dataclass(slots=True)
class Decodes:
    """What is left of a step of several substeps: its rows that have not ended, each with one token to go in the next substep."""

    rows: Ids  # [R], in the step's order
    positions: Ids  # [R], of the token each sampled last, which goes in next
    block_tables: NDArray[np.int32]  # [R, M], wide enough for every substep
    substeps: int  # to go


class Rows:
    """State of all rows. Not thread-safe: the worker's loop owns it."""

    def __init__(self, capacities: Capacities, *, block_size: int, max_model_len: int, num_blocks: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.params = np.zeros(capacities.max_rows, dtype=ROW_OPEN)
        self.last_token = np.full(capacities.max_rows, NO_TOKEN, dtype=np.int32)
        self.attachments: dict[int, Attachments] = {}
        self._num_blocks = num_blocks
        # Tokens that end a row, padded with NO_TOKEN, from position `_stops_from` on. Apart from the attachments: nearly every row
        # has some, and only steps of several substeps look at them.
        self._stop_ids = np.full((capacities.max_rows, 0), NO_TOKEN, dtype=np.int32)
        self._stops_from = np.zeros(capacities.max_rows, dtype=np.int64)
        # One column more than a sequence needs: the control plane may reserve the next block early.
        self._block_table = np.zeros((capacities.max_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)

    # ------------------------------------------------------------------------------------------- deltas

    def apply(self, step: StepView) -> None:
        """Closes, opens, extras, table writes, forks, in this order. Raises StepError."""
        for row in step.closes.tolist():
            self.attachments.pop(row, None)
        if len(step.opens):
            self._open(step)
        if len(step.extras):
            self._attach(step.extras)
        if len(step.table_writes):
            self._write_table(step)
        for row, parent, num_blocks in step.forks.tolist():
            if num_blocks > self._block_table.shape[1]:
                raise StepError(f"row {row} forks {num_blocks} blocks, a row has {self._block_table.shape[1]}")
            self._block_table[row, :num_blocks] = self._block_table[parent, :num_blocks]

    def _open(self, step: StepView) -> None:
        rows = step.opens["row"]
        if int(step.opens["num_candidates"].max()) > self.vocab_size:
            raise StepError(f"a row wants {int(step.opens['num_candidates'].max())} candidates, the vocabulary has {self.vocab_size}")
        self.params[rows] = step.opens
        self.last_token[rows] = NO_TOKEN
        self._stop_ids[rows] = NO_TOKEN
        for row in rows.tolist():
            self.attachments.pop(row, None)
            if has_penalties(self.params[row]):
                self.attachments[row] = Attachments(
                    output_counts=np.zeros(self.vocab_size, dtype=np.int32), seen=np.zeros(self.vocab_size, dtype=np.bool_)
                )

    def _attach(self, words: NDArray[np.uint32]) -> None:
        """Records of {row, kind, n, n words}, back to back."""
        at = 0
        while at < len(words):
            row, kind, count = words[at : at + 3].tolist()
            payload = words[at + 3 : at + 3 + count]
            if len(payload) != count:
                raise StepError(f"attachment of row {row} says {count} words, only {len(payload)} follow")
            if kind == ExtraKind.STOP_TOKENS:
                self._stop_at(row, payload)
            else:
                self._attach_one(row, self.attachments.setdefault(row, Attachments()), ExtraKind(kind), payload)
            at += 3 + count

    def _stop_at(self, row: int, words: NDArray[np.uint32]) -> None:
        ids = words[1:].astype(np.int32)
        if (more := len(ids) - self._stop_ids.shape[1]) > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        self._stops_from[row] = words[0]
        self._stop_ids[row, : len(ids)] = ids

    def _attach_one(self, row: int, to: Attachments, kind: ExtraKind, words: NDArray[np.uint32]) -> None:
        if kind is ExtraKind.LOGIT_BIAS:
            to.bias_ids, to.bias_values = self._token_ids(row, words[0::2]), words[1::2].copy().view(np.float32)
        elif kind is ExtraKind.ALLOWED_TOKENS:
            to.allowed = self._token_ids(row, words)
        elif kind is ExtraKind.SUPPRESSED_TOKENS:
            to.suppressed_before, to.suppressed = int(words[0]), self._token_ids(row, words[1:])
        elif to.seen is not None and to.output_counts is not None:  # histories matter to penalties only
            ids = self._token_ids(row, words)
            to.seen[ids] = True
            if kind is ExtraKind.OUTPUT_HISTORY:
                np.add.at(to.output_counts, ids, 1)

    def _token_ids(self, row: int, words: NDArray[np.uint32]) -> Ids:
        ids = words.astype(np.int64)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise StepError(f"attachment of row {row} names token {int(ids.max())}, the vocabulary has {self.vocab_size}")
        return ids

    def _write_table(self, step: StepView) -> None:
        writes = step.table_writes
        if int(writes["block"].max()) >= self._num_blocks:
            raise StepError(f"table write names block {int(writes['block'].max())}, the pool has {self._num_blocks}")
        if int(writes["index"].max()) >= self._block_table.shape[1]:
            raise StepError(f"table write at index {int(writes['index'].max())}, a row has {self._block_table.shape[1]} blocks")
        self._block_table[writes["row"], writes["index"]] = writes["block"]

    # -------------------------------------------------------------------------------------------- batch

    def batch(self, step: StepView) -> Batch:
        """The flattened batch of a step whose deltas have been applied. Copies what it needs out of the slot."""
        seqs = step.seqs
        if seqs["num_drafts"].any():
            raise StepError("draft tokens are not supported by this data plane")
        rows = seqs["row"].astype(np.int64)
        first = seqs["position"].astype(np.int64)
        counts = seqs["num_tokens"].astype(np.int64)
        starts = np.zeros(len(seqs) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        sequence = np.repeat(np.arange(len(seqs)), counts)
        offset = np.arange(starts[-1]) - starts[sequence]  # of each token in its sequence's part of the step
        positions = first[sequence] + offset
        token_rows = rows[sequence]
        block, within = np.divmod(positions, self.block_size)
        slots = self._block_table[token_rows, block].astype(np.int64) * self.block_size + within
        context = first + counts
        width = -(-int(context.max(initial=1)) // self.block_size)
        samples = (seqs["flags"] & SeqFlag.SAMPLES) != 0
        return Batch(
            token_ids=torch.from_numpy(self._tokens(step, seqs["token_start"].astype(np.int64)[sequence] + offset, token_rows)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_start=torch.from_numpy(starts.astype(np.int32)),
            context_lens=torch.from_numpy(context.astype(np.int32)),
            block_tables=torch.from_numpy(self._block_table[rows, :width]),
            sample_tokens=torch.from_numpy(starts[1:][samples] - 1),
        )

    def _tokens(self, step: StepView, where: Ids, token_rows: Ids) -> Ids:
        """Input tokens, with NO_TOKEN replaced by what the row sampled last (the relay)."""
        tokens = step.token_ids[where].astype(np.int64)
        relayed = tokens == NO_TOKEN
        if relayed.any():
            tokens[relayed] = self.last_token[token_rows[relayed]]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            bad = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise StepError(f"row {int(token_rows[bad])} has input token {int(tokens[bad])}, the vocabulary has {self.vocab_size}")
        return tokens

    # --------------------------------------------------------------------------------------- substeps

    def decodes(self, step: StepView) -> Decodes:
        """All rows of a step of several substeps, after the first of which each will have sampled one token. Raises StepError."""
        seqs = step.seqs
        if step.num_decodes != len(seqs) or not (seqs["flags"] & SeqFlag.SAMPLES).all():
            raise StepError(f"a step of {step.num_substeps} substeps has {len(seqs)} sequences, of which {step.num_decodes} are decodes")
        rows, positions = seqs["row"].astype(np.int64), seqs["position"].astype(np.int64) + 1
        width = -(-(int(positions.max()) + step.num_substeps - 1) // self.block_size)
        return Decodes(rows, positions, self._block_table[rows, :width], step.num_substeps - 1)

    def go_on(self, decodes: Decodes, entries: NDArray[np.void]) -> bool:
        """`decodes` have sampled `entries` [R]: drops the rows which that ends. Returns whether a substep is to follow."""
        kept = np.flatnonzero(~self._ended(decodes, entries))
        if len(kept) < len(entries):
            decodes.rows, decodes.positions = decodes.rows[kept], decodes.positions[kept]
            decodes.block_tables = decodes.block_tables[kept]
        return len(kept) > 0 and decodes.substeps > 0

    def _ended(self, decodes: Decodes, entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which rows have no next token, by the rules of the control plane, whose word counts: a stop token, length, no logits."""
        rows, positions = decodes.rows, decodes.positions
        stopped = (self._stop_ids[rows] == entries["token"][:, None]).any(axis=1) & (positions >= self._stops_from[rows])
        finished = (positions + 1 >= self.params["limit"][rows]) | ((entries["flags"] & ResultFlag.NOT_FINITE) != 0)
        ended: NDArray[np.bool_] = stopped | finished
        return ended

    def next_batch(self, decodes: Decodes) -> Batch:
        """The batch of the next substep, whose inputs are the tokens sampled last; `decodes` move on by one token."""
        count, positions = len(decodes.rows), decodes.positions
        block, within = np.divmod(positions, self.block_size)
        slots = decodes.block_tables[np.arange(count), block].astype(np.int64) * self.block_size + within
        decodes.positions = positions + 1
        decodes.substeps -= 1
        return Batch(
            token_ids=torch.from_numpy(self.last_token[decodes.rows].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_start=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.from_numpy(decodes.positions.astype(np.int32)),
            block_tables=torch.from_numpy(decodes.block_tables),
            sample_tokens=torch.arange(count),
        )

    # ---------------------------------------------------------------------------------------- sampling

    def num_candidates(self, rows: Ids) -> int:
        """How many candidates `rows` return together, at most."""
        return int(self.params["num_candidates"][rows].sum())

    def record(self, rows: Ids, tokens: NDArray[np.int32]) -> None:
        """`tokens` were sampled by `rows`: they are what a relay will find, and what penalties count."""
        self.last_token[rows] = tokens
        if not self.attachments:
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            attachments = self.attachments.get(row)
            if attachments is not None and attachments.output_counts is not None and attachments.seen is not None:
                attachments.output_counts[token] += 1
                attachments.seen[token] = True


def has_penalties(params: np.void) -> bool:
    return bool(params["repetition_penalty"] != 1 or params["presence_penalty"] != 0 or params["frequency_penalty"] != 0)

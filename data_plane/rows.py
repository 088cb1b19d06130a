"""Permanent rows: one seat per resident sequence, updated by the deltas of each step (shared/PROTOCOL.md, section 5).

A row holds its line of the block table, its sampling parameters and attachments, and the token it sampled last.
Everything else about a sequence is known to the control plane alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.step import Entry, StepView
from twinplane.shared.wire import NO_TOKEN, ROW_OPEN, Capacities, ExtraKind, RowFlag, SeqFlag

Ids = NDArray[np.int64]
_SAMPLES = int(SeqFlag.SAMPLES)


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
class Stops:
    """What ends a row beside its limit. Apart from the attachments: nearly every row has some, and only steps of several substeps
    look at them."""

    tokens: frozenset[int]
    from_position: int  # the first at which they count


@dataclass(slots=True)
class Sampling:
    """The rows of a step that sample, in its order. In further substeps: those of them that have not ended."""

    rows: list[int]
    positions: list[int]  # that the tokens they sample next take
    substeps: int  # to go after the one under way


class Rows:
    """State of all rows. Not thread-safe: the worker's loop owns it."""

    def __init__(self, capacities: Capacities, *, block_size: int, max_model_len: int, num_blocks: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.params = np.zeros(capacities.max_rows, dtype=ROW_OPEN)
        self._limits = self.params["limit"]
        self.last_token = [NO_TOKEN] * capacities.max_rows
        self.attachments: dict[int, Attachments] = {}
        self.drawing: set[int] = set()  # rows that draw their tokens; all others take the likeliest
        self.explaining: set[int] = set()  # rows that return log-probabilities or candidates
        self._num_blocks = num_blocks
        self._stops: dict[int, Stops] = {}
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
        for row in rows.tolist():
            params = self.params[row]
            self.last_token[row] = NO_TOKEN
            self._stops.pop(row, None)
            _put(row, self.drawing, not params["flags"] & RowFlag.GREEDY and params["temperature"] > 0)
            _put(row, self.explaining, params["flags"] & RowFlag.LOGPROBS or params["num_candidates"] > 0)
            self.attachments.pop(row, None)
            if has_penalties(params):
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
                self._stops[row] = Stops(frozenset(payload[1:].tolist()), int(payload[0]))
            else:
                self._attach_one(row, self.attachments.setdefault(row, Attachments()), ExtraKind(kind), payload)
            at += 3 + count

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
    #
    # A decode is plain Python, which costs less than numpy does by being called at all when its code lies in no cache; a chunk of a
    # prompt is numpy, so that nothing is done per token.

    def batch(self, step: StepView) -> tuple[Batch, Sampling]:
        """The flattened batch of a step whose deltas have been applied, and who samples. Copies what it needs out of the slot."""
        seqs = step.seqs.tolist()
        inputs = np.empty((3, sum(seq[2] for seq in seqs)), dtype=np.int64)  # token, position and slot of each
        singles: list[int] = []  # which of them are decodes, or as short
        single_inputs: list[tuple[int, int, int]] = []
        starts, contexts, sample_tokens = [0], [], []
        sampling = Sampling([], [], step.num_substeps - 1)
        for row, position, count, token_start, flags, num_drafts in seqs:
            if num_drafts:
                raise StepError("draft tokens are not supported by this data plane")
            context = position + count
            if count == 1:
                singles.append(starts[-1])
                single_inputs.append((self._input(row, step.token_ids.item(token_start)), position, self._slot(row, position)))
            else:
                chunk = inputs[:, starts[-1] : starts[-1] + count]
                self._put_chunk(chunk, row, position, step.token_ids[token_start : token_start + count])
            contexts.append(context)
            starts.append(starts[-1] + count)
            if flags & _SAMPLES:
                sample_tokens.append(starts[-1] - 1)
                sampling.rows.append(row)
                sampling.positions.append(context)
        if sampling.substeps and not len(seqs) == step.num_decodes == len(sampling.rows):
            raise StepError(f"a step of {step.num_substeps} substeps has {len(seqs)} sequences, of which {step.num_decodes} are decodes")
        if singles:
            inputs.T[singles] = single_inputs
        return self._batch(inputs, [seq[0] for seq in seqs], starts, contexts, sample_tokens), sampling

    def _put_chunk(self, to: NDArray[np.int64], row: int, position: int, tokens: NDArray[np.int32]) -> None:
        """Fill `to` [3, n] for the next n tokens of a row."""
        where = np.arange(position, position + len(tokens))
        block, within = np.divmod(where, self.block_size)
        to[0], to[1], to[2] = tokens, where, self._block_table[row, block].astype(np.int64) * self.block_size + within
        for i in np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size)).tolist():
            to[0, i] = self._input(row, tokens.item(i))

    def _input(self, row: int, token: int) -> int:
        """An input token of a row: what it sampled last if it says NO_TOKEN (the relay)."""
        if token == NO_TOKEN:
            token = self.last_token[row]
        if not 0 <= token < self.vocab_size:
            raise StepError(f"row {row} has input token {token}, the vocabulary has {self.vocab_size}")
        return token

    def _slot(self, row: int, position: int) -> int:
        return self._block_table.item(row, position // self.block_size) * self.block_size + position % self.block_size

    def next_batch(self, sampling: Sampling) -> Batch:
        """The batch of the next substep, whose inputs are the tokens sampled last; `sampling` moves on by one token."""
        rows, positions = sampling.rows, sampling.positions
        sampling.positions = [position + 1 for position in positions]
        sampling.substeps -= 1
        slots = [self._slot(row, position) for row, position in zip(rows, positions, strict=True)]
        inputs = np.array(([self.last_token[row] for row in rows], positions, slots), dtype=np.int64)
        return self._batch(inputs, rows, list(range(len(rows) + 1)), sampling.positions, list(range(len(rows))))

    def _batch(self, inputs: NDArray[np.int64], rows: list[int], starts: list[int], contexts: list[int], sample_tokens: list[int]) -> Batch:
        """`inputs`: token, position and slot of each token; the others as in Batch."""
        token_ids, positions, slots = map(torch.from_numpy, inputs)
        width = -(-max(contexts, default=1) // self.block_size)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=torch.from_numpy(np.array(starts, dtype=np.int32)),
            context_lens=torch.from_numpy(np.array(contexts, dtype=np.int32)),
            block_tables=torch.from_numpy(self._block_table[rows, :width]),
            sample_tokens=torch.from_numpy(np.array(sample_tokens, dtype=np.int64)),
        )

    # --------------------------------------------------------------------------------------- substeps

    def go_on(self, sampling: Sampling, tokens: list[int]) -> bool:
        """`sampling` have sampled `tokens` (Sampled.tokens): drops the rows which that ends. Returns whether a substep is to follow."""
        if not sampling.substeps:
            return False
        rows, positions = sampling.rows, sampling.positions
        kept = [i for i, token in enumerate(tokens) if not self._ends(rows[i], positions[i], token)]
        if len(kept) < len(tokens):
            sampling.rows, sampling.positions = [rows[i] for i in kept], [positions[i] for i in kept]
        return len(kept) > 0

    def _ends(self, row: int, position: int, token: int) -> bool:
        """Whether the row has no next token, by the rules of the control plane, whose word counts: no logits, a stop token, length."""
        stops = self._stops.get(row)
        stopped = stops is not None and token in stops.tokens and position >= stops.from_position
        return token < 0 or stopped or position + 1 >= self._limits.item(row)

    # ---------------------------------------------------------------------------------------- sampling

    def record(self, entries: Iterable[Entry]) -> None:
        """`entries` were sampled: their tokens are what a relay will find, and what penalties count."""
        for row, token, *_ in entries:
            self.last_token[row] = token
            attachments = self.attachments.get(row)
            if attachments is not None and attachments.output_counts is not None and attachments.seen is not None:
                attachments.output_counts[token] += 1
                attachments.seen[token] = True


def _put(row: int, rows: set[int], belongs: object) -> None:
    (rows.add if belongs else rows.discard)(row)


def has_penalties(params: np.void) -> bool:
    return bool(params["repetition_penalty"] != 1 or params["presence_penalty"] != 0 or params["frequency_penalty"] != 0)

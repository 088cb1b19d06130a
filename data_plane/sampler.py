"""Chooses tokens from logits, in exactly the order of shared/PROTOCOL.md section 5.

Every row is computed from its own logits, parameters and counter alone, by operations whose result does not
depend on the other rows (no batched sum whose order could change with the batch): INV-10.

Rows that need nothing else cost one argmax or one draw, each a single call for the whole batch; edits, penalties,
log-probabilities and candidates are paid for by the rows that have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.rows import Attachments, Rows, has_penalties
from twinplane.data_plane.step import Candidate, Entry
from twinplane.kernels.registry import Ops
from twinplane.shared.wire import ResultFlag, RowFlag

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_NOT_FINITE, _LOGPROBS = int(ResultFlag.NOT_FINITE), int(RowFlag.LOGPROBS)
_BOUNDS = (-4.0, -8.0, -16.0, -np.inf)  # below the greatest logit, for the likeliest tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's rows have sampled."""

    tokens: list[int]  # [R]; -1: none could be
    entries: list[Entry]  # [R]
    candidates: list[Candidate]  # of the rows that return some, one after another


class Sampler:
    """Samples for the rows of a session, with the operations of its device."""

    def __init__(self, rows: Rows, ops: Ops) -> None:
        self._rows = rows
        self._ops = ops
        params = rows.params  # columns of it, as the operations take them
        self._counters = params["seed"].view(np.int64), params["stream"]
        self._filters = params["temperature"], params["top_k"], params["top_p"], params["min_p"]

    def sample(self, logits: Tensor, rows: list[int], positions: list[int]) -> Sampled:
        """Sample one token per row and record it in the rows' state.

        logits [R, vocab] float32 (overwritten); rows [R]; positions [R], the position each new token will take. A row whose logits
        hold NaN or +inf, or are all -inf (before or after its edits), is flagged NOT_FINITE, has no candidates and affects no other.
        """
        if self._rows.attachments:
            self._edit(logits.numpy(), rows, positions)
        tokens = self._choose(logits, rows, positions)
        # A relay already sent for a row must find a valid id, whatever came out.
        entries: list[Entry] = [
            (row, token, 0.0, 0, 0) if token >= 0 else (row, 0, 0.0, 0, _NOT_FINITE) for row, token in zip(rows, tokens, strict=True)
        ]
        self._rows.record(entries)
        candidates: list[Candidate] = []
        if not self._rows.explaining.isdisjoint(rows):
            self._explain(logits.numpy(), entries, candidates)
        return Sampled(tokens, entries, candidates)

    def _choose(self, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
        """The token of every row, drawn or the likeliest; -1 where there is none."""
        drawing = [i for i, row in enumerate(rows) if row in self._rows.drawing]
        if len(drawing) == len(rows):
            return self._draw(logits, rows, positions)
        tokens: list[int] = self._ops.argmax(logits).tolist()
        if drawing:
            drawn = self._draw(logits[drawing], [rows[i] for i in drawing], [positions[i] for i in drawing])
            for i, token in zip(drawing, drawn, strict=True):
                tokens[i] = token
        return tokens

    def _draw(self, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
        where = np.array(rows)
        seeds, streams = (column[where] for column in self._counters)
        temperature, top_k, top_p, min_p = (column[where] for column in self._filters)
        counters = seeds, streams.astype(np.int64), np.array(positions)
        uniforms = self._ops.uniforms(*map(torch.from_numpy, counters))
        filters = map(torch.from_numpy, (temperature, top_k.astype(np.int64), top_p, min_p))
        tokens: list[int] = self._ops.sample(logits, *filters, uniforms).tolist()
        return tokens

    def _edit(self, logits: Floats, rows: list[int], positions: list[int]) -> None:
        """Apply what is attached to rows, in place. A row that can not be sampled from stays so: masking must not hide it."""
        for i, row in enumerate(rows):
            attachments = self._rows.attachments.get(row)
            if attachments is None or not np.isfinite(logits[i].max()):
                continue
            edit(logits[i], attachments, positions[i])
            if has_penalties(params := self._rows.params[row]):
                penalize(logits[i], attachments, params)

    def _explain(self, logits: Floats, entries: list[Entry], candidates: list[Candidate]) -> None:
        """Add log-probabilities to the entries of the rows that return them, and the candidates of those that return some."""
        for i, (row, token, _, _, flags) in enumerate(entries):
            if row not in self._rows.explaining or flags & _NOT_FINITE:
                continue
            params = self._rows.params[row]
            if params["flags"] & _LOGPROBS:
                entries[i] = (row, token, *logprob_and_rank(logits[i], token), flags)
            if params["num_candidates"]:
                ids, logprobs = likeliest(logits[i], int(params["num_candidates"]))
                candidates += zip(ids.tolist(), logprobs.tolist(), strict=True)


def edit(logits: Floats, attachments: Attachments, position: int) -> None:
    """Bias, allowed and suppressed tokens, in place. Masked = -inf."""
    if attachments.bias_ids is not None and attachments.bias_values is not None:
        np.add.at(logits, attachments.bias_ids, attachments.bias_values)
    if attachments.allowed is not None:
        kept = logits[attachments.allowed]
        logits.fill(-np.inf)
        logits[attachments.allowed] = kept
    if attachments.suppressed is not None and position < attachments.suppressed_before:
        logits[attachments.suppressed] = -np.inf


def penalize(logits: Floats, attachments: Attachments, params: np.void) -> None:
    """Repetition over prompt and output, then presence and frequency over the output, in place."""
    assert attachments.seen is not None and attachments.output_counts is not None
    seen = np.flatnonzero(attachments.seen)
    values = logits[seen]
    repetition = params["repetition_penalty"]
    values = np.where(values > 0, values / repetition, values * repetition)
    counts = attachments.output_counts[seen]
    logits[seen] = values - params["presence_penalty"] * (counts > 0) - params["frequency_penalty"] * counts.astype(np.float32)


def logprob_and_rank(logits: Floats, token: int) -> tuple[float, int]:
    """Natural log-probability of `token`, and 1 + the number of tokens more likely than it."""
    above = logits - logits.max()
    total = float(np.exp(above).sum(dtype=np.float64))
    return float(above[token]) - float(np.log(total)), int((logits > logits[token]).sum()) + 1


def likeliest(logits: Floats, count: int) -> tuple[Ids, NDArray[np.float64]]:
    """The `count` likeliest tokens, likeliest first (ties: lower id first), and their natural log-probabilities.

    Not a sort of the vocabulary: a bound is lowered from the greatest logit until enough tokens lie above it.
    """
    above = logits - logits.max()
    total = float(np.exp(above).sum(dtype=np.float64))
    for bound in _BOUNDS:
        ids = np.flatnonzero(above >= bound)
        if len(ids) >= count:
            break
    ids = ids[np.argsort(-above[ids], kind="stable")[:count]]
    return ids, above[ids].astype(np.float64) - np.log(total)

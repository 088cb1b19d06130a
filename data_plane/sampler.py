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
from twinplane.data_plane.rows import Attachments, Rows, has_penalties
from twinplane.kernels.registry import Ops
from twinplane.shared.wire import RESULT_ENTRY, ResultFlag, RowFlag

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_NOT_FINITE, _LOGPROBS = int(ResultFlag.NOT_FINITE), int(RowFlag.LOGPROBS)
_BOUNDS = (-4.0, -8.0, -16.0, -np.inf)  # below the greatest logit, for the likeliest tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a call of the sampler gave, beside the entries."""

    tokens: list[int]  # [R]; -1: no token could be sampled
    num_candidates: int


class Sampler:
    """Samples for the rows of a session, with the operations of its device."""

    def __init__(self, rows: Rows, ops: Ops) -> None:
        self._rows = rows
        self._ops = ops
        params = rows.params  # columns of it, as the operations take them
        self._counters = params["seed"].view(np.int64), params["stream"]
        self._filters = params["temperature"], params["top_k"], params["top_p"], params["min_p"]

    def sample(
        self, logits: Floats, rows: list[int], positions: list[int], out: NDArray[np.void], candidates: NDArray[np.void] | None = None
    ) -> Sampled:
        """Sample one token per row and record it in the rows' state.

        logits [R, vocab] (overwritten); rows [R]; positions [R], the position each new token will take;
        out [R] RESULT_ENTRY; candidates, room for those of all rows that return some, CANDIDATE. A row whose logits hold
        NaN or +inf, or are all -inf (before or after its edits), is flagged NOT_FINITE, has no candidates and affects no
        other.
        """
        assert out.dtype == RESULT_ENTRY
        if self._rows.attachments:
            self._edit(logits, rows, positions)
        tokens = self._choose(logits, rows, positions)
        valid = [max(token, 0) for token in tokens]  # a relay already sent for a row must find a valid id
        out[:] = [(row, token, 0.0, 0, 0) for row, token in zip(rows, valid, strict=True)]
        if -1 in tokens:
            out["flags"] = [_NOT_FINITE if token < 0 else 0 for token in tokens]
        self._rows.record(rows, valid)
        if self._rows.explaining.isdisjoint(rows):
            return Sampled(tokens, 0)
        return Sampled(tokens, self._explain(logits, rows, tokens, out, candidates))

    def _choose(self, logits: Floats, rows: list[int], positions: list[int]) -> list[int]:
        """The token of every row, drawn or the likeliest; -1 where there is none."""
        drawing = [i for i, row in enumerate(rows) if row in self._rows.drawing]
        if len(drawing) == len(rows):
            return self._draw(logits, rows, positions)
        tokens: list[int] = self._ops.argmax(torch.from_numpy(logits)).tolist()
        if drawing:
            drawn = self._draw(logits[drawing], [rows[i] for i in drawing], [positions[i] for i in drawing])
            for i, token in zip(drawing, drawn, strict=True):
                tokens[i] = token
        return tokens

    def _draw(self, logits: Floats, rows: list[int], positions: list[int]) -> list[int]:
        where = np.array(rows)
        seeds, streams = (column[where] for column in self._counters)
        temperature, top_k, top_p, min_p = (column[where] for column in self._filters)
        counters = seeds, streams.astype(np.int64), np.array(positions)
        uniforms = self._ops.uniforms(*map(torch.from_numpy, counters))
        filters = map(torch.from_numpy, (temperature, top_k.astype(np.int64), top_p, min_p))
        tokens: list[int] = self._ops.sample(torch.from_numpy(logits), *filters, uniforms).tolist()
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

    def _explain(
        self, logits: Floats, rows: list[int], tokens: list[int], out: NDArray[np.void], candidates: NDArray[np.void] | None
    ) -> int:
        """Log-probabilities, and candidates one row after another, of the rows that return some. Returns how many candidates."""
        used = 0
        for i, row in enumerate(rows):
            if row not in self._rows.explaining or tokens[i] < 0:
                continue
            params = self._rows.params[row]
            if params["flags"] & _LOGPROBS:
                out[i]["logprob"], out[i]["rank"] = logprob_and_rank(logits[i], tokens[i])
            if candidates is not None and params["num_candidates"]:
                ids, logprobs = likeliest(logits[i], int(params["num_candidates"]))
                part = candidates[used : used + len(ids)]
                part["token"], part["logprob"] = ids, logprobs
                used += len(ids)
        return used


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

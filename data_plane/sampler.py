"""Chooses tokens from logits, in exactly the order of shared/PROTOCOL.md section 5.

Every row is computed from its own logits, parameters and counter alone, by operations whose result does not
depend on the other rows (no batched sum whose order could change with the batch): INV-10.

Rows that need nothing else cost one argmax or one draw, each a single call for the whole batch; edits, penalties,
log-probabilities and candidates are paid for by the rows that have them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.rows import Attachments, Rows, has_penalties
from twinplane.kernels.registry import Ops
from twinplane.shared.wire import RESULT_ENTRY, ResultFlag, RowFlag

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_TINY = np.finfo(np.float32).tiny  # smallest temperature: below it 0 / T could be 0 / 0 where denormals are flushed
_BOUNDS = (-4.0, -8.0, -16.0, -np.inf)  # below the greatest logit, for the likeliest tokens


class Sampler:
    """Samples for the rows of a session, with the operations of its device."""

    def __init__(self, rows: Rows, ops: Ops) -> None:
        self._rows = rows
        self._ops = ops

    def sample(
        self,
        logits: Floats,
        rows: Ids,
        positions: Ids,
        out: NDArray[np.void],
        candidates: NDArray[np.void] | None = None,
    ) -> int:
        """Sample one token per row and record it in the rows' state.

        logits [R, vocab] (overwritten); rows [R]; positions [R], the position each new token will take;
        out [R] RESULT_ENTRY; candidates, room for those of all rows that return some, CANDIDATE. A row whose logits hold
        NaN or +inf, or are all -inf (before or after its edits), is flagged NOT_FINITE, has no candidates and affects no
        other. Returns how many candidates were written.
        """
        assert out.dtype == RESULT_ENTRY
        params = self._rows.params[rows]
        best, finite = _best(logits)
        self._edit(logits, rows, params, positions, best, finite)
        tokens = best.astype(np.int32)
        tokens[~finite] = 0  # a relay already sent for this row must still find a valid id
        drawn = finite & ((params["flags"] & RowFlag.GREEDY) == 0) & (params["temperature"] > 0)
        if drawn.any():
            tokens[drawn] = self._draw(logits, params, positions, drawn)
        out["row"], out["token"], out["logprob"], out["rank"] = rows, tokens, 0.0, 0
        out["flags"] = np.where(finite, 0, ResultFlag.NOT_FINITE)
        for i in np.flatnonzero(finite & ((params["flags"] & RowFlag.LOGPROBS) != 0)).tolist():
            out[i]["logprob"], out[i]["rank"] = logprob_and_rank(logits[i], int(tokens[i]))
        self._rows.record(rows, tokens)
        return 0 if candidates is None else _list_candidates(logits, params, finite, candidates)

    def _draw(self, logits: Floats, params: NDArray[np.void], positions: Ids, drawn: NDArray[np.bool_]) -> NDArray[np.int32]:
        """The tokens of the rows that draw."""
        if not drawn.all():
            logits, params, positions = logits[drawn], params[drawn], positions[drawn]
        counters = (params["seed"].copy().view(np.int64), params["stream"].astype(np.int64), positions)
        uniforms = self._ops.uniforms(*map(torch.from_numpy, counters))
        drawn_tokens: NDArray[np.int32] = self._ops.sample(torch.from_numpy(logits), *_filters(params), uniforms).numpy()
        return drawn_tokens

    def _edit(self, logits: Floats, rows: Ids, params: NDArray[np.void], positions: Ids, best: Ids, finite: NDArray[np.bool_]) -> None:
        """Apply what is attached to rows, in place; `best` and `finite` follow. Most steps have nothing of the kind."""
        attached = self._rows.attachments
        for i, row in enumerate(rows.tolist()) if attached else ():
            attachments = attached.get(row)
            if attachments is None or not finite[i]:
                continue
            edit(logits[i], attachments, int(positions[i]))
            if has_penalties(params[i]):
                penalize(logits[i], attachments, params[i])
            best[i], finite[i] = (values[0] for values in _best(logits[i : i + 1]))


def _best(logits: Floats) -> tuple[Ids, NDArray[np.bool_]]:
    """Each row's most likely token (ties: lowest id), and whether its logits can be sampled from at all."""
    best = logits.argmax(axis=1)  # the first NaN, if there is one
    return best, np.isfinite(logits[np.arange(len(logits)), best])


def _filters(params: NDArray[np.void]) -> tuple[Tensor, ...]:
    """What kernels.reference.sample takes of the rows: temperature, top_k, top_p, min_p."""
    temperature = np.maximum(params["temperature"], _TINY)
    columns = (temperature, params["top_k"].astype(np.int64), params["top_p"].copy(), params["min_p"].copy())
    return tuple(map(torch.from_numpy, columns))


def _list_candidates(logits: Floats, params: NDArray[np.void], finite: NDArray[np.bool_], out: NDArray[np.void]) -> int:
    """The likeliest tokens of every row that returns some, one row after another. Returns how many."""
    used = 0
    for i in np.flatnonzero(finite & (params["num_candidates"] > 0)).tolist():
        ids, logprobs = likeliest(logits[i], int(params["num_candidates"][i]))
        part = out[used : used + len(ids)]
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

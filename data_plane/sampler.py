"""Chooses tokens from logits, in exactly the order of shared/PROTOCOL.md section 5.

Every row is computed from its own logits, parameters and counter alone, by operations whose result does not
depend on the other rows (no batched sum whose order could change with the batch): INV-10.

Without a sort of the vocabulary: tokens whose weight (probability relative to the most likely one) reaches a threshold
form a prefix of the descending order, so if that prefix already decides filters and draw, only it is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from twinplane.data_plane.rows import Attachments, Rows, has_penalties
from twinplane.shared.wire import RESULT_ENTRY, ResultFlag, RowFlag

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Weights below the first threshold hardly ever matter; 0 is the whole vocabulary.
_THRESHOLDS = (1e-3, 1e-5, 0.0)
_BOUNDS = (-4.0, -8.0, -16.0, -np.inf)  # below the greatest logit, for the likeliest tokens
_TINY = float(np.finfo(np.float32).tiny)  # smallest temperature: below it 0 / T could be 0 / 0 where denormals are flushed


@dataclass(frozen=True, slots=True)
class Filters:
    """How one row's distribution is cut. top_k 0, top_p >= 1 and min_p 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Sampler:
    """Samples for the rows of a session."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

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
            _draw_rows(logits, params, positions, np.flatnonzero(drawn), tokens)
        out["row"], out["token"], out["logprob"], out["rank"] = rows, tokens, 0.0, 0
        out["flags"] = np.where(finite, 0, ResultFlag.NOT_FINITE)
        for i in np.flatnonzero(finite & ((params["flags"] & RowFlag.LOGPROBS) != 0)).tolist():
            out[i]["logprob"], out[i]["rank"] = logprob_and_rank(logits[i], int(tokens[i]))
        self._rows.record(rows, tokens)
        return 0 if candidates is None else _list_candidates(logits, params, finite, candidates)

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


def _draw_rows(logits: Floats, params: NDArray[np.void], positions: Ids, drawn: Ids, tokens: NDArray[np.int32]) -> None:
    """Draw for the rows numbered `drawn`, into `tokens`."""
    uniforms = uniform(params["seed"][drawn], params["stream"][drawn], positions[drawn])
    for i, u in zip(drawn.tolist(), uniforms.tolist(), strict=True):
        row = params[i]
        tokens[i] = draw(logits[i], Filters(float(row["temperature"]), int(row["top_k"]), float(row["top_p"]), float(row["min_p"])), u)


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


def draw(logits: Floats, filters: Filters, u: float) -> int:
    """Filter, then inverse CDF over the kept tokens in descending probability (ties: lower id first).

    The weights are exp((logit - max) / T): at most 1, so no temperature overflows, however small.
    """
    weights = logits - logits.max()
    with np.errstate(over="ignore", under="ignore"):
        weights /= max(filters.temperature, _TINY)
        np.exp(weights, out=weights)
    total = float(weights.sum(dtype=np.float64))
    for threshold in _THRESHOLDS:
        ids = _descending(weights, np.flatnonzero(weights >= threshold))
        token = _draw_from_prefix(ids, weights[ids], total, filters, u, complete=len(ids) == len(weights))
        if token is not None:
            return token
    raise AssertionError("the whole vocabulary is always enough")


def _descending(weights: Floats, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` by descending weight, ties by lower id: one sort of integer keys, several times faster than a stable argsort.

    The bits of non-negative floats are ordered as their values; complemented, above the id, they make the key.
    """
    keys = (~weights[ids].view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _draw_from_prefix(ids: NDArray[np.int64], weights: Floats, total: float, filters: Filters, u: float, *, complete: bool) -> int | None:
    """The drawn token, or None if tokens beyond this prefix of the descending order could matter.

    `total` is the weight of the whole vocabulary. Cumulative weights are float64 sums in order, so a longer prefix
    gives the same numbers.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    count = len(ids)
    if 0 < filters.top_k <= count:
        count = filters.top_k
        total = float(cumulative[count - 1])
        complete = True
    elif filters.top_k > 0 and not complete:
        return None
    if filters.top_p < 1:
        # The token that reaches top_p is kept: those before it sum to less.
        reached = int(np.searchsorted(cumulative[:count], filters.top_p * total, side="left")) + 1
        if reached > count and not complete:
            return None
        count = min(reached, count)
        total = float(cumulative[count - 1])
        complete = True
    if filters.min_p > 0:
        above = int(np.searchsorted(-weights[:count], -filters.min_p * weights[0], side="right"))
        if above == count and not complete:
            return None
        count = max(above, 1)
        total = float(cumulative[count - 1])
        complete = True
    index = int(np.searchsorted(cumulative[:count], u * total, side="right"))
    if index >= count and not complete:
        return None
    return int(ids[min(index, count - 1)])


# ---------------------------------------------------------------------------------------------- philox


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox-4x32-10 (Salmon et al., SC'11) of many counters at once. counter [n, 4], key [n, 2] -> [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2  # below 2^64: the factors are 32 bits
        c0, c1, c2, c3 = (product1 >> half) ^ c1 ^ k0, product1 & low, (product0 >> half) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniform(seeds: NDArray[np.uint64], streams: NDArray[np.uint32], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) behind the tokens at `positions`: 24 bits, a pure function of the arguments. All [n]."""
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = positions, streams
    key = np.stack((seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)), axis=1).astype(np.uint32)
    return (philox4x32(counter, key)[:, 0] >> np.uint32(8)).astype(np.float64) * 2.0**-24

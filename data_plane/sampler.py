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

# Weights below the first threshold hardly ever matter; 0 is the whole vocabulary.
_THRESHOLDS = (1e-3, 1e-5, 0.0)
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

    def sample(self, logits: Floats, rows: NDArray[np.int64], positions: NDArray[np.int64], out: NDArray[np.void]) -> None:
        """Sample one token per row and record it in the rows' state.

        logits [R, vocab] (overwritten); rows [R]; positions [R], the position each new token will take;
        out [R] RESULT_ENTRY. A row whose logits hold NaN or +inf, or are all -inf (before or after its edits), is
        flagged NOT_FINITE and affects no other.
        """
        assert out.dtype == RESULT_ENTRY
        params = self._rows.params[rows]
        draws = (params["flags"] & RowFlag.GREEDY) == 0
        uniforms = np.zeros(len(rows))
        if draws.any():
            uniforms[draws] = uniform(params["seed"][draws], params["stream"][draws], positions[draws])
        out["row"], out["logprob"], out["rank"], out["flags"] = rows, 0.0, 0, 0
        for i, row in enumerate(rows.tolist()):
            token = self._choose(logits[i], row, params[i], int(positions[i]), float(uniforms[i]))
            if token is None:
                out[i]["flags"] = ResultFlag.NOT_FINITE
                token = 0  # a relay already sent for this row must still find a valid id
            elif params[i]["flags"] & RowFlag.LOGPROBS:
                out[i]["logprob"], out[i]["rank"] = logprob_and_rank(logits[i], token)
            out[i]["token"] = token
            self._rows.record(row, token)

    def _choose(self, logits: Floats, row: int, params: np.void, position: int, u: float) -> int | None:
        """The row's token, or None if its logits are not finite. Leaves the edited, penalized logits in `logits`."""
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            return None
        attachments = self._rows.attachments.get(row)
        if attachments is not None:
            edit(logits, attachments, position)
            if has_penalties(params):
                penalize(logits, attachments, params)
            best = int(logits.argmax())
            if not np.isfinite(logits[best]):
                return None
        if params["flags"] & RowFlag.GREEDY or params["temperature"] <= 0:
            return best
        filters = Filters(float(params["temperature"]), int(params["top_k"]), float(params["top_p"]), float(params["min_p"]))
        return draw(logits, filters, u)


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

"""One row's draw in numpy, step by step: the oracle of the native operation, fast enough for whole vocabularies.

Without a sort of the vocabulary: tokens whose weight (probability relative to the most likely one) reaches a threshold
form a prefix of the descending order, so if that prefix already decides filters and draw, only it is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

"""What the engine measures of its own pace, over the last few seconds."""

from __future__ import annotations

import time
from collections import deque

_TOKENS_WINDOW_S = 5.0
_DRAIN_WINDOW_S = 30.0
_DRAIN_SAMPLE_S = 0.5  # least time between two samples of the queue
_LEAST_DELAY_S = 0.1
_MOST_DELAY_S = 60.0


class TokenRate:
    """Tokens per second over the last five seconds, in one-second buckets."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        if tokens:
            second = int(time.monotonic())
            self._buckets[second] = self._buckets.get(second, 0) + tokens
            self._trim(second)

    def per_second(self) -> float:
        self._trim(int(time.monotonic()))
        return sum(self._buckets.values()) / _TOKENS_WINDOW_S

    def _trim(self, now: int) -> None:
        for second in [s for s in self._buckets if s <= now - _TOKENS_WINDOW_S]:
            del self._buckets[second]


class DrainRate:
    """How fast the waiting queue empties, and so when there will be room in it again.

    Fed with running totals of what has left the queue, whatever the reason (started, cancelled, expired), less what was put back.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()  # (time, requests, tokens), oldest first

    def is_due(self, now: float) -> bool:
        """Whether it is time for another sample."""
        return not self._samples or now - self._samples[-1][0] >= _DRAIN_SAMPLE_S

    def sample(self, now: float, requests: int, tokens: int) -> None:
        """The totals at ``now`` (``time.monotonic()`` seconds)."""
        self._samples.append((now, requests, tokens))
        # One sample from before the window stays, as its beginning.
        while len(self._samples) > 1 and self._samples[1][0] <= now - _DRAIN_WINDOW_S:
            self._samples.popleft()

    def seconds_until(self, *, requests: int = 0, tokens: int = 0) -> float | None:
        """Time until so many requests, or so many tokens, have left the queue at the pace of the last 30 s.

        From 0.1 to 60 s. None if nothing has left in that time, so that there is no pace to tell from.
        """
        first, last = self._samples[0], self._samples[-1]
        elapsed = last[0] - first[0]
        needed, left = (requests, last[1] - first[1]) if requests else (tokens, last[2] - first[2])
        if left <= 0 or elapsed <= 0:
            return None
        return min(max(needed * elapsed / left, _LEAST_DELAY_S), _MOST_DELAY_S)

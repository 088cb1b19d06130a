"""When to try again. Only before the first token: a stream that has begun is never started over."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from twinplane.client.errors import TwinplaneError


@dataclass(frozen=True)
class RetryPolicy:
    """``attempts`` in all (1: never retry). Without a delay from the server: exponential from ``base``, at most ``cap`` seconds."""

    attempts: int = 4
    base: float = 0.1
    cap: float = 5.0

    def delay(self, attempt: int, error: TwinplaneError) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (from 1), with jitter so that clients do not come back in step."""
        if error.retry_delay is not None:
            return error.retry_delay * random.uniform(1.0, 1.5)
        return random.uniform(0.0, min(self.cap, self.base * 2 ** (attempt - 1)))


class Attempts:
    """Counts the attempts of one call and keeps its deadline over all of them."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._failed = 0

    def remaining(self) -> float | None:
        """Seconds left for the next attempt; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, error: TwinplaneError) -> float:
        """Seconds to wait before the next attempt. Raises ``error`` if there is to be none."""
        self._failed += 1
        if not error.retryable or self._failed >= self._policy.attempts:
            raise error
        delay = self._policy.delay(self._failed, error)
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            raise error
        return delay

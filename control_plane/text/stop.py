"""Stop strings: found across token borders, without ever showing their beginning too early.

An Aho-Corasick automaton (Aho and Corasick 1975) reads the text character by character. Its state is the longest
end of the text read so far that begins a stop string, and that is exactly what must be held back: no more, no less.
So a step costs O(1) per character however many stop strings there are, and the result does not depend on how the
text is cut into tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``text`` may be shown; ``stop`` was found right after it."""

    text: str
    stop: str


class StopStrings:
    """The automaton of a set of stop strings, shared by the sequences of a request. Build time is linear in their length."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        # Node 0 is the root; a node stands for a prefix of one or more stop strings.
        self._children: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._stop: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link(self) -> list[int]:
        """For each node, the node of its longest proper suffix; breadth first, so that it is known when needed."""
        fail = [0] * len(self._children)
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                queue.append(child)
                fallback = fail[node]
                while fallback and character not in self._children[fallback]:
                    fallback = fail[fallback]
                fail[child] = self._children[fallback].get(character, 0)
            if self._stop[node] is None:
                self._stop[node] = self._stop[fail[node]]
        return fail

    def advance(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fail[node]
        return self._children[node].get(character, 0)

    def depth(self, node: int) -> int:
        return self._depth[node]

    def match(self, node: int) -> str | None:
        return self._stop[node]


class StopScanner:
    """Reads one sequence's text and releases what can not be part of a stop string."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str | StopMatch:
        """Take more text; return what may be shown now, or the match that ends the sequence.

        Of several stop strings the one that ends first counts; of those that end together, the longest.
        With ``may_stop`` False (``min_tokens`` not reached) a stop string that ends in ``text`` is ordinary text.
        """
        stops, node = self._stops, self._node
        for index, character in enumerate(text):
            node = stops.advance(node, character)
            if may_stop and (stop := stops.match(node)) is not None:
                shown = (self._held + text[: index + 1])[: -len(stop)]
                self._node, self._held = 0, ""
                return StopMatch(shown, stop)
        self._node = node
        pending = self._held + text
        shown = pending[: len(pending) - stops.depth(node)]
        self._held = pending[len(shown) :]
        return shown

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back is ordinary text."""
        held, self._held, self._node = self._held, "", 0
        return held

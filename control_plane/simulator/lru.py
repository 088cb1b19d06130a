"""How often a prefix cache could hit at best: an exact least-recently-used cache of blocks, independent of the scheduler's.

No scheduler, no time: requests come one after the other, each is computed and answered at once. A block is found if it and all before it in
the prompt are there. When room is needed the least recently used block goes, of one request the last first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from .traces import Trace, output_stream


def hit_share(trace: Trace, *, block_tokens: int, capacity_tokens: int | None = None) -> float:
    """Share of all prompt tokens that are found, in whole blocks. ``capacity_tokens`` None: nothing is ever evicted."""
    capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
    cache: OrderedDict[Hashable, None] = OrderedDict()  # least recently used first
    found = 0
    for i in range(len(trace)):
        blocks = list(_blocks(trace, i, block_tokens))
        hits = 0
        # The last prompt token is computed anyway, so that there is something to sample from.
        whole = (int(trace.prompt_tokens[i]) - 1) // block_tokens
        while hits < whole and blocks[hits] in cache:
            hits += 1
        found += hits * block_tokens
        for block in reversed(blocks):  # the first block is used last, so that the end goes first
            cache[block] = None
            cache.move_to_end(block)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return found / int(trace.prompt_tokens.sum())


def _blocks(trace: Trace, i: int, block_tokens: int) -> Iterator[Hashable]:
    """Identities of the whole blocks of request i's prompt and answer: hashes of all tokens up to their ends."""
    begin, end = int(trace.run_offsets[i]), int(trace.run_offsets[i + 1])
    runs = [(int(stream), int(first), int(length)) for stream, first, length in trace.runs[begin:end]]
    runs.append((output_stream(i), 0, int(trace.output_tokens[i]) - 1))  # the last token is never stored
    chain: Hashable = 0
    parts: list[tuple[int, int, int]] = []
    room = block_tokens
    for stream, first, length in runs:
        at, rest = first, length
        while rest >= room:
            parts.append((stream, at, room))
            chain = hash((chain, tuple(parts)))
            yield chain
            at, rest, parts, room = at + room, rest - room, [], block_tokens
        if rest:
            parts.append((stream, at, rest))
            room -= rest

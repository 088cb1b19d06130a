"""A step slot through numpy views, of which nothing is copied, and a result slot to write to. Nothing is interpreted.

Between two steps the weights stream through the caches, so every piece of code a step calls comes from memory again: what is not
needed is not called.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinplane.shared import wire

_CODES = {"<u8": "Q", "<u4": "I", "<i4": "i", "<f4": "f"}


def _packing(dtype: np.dtype[Any]) -> struct.Struct:
    """A structured dtype without padding, as the struct module has it."""
    packing = struct.Struct("<" + "".join(_CODES[dtype[name].str] for name in dtype.names or ()))
    assert packing.size == dtype.itemsize
    return packing


_STEP_HEADER, _RESULT_HEADER = _packing(wire.STEP_HEADER), _packing(wire.RESULT_HEADER)
_RESULT_ENTRY, _CANDIDATE = _packing(wire.RESULT_ENTRY), _packing(wire.CANDIDATE)
_RESULT_FIELDS = wire.RESULT_HEADER.names or ()


class StepView:
    """The used part of every region of one step slot. Valid until the slot is consumed."""

    __slots__ = (
        "closes",
        "copies",
        "extras",
        "forks",
        "num_decodes",
        "num_substeps",
        "opens",
        "sent_ns",
        "seqs",
        "step",
        "swap_ins",
        "swap_outs",
        "table_writes",
        "token_ids",
    )

    def __init__(self, slot: NDArray[np.uint8], layout: wire.StepSlotLayout) -> None:
        header = _STEP_HEADER.unpack_from(slot.data, layout.header)
        self.step, self.sent_ns, num_seqs, self.num_decodes, num_tokens, num_closes, num_opens, num_forks = header[:8]
        num_writes, num_swap_outs, num_swap_ins, num_copies, num_extra, self.num_substeps = header[8:]
        self.seqs = _region(slot, layout.seqs, _SEQS, num_seqs)
        self.token_ids = _region(slot, layout.token_ids, _TOKEN_IDS, num_tokens)
        self.closes = _region(slot, layout.closes, _WORDS, num_closes)
        self.opens = _region(slot, layout.opens, _OPENS, num_opens)
        self.forks = _region(slot, layout.forks, _FORKS, num_forks)
        self.table_writes = _region(slot, layout.table_writes, _WRITES, num_writes)
        self.swap_outs = _region(slot, layout.swap_outs, _SWAPS, num_swap_outs)
        self.swap_ins = _region(slot, layout.swap_ins, _SWAPS, num_swap_ins)
        self.copies = _region(slot, layout.copies, _COPIES, num_copies)
        self.extras = _region(slot, layout.extras, _WORDS, num_extra)


def _region(slot: NDArray[np.uint8], offset: int, empty: NDArray[Any], count: int) -> NDArray[Any]:
    """`count` items like those of `empty`; itself where there are none, as in most regions of most steps."""
    return slot[offset : offset + count * empty.itemsize].view(empty.dtype) if count else empty


_SEQS, _OPENS, _FORKS = (np.empty(0, dtype) for dtype in (wire.SEQ_ENTRY, wire.ROW_OPEN, wire.ROW_FORK))
_WRITES, _SWAPS, _COPIES = (np.empty(0, dtype) for dtype in (wire.TABLE_WRITE, wire.BLOCK_SWAP, wire.BLOCK_COPY))
_TOKEN_IDS, _WORDS = np.empty(0, "<i4"), np.empty(0, "<u4")


@dataclass(slots=True)
class ResultHeader:
    """wire.RESULT_HEADER; see there."""

    step: int
    substep: int
    received_ns: int
    finished_ns: int = 0
    apply_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    status: int = wire.StepStatus.OK
    num_entries: int = 0
    num_candidates: int = 0
    last: bool = False


Entry = tuple[int, int, float, int, int]  # wire.RESULT_ENTRY
Candidate = tuple[int, float]  # wire.CANDIDATE


class ResultView:
    """A result slot to be filled."""

    __slots__ = ("_capacities", "_layout", "_slot")

    def __init__(self, slot: NDArray[np.uint8], layout: wire.ResultSlotLayout, capacities: wire.Capacities) -> None:
        self._slot = slot.data
        self._layout = layout
        self._capacities = capacities

    def write_samples(self, entries: list[Entry], candidates: list[Candidate]) -> None:
        """Raises ValueError if the slot has no room for them."""
        _check_room("result entries", len(entries), self._capacities.max_results)
        _check_room("candidates", len(candidates), self._capacities.max_candidates)
        _pack(_RESULT_ENTRY, self._slot, self._layout.entries, entries)
        _pack(_CANDIDATE, self._slot, self._layout.candidates, candidates)

    def write_header(self, header: ResultHeader) -> None:
        _pack(_RESULT_HEADER, self._slot, self._layout.header, [[getattr(header, name) for name in _RESULT_FIELDS]])


def _pack(packing: struct.Struct, slot: memoryview, offset: int, items: Iterable[Iterable[Any]]) -> None:
    for item in items:
        packing.pack_into(slot, offset, *item)
        offset += packing.size


def _check_room(what: str, count: int, capacity: int) -> None:
    if count > capacity:
        raise ValueError(f"the step yields {count} {what}, a result has room for {capacity}")

"""Numpy views of a step slot and a result slot: nothing is copied, nothing is interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinplane.shared import wire


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
        header = _region(slot, layout.header, wire.STEP_HEADER, 1)[0].item()
        self.step, self.sent_ns, num_seqs, self.num_decodes, num_tokens, num_closes, num_opens, num_forks = header[:8]
        num_writes, num_swap_outs, num_swap_ins, num_copies, num_extra, self.num_substeps = header[8:]
        self.seqs = _region(slot, layout.seqs, wire.SEQ_ENTRY, num_seqs)
        self.token_ids = _region(slot, layout.token_ids, np.dtype("<i4"), num_tokens)
        self.closes = _region(slot, layout.closes, np.dtype("<u4"), num_closes)
        self.opens = _region(slot, layout.opens, wire.ROW_OPEN, num_opens)
        self.forks = _region(slot, layout.forks, wire.ROW_FORK, num_forks)
        self.table_writes = _region(slot, layout.table_writes, wire.TABLE_WRITE, num_writes)
        self.swap_outs = _region(slot, layout.swap_outs, wire.BLOCK_SWAP, num_swap_outs)
        self.swap_ins = _region(slot, layout.swap_ins, wire.BLOCK_SWAP, num_swap_ins)
        self.copies = _region(slot, layout.copies, wire.BLOCK_COPY, num_copies)
        self.extras = _region(slot, layout.extras, np.dtype("<u4"), num_extra)


def _region(slot: NDArray[np.uint8], offset: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    return slot[offset : offset + count * dtype.itemsize].view(dtype)


class ResultView:
    """A result slot to be filled."""

    __slots__ = ("_capacities", "_layout", "_slot", "header")

    def __init__(self, slot: NDArray[np.uint8], layout: wire.ResultSlotLayout, capacities: wire.Capacities) -> None:
        self.header = _region(slot, layout.header, wire.RESULT_HEADER, 1)
        self._slot = slot
        self._layout = layout
        self._capacities = capacities

    def entries(self, count: int) -> NDArray[Any]:
        """The first `count` entries. Raises ValueError if the slot has no room for them."""
        _check_room("result entries", count, self._capacities.max_results)
        return _region(self._slot, self._layout.entries, wire.RESULT_ENTRY, count)

    def candidates(self, count: int) -> NDArray[Any]:
        """The first `count` candidates. Raises ValueError if the slot has no room for them."""
        _check_room("candidates", count, self._capacities.max_candidates)
        return _region(self._slot, self._layout.candidates, wire.CANDIDATE, count)


def _check_room(what: str, count: int, capacity: int) -> None:
    if count > capacity:
        raise ValueError(f"the step yields {count} {what}, a result has room for {capacity}")

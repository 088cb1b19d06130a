"""Moves of whole KV blocks before a step's forward pass (shared/PROTOCOL.md, section 5): swaps out, swaps in, copies, in this order.

All of them are checked before the first is done: a wrong block number would overwrite somebody's context.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinplane.data_plane.device import Device
from twinplane.data_plane.rows import StepError
from twinplane.data_plane.step import StepView
from twinplane.shared import wire

_MEASURED_BLOCKS = 8  # moved at once, about what a sequence has
_MEASUREMENTS = 5


def measure_swap_ns(device: Device, *, num_blocks: int, num_host_blocks: int) -> int:
    """What moving one block to the host's pool and back takes, in nanoseconds; 0 without such a pool.

    The median of a few round trips of the pools' first blocks, whose contents are kept. To be called while nobody else uses the device.
    """
    count = min(_MEASURED_BLOCKS, num_blocks, num_host_blocks)
    if not count:
        return 0
    swaps = np.zeros(count, dtype=wire.BLOCK_SWAP)
    swaps["device"] = swaps["host"] = np.arange(count)
    taken = []
    for _ in range(_MEASUREMENTS + 1):
        started = time.perf_counter_ns()
        device.swap_out(swaps)
        device.swap_in(swaps)
        taken.append(time.perf_counter_ns() - started)
    return max(1, int(np.median(taken[1:])) // count)  # the first is there to warm up


class BlockMover:
    """Moves blocks between and within the two pools of a device."""

    def __init__(self, device: Device, *, num_blocks: int, num_host_blocks: int) -> None:
        self._device = device
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks

    def apply(self, step: StepView) -> None:
        """Raises StepError, with nothing moved, for a block outside its pool or a target named twice."""
        if len(step.swap_outs):
            self._check_swaps("swap out", step.swap_outs, target="host")
        if len(step.swap_ins):
            self._check_swaps("swap in", step.swap_ins, target="device")
        if len(step.copies):
            _check_range("copy", step.copies["source"], self._num_blocks, "pool")
            _check_range("copy", step.copies["target"], self._num_blocks, "pool")
            _check_distinct("copy", step.copies["target"])
        if len(step.swap_outs):
            self._device.swap_out(step.swap_outs)
        if len(step.swap_ins):
            self._device.swap_in(step.swap_ins)
        if len(step.copies):
            self._device.copy_blocks(step.copies)

    def _check_swaps(self, what: str, swaps: NDArray[Any], target: str) -> None:
        _check_range(what, swaps["device"], self._num_blocks, "pool")
        _check_range(what, swaps["host"], self._num_host_blocks, "host's pool")
        _check_distinct(what, swaps[target])


def _check_range(what: str, blocks: NDArray[Any], limit: int, pool: str) -> None:
    if int(blocks.max()) >= limit:
        raise StepError(f"{what} names block {int(blocks.max())}, the {pool} has {limit}")


def _check_distinct(what: str, targets: NDArray[Any]) -> None:
    blocks, counts = np.unique(targets, return_counts=True)
    if len(blocks) < len(targets):
        raise StepError(f"{what} writes block {int(blocks[counts.argmax()])} more than once")

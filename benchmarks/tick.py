"""What one scheduler tick costs: accept newcomers + retire a result + plan and commit a step + hand over events.

The timed loop is native (``control_plane/core/bench/tick_bench.cpp``), so no Python counts; it runs the production scheduler in a steady
mixture of decodes, block growth, finishes and admissions, with log-probabilities and deadlines on. Times are wall-clock on
whatever else the machine does: compare medians of alternated runs.
"""

from __future__ import annotations

from typing import Any

from .native import measure


def run(
    running: int = 256,
    *,
    ticks: int = 20_000,
    prompt: int = 300,
    output: int = 200,
    block_size: int = 16,
    depth: int = 2,
    pool_percent: int = 100,
    max_substeps: int = 1,
    repeats: int = 1,
) -> dict[str, Any]:
    """Time `ticks` ticks with `running` resident sequences.

    `prompt` and `output` are mean lengths in tokens; `pool_percent` below 100 makes memory short, so that sequences are preempted;
    with `max_substeps` above 1 the data plane may make several tokens of a step, and newcomers come in crowds, so that it can.
    Of `repeats`, which all do the same, tick by tick, the least time of each tick is what it takes without interruptions from outside.
    Returns ``p50_us``, ``p99_us``, ``p999_us``, ``max_us`` of all; ``undisturbed_p50_us`` and ``undisturbed_p99_us`` of these least times;
    ``allocations_per_tick`` (calls of operator new and delete);
    ``syscalls_per_tick`` (share of ticks with a system call, None where the kernel can not tell: before Linux 5.11 or not x86-64);
    and what the ticks did: ``sequences_per_step``, ``finishes_per_tick``, ``admissions_per_tick``, ``table_writes_per_tick``,
    ``preemptions_per_tick``, ``results_per_step``.
    """
    return measure("tick_bench", running, ticks, prompt, output, block_size, depth, pool_percent, max_substeps, repeats)

"""What one scheduler tick costs: accept newcomers + retire a result + plan and commit a step + hand over events.

The timed loop is native (``control_plane/core/bench/tick_bench.cpp``), so no Python counts; it runs the production scheduler in a steady
mixture of decodes, block growth, finishes and admissions, with log-probabilities and deadlines on. Times are wall-clock on
whatever else the machine does: compare medians of alternated runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/native-control_plane/control_plane/tick_bench"


def run(
    running: int = 256,
    *,
    ticks: int = 20_000,
    prompt: int = 300,
    output: int = 200,
    block_size: int = 16,
    depth: int = 2,
    pool_percent: int = 100,
) -> dict[str, Any]:
    """Time `ticks` ticks with `running` resident sequences.

    `prompt` and `output` are mean lengths in tokens; `pool_percent` below 100 makes memory short, so that sequences are preempted.
    Returns ``p50_us``, ``p99_us``, ``p999_us``, ``max_us``; ``allocations_per_tick`` (calls of operator new and delete);
    ``syscalls_per_tick`` (share of ticks with a system call, None where the kernel can not tell: before Linux 5.11 or not x86-64);
    and what the ticks did: ``sequences_per_step``, ``finishes_per_tick``, ``admissions_per_tick``, ``table_writes_per_tick``,
    ``preemptions_per_tick``.
    Builds the program if it is not there.
    """
    if not PROGRAM.exists():
        subprocess.run([ROOT / "scripts/native", "control_plane"], check=True, capture_output=True)
    arguments = [running, ticks, prompt, output, block_size, depth, pool_percent]
    result = subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--pool-percent", type=int, default=100)
    options = parser.parse_args()
    for running in options.running:
        print(json.dumps(run(running, ticks=options.ticks, pool_percent=options.pool_percent)))


if __name__ == "__main__":
    main()

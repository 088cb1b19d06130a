"""A picture of a simulation: how long requests took, and where the memory went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .run import Result


class PlotError(Exception):
    """No picture can be made; the message says what to do."""


def save(results: Sequence[Result], path: Path) -> None:
    """Write a picture in the format that the file's name ends in. Raises PlotError."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlotError("--plot needs matplotlib: pip install 'twinplane[plot]'") from None
    figure, ((first, gaps), (latency, memory)) = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for result in results:
        for axes, values, label in (
            (first, result.ttft_s, "time to first token, s"),
            (gaps, result.itl_s * 1e3, "inter-token latency, ms"),
            (latency, result.normalized_latency_s * 1e3, "latency per output token, ms"),
        ):
            if len(values):
                shares = np.linspace(0, 1, 1001)
                axes.plot(np.quantile(values, shares), shares, label=result.system)
            axes.set(xlabel=label, ylabel="share", xscale="log", ylim=(0, 1))
        samples = result.raw["memory"]
        capacity = np.maximum(samples["capacity_tokens"], 1)
        (line,) = memory.plot(samples["at_s"], samples["allocated_tokens"] / capacity, label=f"{result.system}: allocated", alpha=0.5)
        held = samples["held_tokens"] / capacity
        memory.plot(samples["at_s"], held, label=f"{result.system}: held", color=line.get_color(), linestyle="--")
    memory.set(xlabel="time, s", ylabel="share of KV memory", ylim=(0, 1.05))
    for axes in (first, gaps, latency, memory):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)

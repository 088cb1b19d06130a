"""What a comparison found: medians over its rounds, as a table and as pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..workloads import Figures

_PRECISIONS = ("fp32", "16-bit", "8-bit", "4-bit")


@dataclass
class Measurement:
    """One engine, one workload, one round: its figures, or why there are none."""

    engine: str
    precision: str
    workload: str
    round: int
    figures: Figures = field(default_factory=dict)
    error: str = ""
    wall_s: float = 0.0  # with starting and stopping the engine

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Column:
    """A column of the table: one or two figures of a workload."""

    workload: str
    title: str
    figures: tuple[str, ...]
    digits: int = 0

    def cell(self, figures: Mapping[str, float]) -> str:
        return " / ".join(f"{figures[name]:,.{self.digits}f}" for name in self.figures)


COLUMNS = (
    Column("W1", "W1 decode tok/s", ("decode_tokens_per_s",), 1),
    Column("W1", "W1 prefill tok/s", ("prefill_tokens_per_s",)),
    Column("W2", "W2 out tok/s", ("output_tokens_per_s",), 1),
    Column("W2", "W2 TTFT P50 / ITL P99 ms", ("ttft_p50_ms", "itl_p99_ms")),
    Column("W3", "W3 ITL P99 / max ms", ("itl_p99_ms", "itl_max_ms")),
    Column("W3", "W3 streams tok/s", ("stream_tokens_per_s",), 1),
    Column("W3", "W3 long TTFT P50 s", ("long_ttft_p50_s",), 1),
    Column("W3", "W3 long answered / arrived", ("long_prompts_answered", "long_prompts_arrived")),
    Column("W4", "W4 TTFT cold / warm ms", ("cold_ttft_ms", "warm_ttft_ms")),
    Column("W5", "W5 tok/s", ("output_tokens_per_s",), 1),
)


def medians(measurements: Iterable[Measurement]) -> dict[str, dict[str, Figures]]:
    """Per engine and workload the median of each figure over the rounds that succeeded; failed ones leave no trace here."""
    rounds: dict[str, dict[str, list[Figures]]] = {}
    for measurement in measurements:
        found = rounds.setdefault(measurement.engine, {}).setdefault(measurement.workload, [])
        if measurement.figures:
            found.append(measurement.figures)
    return {
        engine: {
            name: {figure: round(statistics.median(one[figure] for one in found), 3) for figure in found[0]}
            for name, found in by_workload.items()
            if found
        }
        for engine, by_workload in rounds.items()
    }


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: a row per engine, grouped by precision; ``failed`` where no round succeeded, ``-`` where none was run."""
    middle = medians(measurements)
    ran = {(measurement.engine, measurement.workload) for measurement in measurements}
    columns = [column for column in COLUMNS if any(workload == column.workload for _, workload in ran)]

    def cell(engine: str, column: Column) -> str:
        figures = middle[engine].get(column.workload)
        if figures is None:
            return "failed" if (engine, column.workload) in ran else "-"
        return column.cell(figures)

    order = {measurement.engine: _PRECISIONS.index(measurement.precision) for measurement in measurements}
    rows = [["", *(column.title for column in columns)], ["---", *("---:" for _ in columns)]]
    rows += [[engine, *(cell(engine, column) for column in columns)] for engine in sorted(order, key=lambda name: order[name])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A bar for each engine's median and a dot for each round, one panel per figure. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middle = medians(measurements)
    precision = {measurement.engine: measurement.precision for measurement in measurements}
    engines = sorted(precision, key=lambda name: _PRECISIONS.index(precision[name]))
    panels = [
        (column, name) for column in COLUMNS for name in column.figures if any(column.workload in figures for figures in middle.values())
    ]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, (0.8 + 0.28 * len(engines)) * len(panels)), squeeze=False, layout="constrained"
    )
    for axis, (column, name) in zip(axes[:, 0], panels, strict=True):
        values = [middle[engine].get(column.workload, {}).get(name, 0.0) for engine in engines]
        axis.barh(engines, values, color=[f"C{_PRECISIONS.index(precision[engine])}" for engine in engines], alpha=0.6)
        dots = [m for m in measurements if m.workload == column.workload and m.figures]
        axis.plot([m.figures[name] for m in dots], [engines.index(m.engine) for m in dots], "k.", markersize=4)
        axis.invert_yaxis()
        axis.set_title(f"{column.workload}: {name}", fontsize=9, loc="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

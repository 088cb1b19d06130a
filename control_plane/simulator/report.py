"""Simulations as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cells import Cell


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One column a system, one line a figure; of a distribution mean, p50, p90, p99 and max."""
    systems = list(figures)
    columns = {system: dict(_flat(figures[system])) for system in systems}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    return "\n".join(_aligned([["", *systems], *([name, *(_text(columns[s].get(name)) for s in systems)] for name in names)]))


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {part}", v) for part, v in _flat(value))
        else:
            yield name, value


def cell_table(cells: Sequence[Cell]) -> str:
    rows = [["cell", "source", "here", "goal", ""]]
    rows += [[cell.name, cell.source, cell.shown(cell.got), cell.goal, cell.verdict] for cell in cells]
    return "\n".join(_aligned(rows, right=()))


def _aligned(rows: list[list[str]], right: Sequence[int] | None = None) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_right = range(1, len(widths)) if right is None else right
    return [
        "  ".join(f"{cell:>{w}}" if i in to_right else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

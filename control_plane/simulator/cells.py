"""Published figures and ours beside each other, one cell each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import traces
from .run import Result, Setup, Window, simulate
from .traces import Trace

OK, SHORT, MISSING = "ok", "short", "missing"


@dataclass(frozen=True)
class Cell:
    """``got``: a number or several, None if a trace is missing. ``goal``: in words, with the bounds ``verdict`` goes by."""

    name: str
    source: str  # what was published, and where
    got: float | tuple[float, ...] | None
    goal: str
    verdict: str

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def shown(got: float | tuple[float, ...] | None) -> str:
        if got is None:
            return "-"
        return " / ".join(f"{value:.4g}" for value in (got if isinstance(got, tuple) else (got,)))


def judge(name: str, source: str, got: float | Sequence[float], goal: str, *, is_ok: bool) -> Cell:
    value = float(got) if isinstance(got, int | float) else tuple(round(float(v), 6) for v in got)
    return Cell(name, source, value, goal, OK if is_ok else SHORT)


def near(name: str, source: str, got: float, published: float, *, share: float) -> Cell:
    """``got`` is within ``share`` of what was published."""
    goal = f"within {share:.0%} of {published:g}"
    return judge(name, source, got, goal, is_ok=abs(got - published) <= share * published)


def at_least(name: str, source: str, got: float, goal: float) -> Cell:
    return judge(name, source, got, f">= {goal:g}", is_ok=got >= goal)


def at_most(name: str, source: str, got: float, goal: float) -> Cell:
    return judge(name, source, got, f"<= {goal:g}", is_ok=got <= goal)


def between(name: str, source: str, got: float, least: float, most: float) -> Cell:
    """In a published band; above it is no shortfall."""
    return judge(name, source, got, f"{least:g} to {most:g}, or more", is_ok=got >= least)


# --- traces ---


class MissingTraceError(Exception):
    """A cell needs a trace that is not in the data folder."""


# Names of the files in the --data folder, and the format each is read as. docs/simulator.md says where they come from.
FILES = {
    "sharegpt": ("sharegpt_lengths.csv", "lengths"),
    "multiturn": ("sharegpt_multiturn_8k.csv", "multiturn"),
    "azure-conv": ("azure2023_conv.csv", "azure"),
    "mooncake-conversation": ("mooncake_conversation.jsonl", "mooncake"),
    "mooncake-synthetic": ("mooncake_synthetic.jsonl", "mooncake"),
    "agentic": ("agentic_code.jsonl", "agentic"),
}


class Data:
    """The folder with the published traces."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._loaded: dict[str, Trace] = {}

    def path(self, name: str) -> Path:
        file, _ = FILES[name]
        if self._folder is None:
            raise MissingTraceError(f"needs {file}: give the folder it is in (--data)")
        for candidate in (self._folder / file, self._folder / f"{file}.gz"):
            if candidate.exists():
                return candidate
        raise MissingTraceError(f"needs {file}, which is not in {self._folder}")

    def trace(self, name: str) -> Trace:
        """A trace without times, or with its own. Raises MissingTraceError, TraceError."""
        if name not in self._loaded:
            self._loaded[name] = traces.load(self.path(name), format=FILES[name][1])
        return self._loaded[name]

    def timed(self, name: str, *, rate: float, limit: int) -> Trace:
        """The first ``limit`` requests, as a Poisson process. Raises MissingTraceError, TraceError."""
        return traces.load(self.path(name), format=FILES[name][1], rate=rate, limit=limit)


def lengths_between(trace: Trace, *, least: int, most: int) -> Trace:
    """Requests with at least ``least`` tokens of each kind and at most ``most`` together, each sharing nothing."""
    prompt, output = trace.prompt_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    keep = (prompt >= least) & (output >= least) & (prompt + output <= most)
    return of_lengths(trace.name, prompt[keep], output[keep])


def of_lengths(name: str, prompt: Any, output: Any) -> Trace:
    return traces.build(name, (traces.Row(None, int(p), int(o)) for p, o in zip(prompt, output, strict=True)))


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The same lengths in random order, each request sharing nothing."""
    order = np.random.default_rng(seed).permutation(len(trace))
    return of_lengths(trace.name, trace.prompt_tokens[order], trace.output_tokens[order])


def with_prefix(trace: Trace, tokens: int) -> Trace:
    """Every prompt begins with the same ``tokens`` tokens, and goes on with its own."""
    rows = zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    own = len(trace)  # streams: 0 is everybody's, the others are one request's each
    return traces.build(
        f"{trace.name} behind {tokens} tokens",
        (
            traces.Row(None, tokens + int(p), int(o), [traces.Run(0, 0, tokens), traces.Run(own + i, 0, int(p))])
            for i, (p, o) in enumerate(rows)
        ),
    )


def with_samples(trace: Trace, samples: int) -> Trace:
    """Every prompt is answered ``samples`` times."""
    return dataclasses.replace(trace, samples=np.full(len(trace), samples, dtype=np.uint32))


# --- measures that several cells take ---


def sustained(system: str, trace: Trace, setup: Setup, *, rate: float, seconds: float, seed: int = 0) -> Result:
    """Poisson arrivals for ``seconds``; averages leave out the first fifth and end with the arrivals."""
    requests = trace.limited(round(rate * seconds)).retimed(rate, seed)
    return simulate(system, requests, setup, Window(stop_at_s=requests.duration_s, measure_from_s=requests.duration_s / 5))


def highest_rate(system: str, trace: Trace, setup: Setup, *, limit_s: float, seconds: float) -> float:
    """The highest rate of Poisson arrivals, kept up for ``seconds``, with a mean latency per token of at most ``limit_s``.

    By bisection, to 1 %. The trace must be long enough for it.
    """

    def is_served(rate: float) -> bool:
        requests = trace.limited(max(1, round(rate * seconds))).retimed(rate)
        return bool(simulate(system, requests, setup).normalized_latency_s.mean() <= limit_s)

    low, high = 0.0, 1.0
    while is_served(high):
        low, high = high, 2 * high
        if high * seconds > len(trace):
            raise ValueError(f"{trace.name} has {len(trace)} requests, too few for {high:g} per second over {seconds:g} s")
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    return low


# --- suites ---


class Group(NamedTuple):
    """Cells that are measured together."""

    name: str
    needs: tuple[str, ...]  # traces, by name in FILES
    measure: Callable[[Data], Iterator[Cell]]


def measure(groups: Sequence[Group], data: Data, progress: Callable[[str], object]) -> Iterator[Cell]:
    """All cells, one after the other. A group whose trace is missing is one cell that says so."""
    for group in groups:
        progress(group.name)
        try:
            for name in group.needs:
                data.path(name)
        except MissingTraceError as error:
            yield Cell(group.name, str(error), None, "", MISSING)
            continue
        yield from group.measure(data)

"""Request traces: arrivals, lengths, and which prompts begin alike.

Every reader takes plain or gzip files and says which file and line is wrong. A prompt is written down as *runs*: stretches of endless
token streams, so that shared prefixes are shared tokens (see ``_simulator.Trace``).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _simulator

MAX_LENGTH = 1 << 24  # of a prompt or an output; anything longer is a mistake in the file
_MAX_SECONDS = 1e9
_MAX_HASH_ID = 1 << 40


class TraceError(Exception):
    """A trace can not be read; the message names file and line."""


class Run(NamedTuple):
    """``length`` tokens of stream ``stream`` from ``first`` on."""

    stream: int
    first: int
    length: int


@dataclass
class Row:
    arrival_s: float | None  # None: the file has no times
    prompt: int
    output: int
    runs: list[Run] | None = None  # None: a prompt that shares nothing
    priority: int = 0
    tenant: str = ""
    samples: int = 1


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    arrival_s: NDArray[np.float64] | None  # [requests]; None: the trace has lengths only
    prompt_tokens: NDArray[np.uint32]
    output_tokens: NDArray[np.uint32]
    priority: NDArray[np.int32]
    samples: NDArray[np.uint32]
    tenant: NDArray[np.uint32]  # index into tenants
    tenants: tuple[str, ...]
    run_offsets: NDArray[np.uint64]  # [requests + 1]
    runs: NDArray[np.uint64]  # [runs, 3]: stream, first, length

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def duration_s(self) -> float:
        return 0.0 if self.arrival_s is None or not len(self) else float(self.arrival_s[-1])

    def limited(self, count: int) -> Trace:
        """The first ``count`` requests."""
        if count >= len(self):
            return self
        runs = int(self.run_offsets[count])
        return dataclasses.replace(
            self,
            arrival_s=None if self.arrival_s is None else self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            priority=self.priority[:count],
            samples=self.samples[:count],
            tenant=self.tenant[:count],
            run_offsets=self.run_offsets[: count + 1],
            runs=self.runs[:runs],
        )

    def retimed(self, rate: float, seed: int = 0) -> Trace:
        """The same requests in the same order, arriving as a Poisson process of ``rate`` requests per second."""
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(self))
        return dataclasses.replace(self, arrival_s=np.cumsum(gaps))

    def native(self) -> _simulator.Trace:
        if self.arrival_s is None:
            raise TraceError(f"{self.name} has lengths but no arrival times: give a rate (--rate)")
        return _simulator.Trace(
            arrival_ns=np.rint(self.arrival_s * 1e9).astype(np.uint64),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            priority=self.priority,
            samples=self.samples,
            tenant=self.tenant,
            tenants=self.tenants,
            run_offsets=self.run_offsets,
            run_stream=np.ascontiguousarray(self.runs[:, 0]),
            run_first=np.ascontiguousarray(self.runs[:, 1]),
            run_length=np.ascontiguousarray(self.runs[:, 2]).astype(np.uint32),
        )


def build(name: str, rows: Iterable[Row]) -> Trace:
    """A trace of rows in order of arrival. A row without runs gets a stream of its own."""
    listed = list(rows)
    timed = bool(listed) and all(row.arrival_s is not None for row in listed)
    if timed:
        listed.sort(key=lambda row: row.arrival_s or 0.0)  # stable
    runs: list[Run] = []
    offsets = [0]
    for i, row in enumerate(listed):
        runs += row.runs if row.runs is not None else [Run(_private(i), 0, row.prompt)]
        offsets.append(len(runs))
    first = (listed[0].arrival_s or 0.0) if timed else 0.0
    tenants = {name: i for i, name in enumerate(dict.fromkeys(row.tenant for row in listed))}
    return Trace(
        name=name,
        arrival_s=np.array([(row.arrival_s or 0.0) - first for row in listed]) if timed else None,
        prompt_tokens=np.array([row.prompt for row in listed], dtype=np.uint32),
        output_tokens=np.array([row.output for row in listed], dtype=np.uint32),
        priority=np.array([row.priority for row in listed], dtype=np.int32),
        samples=np.array([row.samples for row in listed], dtype=np.uint32),
        tenant=np.array([tenants[row.tenant] for row in listed], dtype=np.uint32),
        tenants=tuple(tenants),
        run_offsets=np.array(offsets, dtype=np.uint64),
        runs=np.array(runs, dtype=np.uint64).reshape(-1, 3),
    )


def _private(i: int) -> int:
    """Stream of tokens that only request i has. Below the streams of outputs (2**64 - 1 - i), above those of files."""
    return (1 << 62) + i


def output_stream(i: int) -> int:
    """Stream of what request i of a trace answers."""
    return (1 << 64) - 1 - i


# --- reading ---


@dataclass(frozen=True)
class _Line:
    """One line of a file, for checks that know where they are."""

    where: str
    fields: dict[str, Any]

    def fail(self, what: str) -> TraceError:
        return TraceError(f"{self.where}: {what}")

    def number(self, key: str, maximum: float, minimum: float = 0.0) -> float:
        raw = self.fields.get(key)
        try:
            if raw is None or isinstance(raw, bool | list | dict):
                raise ValueError
            value = float(raw)
        except (ValueError, OverflowError):
            raise self.fail(f"{key} is {_shown(raw)}, expected a number") from None
        if not minimum <= value <= maximum:  # also refuses NaN
            raise self.fail(f"{key} is {_shown(raw)}, expected {minimum:g} to {maximum:g}")
        return value

    def integer(self, key: str, maximum: int, minimum: int = 0) -> int:
        value = self.number(key, maximum, minimum)
        if not value.is_integer():
            raise self.fail(f"{key} is {_shown(self.fields[key])}, expected an integer")
        return int(value)

    def length(self, key: str) -> int:
        return self.integer(key, MAX_LENGTH, 1)

    def items(self, key: str) -> list[Any]:
        value = self.fields.get(key)
        if not isinstance(value, list):
            raise self.fail(f"{key} is {_shown(value)}, expected a list")
        return value

    def inner(self, value: Any, where: str) -> _Line:
        if not isinstance(value, dict):
            raise self.fail(f"{where} is {_shown(value)}, expected an object")
        return _Line(f"{self.where}: {where}", value)


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without those that are empty or begin with '#'."""
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and not line.startswith("#"):
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: can not be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: is damaged or not text: {error}") from None


def _csv_lines(path: Path) -> Iterator[_Line]:
    header: list[str] = []
    for number, text in _text_lines(path):
        try:
            (values,) = csv.reader([text], strict=True)
        except (csv.Error, ValueError) as error:
            raise TraceError(f"{path}:{number}: not a line of CSV: {error}") from None
        if not header:
            header = [value.strip() for value in values]
        elif len(values) != len(header):
            raise TraceError(f"{path}:{number}: {len(values)} values, the header names {len(header)}")
        else:
            yield _Line(f"{path}:{number}", dict(zip(header, values, strict=True)))


def _json_lines(path: Path) -> Iterator[_Line]:
    for number, text in _text_lines(path):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise TraceError(f"{path}:{number}: expected an object, got {_shown(fields)}")
        yield _Line(f"{path}:{number}", fields)


# --- formats ---


def _timestamp_s(line: _Line) -> float:
    """Azure's original files have seven digits of a second, more than datetime takes."""
    raw = str(line.fields.get("TIMESTAMP"))
    whole, _, fraction = raw.partition(".")
    digits = fraction.split("+")[0]
    try:
        at = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        return at.timestamp() + (float(f"0.{digits}") if digits else 0.0)
    except (ValueError, OverflowError):
        raise line.fail(f"TIMESTAMP is {_shown(raw)}, expected 2023-11-16 18:15:46.6805900") from None


def _azure_original(path: Path) -> Iterator[Row]:
    for line in _csv_lines(path):
        yield Row(_timestamp_s(line), line.length("ContextTokens"), line.length("GeneratedTokens"))


def _azure(path: Path) -> Iterator[Row]:
    for line in _csv_lines(path):
        yield Row(line.number("t_ms", _MAX_SECONDS * 1e3) / 1e3, line.length("in"), line.length("out"))


def _lengths(path: Path) -> Iterator[Row]:
    """Rows with an empty prompt or answer are data of the published sets, and no requests: they are left out."""
    for line in _csv_lines(path):
        prompt, output = line.integer("in", MAX_LENGTH), line.integer("out", MAX_LENGTH)
        if prompt and output:
            yield Row(None, prompt, output)


def _multiturn(path: Path) -> Iterator[Row]:
    """Turns in conversation order; a prompt that is not longer than the last prompt and answer begins a new conversation.

    Each prompt is the last prompt, the last answer, and what the user says next.
    """
    conversations: list[list[tuple[int, int]]] = []
    for line in _csv_lines(path):
        prompt, output = line.integer("in", MAX_LENGTH), line.integer("out", MAX_LENGTH)
        if not (prompt and output):
            continue
        if conversations and prompt > sum(conversations[-1][-1]):
            conversations[-1].append((prompt, output))
        else:
            conversations.append([(prompt, output)])
    # Turns of a conversation lie next to each other in the file, but not in time: deal them out, each in its order.
    owners = [c for c, turns in enumerate(conversations) for _ in turns]
    np.random.default_rng(0).shuffle(owners)
    next_turn = [0] * len(conversations)
    history: list[list[Run]] = [[] for _ in conversations]
    for i, c in enumerate(owners):
        prompt, output = conversations[c][next_turn[c]]
        next_turn[c] += 1
        known = sum(run.length for run in history[c])
        runs = [*history[c], Run(c, known, prompt - known)]
        history[c] = [*runs, Run(output_stream(i), 0, output)]
        yield Row(None, prompt, output, runs)


def _mooncake(path: Path) -> Iterator[Row]:
    """FAST '25 traces: a hash id stands for 512 tokens and everything before them."""
    block = 512
    for line in _json_lines(path):
        prompt = line.length("input_length")
        ids = line.items("hash_ids")
        if not (len(ids) - 1) * block < prompt <= len(ids) * block:
            raise line.fail(f"{len(ids)} hash_ids of {block} tokens do not make a prompt of {prompt}")
        if not all(isinstance(i, int) and 0 <= i < _MAX_HASH_ID for i in ids):
            raise line.fail("hash_ids must be integers from 0")
        arrival_s = line.number("timestamp", _MAX_SECONDS * 1e3) / 1e3
        yield Row(arrival_s, prompt, line.length("output_length"), _runs_of_blocks(0, ids, block, prompt))


def _runs_of_blocks(stream: int, ids: Iterable[int], block: int, length: int) -> list[Run]:
    """``length`` tokens in blocks; neighbours in the stream become one run."""
    runs: list[Run] = []
    for i in ids:
        if runs and runs[-1].first + runs[-1].length == i * block:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + block)
        else:
            runs.append(Run(stream, i * block, block))
    excess = sum(run.length for run in runs) - length
    runs[-1] = runs[-1]._replace(length=runs[-1].length - excess)
    return runs


def _agentic(path: Path) -> Iterator[Row]:
    """One conversation of a coding agent a line; hash ids, local to it, as [first, count] of ``block`` tokens each.

    Conversations have no start times, so requests come out in order within each: :func:`_agentic_times` places them. Requests that got no
    answer are left out.
    """
    for conversation, line in enumerate(_json_lines(path)):
        block = line.integer("block", 1 << 16, 1)
        for where, request, start_s in _agentic_requests(line):
            prompt, output = request.length("in"), request.integer("out", MAX_LENGTH)
            if output == 0:
                continue
            runs = [Run(conversation, first * block, count * block) for first, count in _agentic_hashes(request)]
            hashed = sum(run.length for run in runs)
            if not hashed <= prompt < hashed + block:
                raise request.fail(f"{hashed} hashed tokens do not make a prompt of {prompt} in blocks of {block}")
            if prompt != hashed:  # an incomplete block has no hash, and nobody shares it
                runs.append(Run((1 << 61) + conversation, where << 20, prompt - hashed))
            yield Row(start_s + request.number("t", _MAX_SECONDS), prompt, output, runs, priority=conversation)


def _agentic_requests(line: _Line) -> Iterator[tuple[int, _Line, float]]:
    """(number in the conversation, request, what its time is relative to); sub-agents' requests are relative to their start."""
    number = itertools.count()
    for k, item in enumerate(line.items("reqs")):
        request = line.inner(item, f"reqs[{k}]")
        if "sub" not in request.fields:
            yield next(number), request, 0.0
            continue
        start_s = request.number("t", _MAX_SECONDS)
        for j, inner in enumerate(request.items("sub")):
            yield next(number), request.inner(inner, f"sub[{j}]"), start_s


def _agentic_hashes(request: _Line) -> Iterator[tuple[int, int]]:
    for pair in request.items("h"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and 0 <= n < _MAX_HASH_ID for n in pair)):
            raise request.fail(f"h holds {_shown(pair)}, expected [first, count]")
        yield pair[0], pair[1]


def _own(path: Path) -> Iterator[Row]:
    """Our format: ``{"arrival_s": 0.5, "prompt_tokens": 300, "output_tokens": 40, "prefix": [["name", 200]], "tenant": "x"}``.

    ``prefix``: the prompt begins with so many tokens of each named text; the rest is its own. It, ``n`` (samples), ``tenant``
    and ``priority`` may be left out.
    """
    names: dict[str, int] = {}
    for i, line in enumerate(_json_lines(path)):
        prompt = line.length("prompt_tokens")
        arrival_s = line.number("arrival_s", _MAX_SECONDS) if "arrival_s" in line.fields else None
        priority = line.integer("priority", 1 << 30, -(1 << 30)) if "priority" in line.fields else 0
        samples = line.integer("n", 1024, 1) if "n" in line.fields else 1
        tenant = line.fields.get("tenant", "")
        if not isinstance(tenant, str) or len(tenant) > 64:
            raise line.fail(f"tenant is {_shown(tenant)}, expected at most 64 characters")
        runs: list[Run] = []
        for pair in line.items("prefix") if "prefix" in line.fields else []:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int) and pair[1] > 0):
                raise line.fail(f"prefix holds {_shown(pair)}, expected [name, tokens]")
            runs.append(Run(names.setdefault(pair[0], len(names)), 0, pair[1]))
        rest = prompt - sum(run.length for run in runs)
        if rest < 0:
            raise line.fail(f"the prefixes are {prompt - rest} tokens long, the prompt only {prompt}")
        if rest:
            runs.append(Run(_private(i), 0, rest))
        yield Row(arrival_s, prompt, line.length("output_tokens"), runs, priority, tenant, samples)


class Reader(NamedTuple):
    read: Callable[[Path], Iterator[Row]]
    keys: frozenset[str]  # columns or keys by which a file is recognized; none: it has to be named


READERS = {
    "azure-original": Reader(_azure_original, frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})),
    "azure": Reader(_azure, frozenset({"t_ms", "in", "out"})),
    "lengths": Reader(_lengths, frozenset({"in", "out"})),
    "multiturn": Reader(_multiturn, frozenset()),
    "mooncake": Reader(_mooncake, frozenset({"timestamp", "input_length", "hash_ids"})),
    "agentic": Reader(_agentic, frozenset({"block", "reqs"})),
    "twinplane": Reader(_own, frozenset({"prompt_tokens", "output_tokens"})),
}


def detect(path: Path) -> str:
    """The format of a file, from the names in its first line."""
    first = next(_text_lines(path), None)
    if first is None:
        raise TraceError(f"{path}: is empty")
    text = first[1].strip()
    keys = set(next(_json_lines(path)).fields) if text.startswith("{") else {name.strip() for name in text.split(",")}
    for name, reader in READERS.items():
        if reader.keys and reader.keys <= keys:
            return name
    raise TraceError(f"{path}:{first[0]}: no known format has {', '.join(sorted(keys)[:8])}; known are {', '.join(READERS)}")


def load(path: Path, *, format: str | None = None, limit: int | None = None, rate: float | None = None, seed: int = 0) -> Trace:
    """Read a trace; ``rate``: Poisson arrivals instead of its own times. Raises TraceError."""
    name = format or detect(path)
    if name == "agentic":
        rows = _agentic_times(path, _agentic(path), rate, seed)
    else:
        rows = list(itertools.islice(READERS[name].read(path), limit))
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    missing = [row for row in rows if row.arrival_s is None]
    if missing and len(missing) != len(rows):
        raise TraceError(f"{path}: only some of its requests have arrival times")
    trace = build(path.name, rows)
    if limit is not None:
        trace = trace.limited(limit)
    return trace if rate is None or name == "agentic" else trace.retimed(rate, seed)


def _agentic_times(path: Path, rows: Iterator[Row], rate: float | None, seed: int) -> list[Row]:
    """Conversations start as a Poisson process that makes ``rate`` requests per second on average; within each, times stay."""
    if rate is None:
        raise TraceError(f"{path}: conversations have no start times in this format: give a rate (--rate)")
    listed = list(rows)  # priority holds the conversation
    if not listed:
        return listed
    conversations = listed[-1].priority + 1
    starts = np.cumsum(np.random.default_rng(seed).exponential(len(listed) / conversations / rate, conversations))
    return [dataclasses.replace(row, arrival_s=(row.arrival_s or 0.0) + float(starts[row.priority]), priority=0) for row in listed]


def synthetic(name: str, count: int, prompt: tuple[float, float, int, int], output: tuple[float, float, int, int], seed: int = 0) -> Trace:
    """``count`` requests with log-normal lengths, each given as (mean, sigma, least, most). No arrival times."""
    dice = np.random.default_rng(seed)

    def lengths(mean: float, sigma: float, least: int, most: int) -> NDArray[np.int64]:
        drawn = dice.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        return np.clip(np.rint(drawn), least, most).astype(np.int64)

    return build(name, (Row(None, int(i), int(o)) for i, o in zip(lengths(*prompt), lengths(*output), strict=True)))

"""What a step costs the data plane outside the forward pass: sampling by kind of row, and a whole decode step of the worker's loop.

The logits are random: a broad bell, and some tens of tokens well above it, as a language model's are between an easy and a hard choice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from twinplane.data_plane.device import Device
from twinplane.data_plane.rows import Rows
from twinplane.data_plane.sampler import Sampler
from twinplane.data_plane.step import StepView
from twinplane.data_plane.worker import Worker
from twinplane.kernels import registry
from twinplane.shared import wire

_BLOCK_SIZE, _MODEL_LEN, _POSITION = 16, 2048, 300
# What each kind of row is opened with.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"flags": int(wire.RowFlag.GREEDY)},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "greedy_logprobs": {"flags": int(wire.RowFlag.GREEDY | wire.RowFlag.LOGPROBS)},
    "penalties": {"frequency_penalty": 0.5},
    "beams": {"flags": int(wire.RowFlag.GREEDY), "num_candidates": 8},
}


def run(batch: int = 16, vocab: int = 49_152, repeats: int = 200) -> dict[str, Any]:
    """Median microseconds of one call for `batch` rows.

    ``sampler``: one line a kind of row. ``decode_step_..._us``: a step of `batch` decodes through the worker's loop, in which the
    forward pass takes no time.
    """
    logits = _logits(batch, vocab)
    ops = registry.select("cpu")
    lines = [_sampler_line(kind, logits, ops, repeats) for kind in KINDS]
    steps = {f"decode_step_{kind}_us": _step_us(kind, logits, ops, repeats) for kind in ("greedy", "temperature")}
    return {"batch": batch, "vocab": vocab, **steps, "sampler": lines}


def _logits(batch: int, vocab: int) -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    logits = random.standard_normal((batch, vocab)) * 2.5
    likely = random.integers(0, vocab, (batch, 40))
    logits[np.arange(batch)[:, None], likely] = 8 + random.exponential(2.5, (batch, 40))
    return logits.astype(np.float32)


def _opened(kind: str, batch: int) -> NDArray[np.void]:
    opens = np.zeros(batch, dtype=wire.ROW_OPEN)
    opens["row"], opens["seed"], opens["temperature"], opens["top_p"], opens["repetition_penalty"] = range(batch), range(batch), 1, 1, 1
    for name, value in KINDS[kind].items():
        opens[name] = value
    return opens


def _capacities(batch: int) -> wire.Capacities:
    return wire.Capacities(
        ring_depth=2,
        max_rows=batch,
        max_step_tokens=batch,
        max_table_writes=batch,
        max_copies=1,
        max_extra_words=1,
        max_results=batch,
        max_swaps=1,
        max_candidates=32 * batch,
    )


def _median_us(work: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        work()
        samples.append(time.perf_counter_ns() - start)
    return round(statistics.median(samples) / 1e3, 1)


def _sampler_line(kind: str, logits: NDArray[np.float32], ops: registry.Ops, repeats: int) -> dict[str, Any]:
    batch, vocab = logits.shape
    capacities = _capacities(batch)
    rows = Rows(capacities, block_size=_BLOCK_SIZE, max_model_len=_MODEL_LEN, num_blocks=1, vocab_size=vocab)
    rows.apply(StepView(_decode_step(_opened(kind, batch), batch, capacities), wire.StepSlotLayout(capacities)))
    sampler = Sampler(rows, ops)
    scratch = torch.from_numpy(logits.copy())  # edits and penalties change it

    def work() -> None:
        sampler.sample(scratch, list(range(batch)), [_POSITION] * batch)

    work()
    return {"rows": kind, "us": _median_us(work, repeats)}


class _Rings:
    """One step, again and again: its first run opens the rows."""

    def __init__(self, first: NDArray[np.uint8], later: NDArray[np.uint8], capacities: wire.Capacities) -> None:
        self.capacities = tuple(capacities)
        self.steps_done = 0
        self._first, self._later = first, later
        self._result = np.zeros(wire.ResultSlotLayout(capacities).bytes, dtype=np.uint8)

    def wait_step(self, timeout_ns: int) -> int | None:
        return self.steps_done

    def step(self, sequence: int) -> NDArray[np.uint8]:
        return self._later if sequence else self._first

    def consume(self, sequence: int) -> None:
        self.steps_done += 1

    def result_slot(self, timeout_ns: int) -> NDArray[np.uint8] | None:
        return self._result

    def publish(self) -> None: ...

    def interrupted(self) -> int:
        return 0

    def set_phase(self, phase: int, step: int) -> None: ...


def _decode_step(opens: NDArray[np.void], batch: int, capacities: wire.Capacities) -> NDArray[np.uint8]:
    """`batch` relayed or (with `opens`) fresh decodes at one position."""
    layout = wire.StepSlotLayout(capacities)
    slot = np.zeros(layout.bytes, dtype=np.uint8)
    header, seqs = np.zeros(1, dtype=wire.STEP_HEADER), np.zeros(batch, dtype=wire.SEQ_ENTRY)
    header["num_seqs"] = header["num_decodes"] = header["num_tokens"] = batch
    header["num_opens"], header["num_substeps"] = len(opens), 1
    seqs["row"], seqs["token_start"], seqs["position"] = range(batch), range(batch), _POSITION
    seqs["num_tokens"], seqs["flags"] = 1, wire.SeqFlag.SAMPLES
    tokens = np.full(batch, 0 if len(opens) else wire.NO_TOKEN, dtype=np.int32)
    parts: tuple[tuple[str, NDArray[Any]], ...] = (("header", header), ("seqs", seqs), ("token_ids", tokens), ("opens", opens))
    for name, values in parts:
        at = getattr(layout, name)
        slot[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)
    return slot


def _step_us(kind: str, logits: NDArray[np.float32], ops: registry.Ops, repeats: int) -> float:
    batch, vocab = logits.shape
    capacities, opens = _capacities(batch), _opened(kind, batch)
    rings = _Rings(_decode_step(opens, batch, capacities), _decode_step(opens[:0], batch, capacities), capacities)
    device = cast(Device, SimpleNamespace(ops=ops, forward=lambda _: torch.from_numpy(logits)))
    worker = Worker(device, rings, block_size=_BLOCK_SIZE, num_blocks=1, max_model_len=_MODEL_LEN, vocab_size=vocab)

    def work() -> None:
        until = rings.steps_done + 1
        worker.run(lambda: rings.steps_done >= until)

    work()
    return _median_us(work, repeats)

"""One simulation: a trace, a system, a device model; and the figures people ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twinplane.shared.config import ServeSettings

from .. import _core, _simulator
from ..core_config import core_config
from .devices import DeviceModel
from .traces import Trace

Points = Sequence[tuple[float, float]]
Progress = Callable[[int, float], object] | None

# Host time of a step in microseconds, by sequences in it, where the device model does not hold it already.
# twinplane: `twinplane bench tick`, median, docs/performance.md; with steps in flight it is hidden behind them.
TWINPLANE_HOST_US: Points = ((0, 2.0), (64, 3.3), (256, 15.3), (1024, 65.0), (4096, 333.0))
# prefill-first: schedule(), update and output processing of vLLM 0.33 in Python, medians on the same two-core machine. Of schedule() and
# update the middle of what several runs gave: 1.16 ms at 64, 4.4 to 8.9 at 256, 19.2 to 22.3 at 1,024. Output processing took 8.8 ms at
# 1,024, and is taken to grow with the sequences.
PYTHON_HOST_US: Points = ((0, 0.0), (64, 1710.0), (256, 8850.0), (1024, 29550.0))

UNFINISHED, FINISHED, REFUSED, GIVEN_UP = 0, 1, 2, 3  # outcomes


@dataclass(frozen=True)
class Setup:
    """What a system runs on. ``settings``: those of ``twinplane serve``; the scheduler's, block size and KV dtype count."""

    device: DeviceModel
    settings: ServeSettings
    host_us: Mapping[str, Points] = field(default_factory=dict)  # by system; instead of the measured ones

    @property
    def model(self) -> DeviceModel:
        return self.device.with_kv_dtype(self.settings.kv_cache_dtype)

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len or min(self.device.max_model_len, self.model.kv.capacity_tokens)

    @property
    def block_size(self) -> int:
        return self.settings.block_size or self.device.kv.block_size

    @property
    def pool(self) -> _core.Pool:
        """With a host's pool if there is swap space. Raises ValueError if the device model does not say what swapping takes."""
        size, swap = self.block_size, self.model.swap
        num_blocks = max(1, self.model.kv.capacity_tokens // size)
        if not self.settings.swap_space:
            return _core.Pool(num_blocks=num_blocks, block_size=size)
        if swap is None:
            raise ValueError(f"swap_space is {self.settings.swap_space} bytes, but the model of {self.device.name} has no `swap`")
        return _core.Pool(
            num_blocks=num_blocks,
            block_size=size,
            num_host_blocks=self.settings.swap_space // (swap.bytes_per_token * size),
            swap_block_ns=round(2e3 * swap.time_us(size, size)),
        )

    def host_points_us(self, system: str) -> Points:
        if system in self.host_us:
            return self.host_us[system]
        if self.device.includes_host_time:
            return ((0, 0.0),)
        return {"twinplane": TWINPLANE_HOST_US, "prefill-first": PYTHON_HOST_US}.get(system, ((0, 0.0),))


@dataclass(frozen=True)
class Window:
    """Which part of a run counts, in virtual seconds."""

    stop_at_s: float = 0.0  # end there, whatever is unfinished; 0 = when everything is done
    measure_from_s: float = 0.0  # averages over time leave out what was before
    sample_interval_s: float = 1.0


@dataclass(frozen=True)
class Result:
    """What came out. Arrays are ``[requests]``; times in virtual seconds, NaN where it did not come to that."""

    system: str
    trace: Trace
    raw: dict[str, Any]  # see _simulator.pyi
    wall_s: float

    @property
    def prompt_tokens(self) -> NDArray[np.uint32]:
        return self.trace.prompt_tokens

    @property
    def is_finished(self) -> NDArray[np.bool_]:
        return np.asarray(self.raw["outcome"] == FINISHED)

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Of those that have a first token."""
        ttft = self.raw["first_token_s"] - self.raw["arrival_s"]
        return np.asarray(ttft[~np.isnan(ttft)])

    @property
    def itl_s(self) -> NDArray[np.float32]:
        """``[gaps]``: all gaps between two tokens of a request."""
        return np.asarray(self.raw["gaps_s"])

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Arrival to last token, of those that finished."""
        return np.asarray((self.raw["finish_s"] - self.raw["arrival_s"])[self.is_finished])

    @property
    def normalized_latency_s(self) -> NDArray[np.float64]:
        """Latency per output token, of those that finished (arXiv 2309.06180, section 6.1)."""
        return np.asarray(self.latency_s / self.raw["tokens"][self.is_finished])

    @property
    def output_tokens_per_s(self) -> float:
        return float(self.raw["tokens"].sum() / max(self.raw["totals"]["end_s"], 1e-9))

    @property
    def averages(self) -> Mapping[str, float]:
        averages: Mapping[str, float] = self.raw["averages"]
        return averages

    def figures(self) -> dict[str, Any]:
        """By name, units in the names; distributions are objects of their own."""
        raw, totals, averages = self.raw, self.raw["totals"], self.averages
        end_s = max(totals["end_s"], 1e-9)
        outcome = raw["outcome"]
        queued = raw["first_scheduled_s"] - raw["arrival_s"]
        served_prompt = float(self.prompt_tokens[self.is_finished].sum())
        return {
            "requests": len(outcome),
            "finished": int((outcome == FINISHED).sum()),
            "refused": int((outcome == REFUSED).sum()),
            "given_up": int((outcome == GIVEN_UP).sum()),
            "unfinished": int((outcome == UNFINISHED).sum()),
            "duration_s": float(totals["end_s"]),
            "requests_per_s": float((outcome == FINISHED).sum() / end_s),
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_ms": _distribution(self.ttft_s * 1e3),
            "itl_ms": _distribution(self.itl_s * 1e3),
            "latency_ms": _distribution(self.latency_s * 1e3),
            "latency_per_token_ms": _distribution(self.normalized_latency_s * 1e3),
            "queued_ms": _distribution(queued[~np.isnan(queued)] * 1e3),
            "running_mean": averages["running"],
            "waiting_mean": averages["waiting"],
            "kv_held_share": _share(averages["held_tokens"], averages["capacity_tokens"]),
            "kv_allocated_share": _share(averages["allocated_tokens"], averages["capacity_tokens"]),
            "kv_saved_by_sharing_share": 1.0 - _share(averages["allocated_tokens"], averages["mapped_tokens"])
            if averages["mapped_tokens"]
            else 0.0,
            "kv_waste_share": 1.0 - _share(averages["held_tokens"] + averages["reserved_tokens"], averages["allocated_tokens"])
            if averages["allocated_tokens"]
            else 0.0,
            "preemptions": int(raw["preemptions"].sum()),
            "swapped_blocks": int(raw.get("blocks_swapped_out", 0)),
            "cached_prompt_share": _share(float(raw["cached_tokens"].sum()), served_prompt),
            "device_busy_share": _share(totals["device_busy_s"], end_s),
            "steps": totals["steps"],
            "sequence_steps": totals["sequence_steps"],
            "sequence_steps_per_real_s": totals["sequence_steps"] / max(self.wall_s, 1e-9),
            "tenants": self.tenants(),
        }

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Of each tenant, if there are several: requests, output tokens, time to first token."""
        if len(self.trace.tenants) < 2:
            return {}
        ttft_ms = (self.raw["first_token_s"] - self.raw["arrival_s"]) * 1e3
        found = {}
        for i, name in enumerate(self.trace.tenants):
            mine = self.trace.tenant == i
            answered = mine & ~np.isnan(ttft_ms)
            tokens = int(self.raw["tokens"][mine].sum())
            found[name] = {"requests": int(mine.sum()), "output_tokens": tokens, "ttft_ms": _distribution(ttft_ms[answered])}
        return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _distribution(values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    mean, std = values.mean(dtype=np.float64), values.std(dtype=np.float64)
    return {name: float(v) for name, v in {"mean": mean, "std": std, "p50": p50, "p90": p90, "p99": p99, "max": values.max()}.items()}


def simulate(
    system: str,
    trace: Trace,
    setup: Setup,
    window: Window = Window(),
    *,
    check_interval: int = 0,
    progress: Progress = None,
) -> Result:
    """Replay ``trace``. ``check_interval``: steps between checks of the production scheduler's invariants, 0 = none.

    Raises TraceError if the trace has no times, ValueError if the settings make no sense.
    """
    device = setup.model.native(setup.block_size)
    capacity, settings = setup.model.kv.capacity_tokens, setup.settings
    options = _simulator.Options(
        host_ns=[(n, us * 1e3) for n, us in setup.host_points_us(system)],
        stop_at_ns=round(window.stop_at_s * 1e9),
        sample_interval_ns=round(window.sample_interval_s * 1e9),
        measure_from_ns=round(window.measure_from_s * 1e9),
    )
    native = trace.native()
    limits = {"max_model_len": setup.max_model_len, "max_batch": settings.max_num_seqs}
    started = time.monotonic()
    if system == "twinplane":
        config = core_config(settings, max_model_len=setup.max_model_len)
        raw = _simulator.twinplane(
            native, device, options, config=config, pool=setup.pool, check_interval=check_interval, progress=progress
        )
    elif system == "prefill-first":
        # Such a scheduler takes whole prompts, so a step of it must hold the longest.
        most = max(settings.max_num_batched_tokens, setup.max_model_len)
        raw = _simulator.prefill_first(native, device, options, pool=setup.pool, max_prefill_tokens=most, progress=progress, **limits)
    elif system == "static":
        raw = _simulator.static(native, device, options, capacity_tokens=capacity, progress=progress, **limits)
    elif system.startswith("orca-"):
        reservation = system.removeprefix("orca-")
        raw = _simulator.contiguous(native, device, options, reservation=reservation, capacity_tokens=capacity, progress=progress, **limits)
    else:
        raise ValueError(f"unknown system {system!r}")
    return Result(system, trace, raw, time.monotonic() - started)

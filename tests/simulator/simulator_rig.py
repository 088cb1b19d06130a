"""Small traces and devices whose schedules can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from twinplane.control_plane import _core, _simulator
from twinplane.control_plane.simulator import traces
from twinplane.control_plane.simulator.traces import Row, Trace

MS = 1_000_000


def trace_of(*rows: tuple[float, int, int]) -> _simulator.Trace:
    """(arrival in ms, prompt, output) each."""
    return traces.build("test", [Row(ms / 1e3, prompt, output) for ms, prompt, output in rows]).native()


def flat_device(ms: float = 10.0) -> _simulator.Device:
    """Every step takes the same time."""
    return _simulator.Device(by_tokens_ns=[(0, ms * MS)])


def token_device(ms_per_token: float = 1.0) -> _simulator.Device:
    return _simulator.Device(by_tokens_ns=[(0, 0), (1, ms_per_token * MS)])


def config_of(**settings: Any) -> _core.CoreConfig:
    defaults: dict[str, Any] = {
        "max_rows": 8,
        "max_step_tokens": 64,
        "max_chunk_tokens": 64,
        "depth": 1,
        "max_waiting_requests": 1000,
        "max_waiting_tokens": 1 << 40,
        "max_model_len": 4096,
    }
    return _core.CoreConfig(**(defaults | settings))


def replay(
    trace: _simulator.Trace,
    device: _simulator.Device,
    *,
    num_blocks: int = 1000,
    block_size: int = 16,
    host_ms: float = 0.0,
    num_host_blocks: int = 0,
    swap_block_ns: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """The production scheduler, its invariants checked at every step."""
    return _simulator.twinplane(
        trace,
        device,
        _simulator.Options(host_ns=[(0, host_ms * MS)]),
        config=config_of(**settings),
        pool=_core.Pool(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks, swap_block_ns=swap_block_ns),
        check_interval=1,
    )


def ms(values: Any) -> list[float]:
    return [round(float(v) * 1e3, 6) for v in values]


def random_trace(seed: int, count: int = 200, *, rate: float = 50.0, longest: int = 60) -> Trace:
    dice = np.random.default_rng(seed)
    rows = [Row(None, int(p), int(o)) for p, o in zip(dice.integers(1, longest, count), dice.integers(1, longest, count), strict=True)]
    return traces.build("random", rows).retimed(rate, seed)

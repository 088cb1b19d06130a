"""Latency and throughput on an H100, against a prefill-first scheduler in Python; on the device models h100-*."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from twinplane.shared.config import ServeSettings

from . import devices
from .cells import Cell, Data, Group, at_least, at_most, lengths_between, shuffled
from .run import Points, Result, Setup, Window, simulate
from .traces import Trace

MODELS = ("h100-llama-8b", "h100-llama-70b")
BUDGETS = (256, 512, 1024)
# Azure's conversations per second in the latency cells: about four fifths of what either scheduler can take.
LATENCY_RATE = {"h100-llama-8b": 12.0, "h100-llama-70b": 4.0}
# Of a step, what the first generation of such engines left to its host at most (62 %): published for an 8B model.
HOST_SHARE = 0.62


def setup(model: str, budget: int, **settings: Any) -> Setup:
    values: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": budget,
        "max_chunk_tokens": budget,
        "max_waiting_requests": 1_000_000,
        "max_waiting_tokens": 1 << 40,
        "max_model_len": 16_384,
    }
    return Setup(devices.load(model), ServeSettings(**(values | settings)))


def budget_step_us(result: Result, run: Setup, budget: int) -> float:
    """A step of ``budget`` tokens beside the mean decodes of the run: their contexts are read, and a mean prompt's chunk attends."""
    averages = result.averages
    return run.model.step_us(
        budget,
        sequences=round(averages["running"]),
        context_tokens=round(averages["held_tokens"]),
        chunk_pairs=round(budget * float(result.prompt_tokens.mean()) / 2),
    )


def latency(data: Data) -> Iterator[Cell]:
    conversations = shuffled(data.trace("azure-conv"))
    for model in MODELS:
        rate = LATENCY_RATE[model]
        trace = conversations.limited(round(rate * 600)).retimed(rate)
        prefill_first = simulate("prefill-first", trace, setup(model, 512)).itl_s * 1e3
        for budget in BUDGETS:
            run = setup(model, budget)
            result = simulate("twinplane", trace, run)
            gaps_ms = result.itl_s * 1e3
            if budget == 512:
                fell = 100 * (1 - float(gaps_ms.std()) / float(prefill_first.std()))
                yield at_least(f"{model}: fall of the ITL's standard deviation %, budget 512", "a fall of 70 %", fell, 85.0)
            step_ms = budget_step_us(result, run, budget) / 1e3
            source = f"the time of a step of {budget} tokens: {step_ms:.1f} ms"
            yield at_most(f"{model}: P99 ITL / that, budget {budget}", source, float(np.percentile(gaps_ms, 99)) / step_ms, 1.1)
            yield at_most(f"{model}: maximum ITL / that, budget {budget}", source, float(gaps_ms.max()) / step_ms, 1.3)


def latency_target(data: Data) -> Iterator[Cell]:
    """A budget that follows a target: large steps are allowed, and the cost model learns how large they may be."""
    conversations = shuffled(data.trace("azure-conv"))
    for model, target_ms in (("h100-llama-8b", 20.0), ("h100-llama-70b", 50.0)):
        trace = conversations.limited(round(LATENCY_RATE[model] * 600)).retimed(LATENCY_RATE[model])
        result = simulate("twinplane", trace, setup(model, 2048, itl_target_ms=target_ms))
        p99_ms = float(np.percentile(result.itl_s, 99)) * 1e3
        yield at_most(f"{model}: P99 ITL ms at a target of {target_ms:g} ms", "none", p99_ms, target_ms)


def _saturated(system: str, trace: Trace, run: Setup) -> Result:
    """All requests are there from the start; two minutes, of which all count."""
    return simulate(system, trace.retimed(1e6), run, Window(stop_at_s=120.0))


def published_host_us(run: Setup, context: float) -> Points:
    """Host time such that decodes of a batch, ``context`` tokens each, leave the device idle for HOST_SHARE of the time."""
    native, share = run.model.native(), HOST_SHARE / (1 - HOST_SHARE)
    steps = ((n, run.model.step_us(n, sequences=n, context_tokens=round(n * context), device=native)) for n in (1, 64, 256))
    return tuple((n, us * share) for n, us in steps)


def throughput(data: Data) -> Iterator[Cell]:
    trace = shuffled(lengths_between(data.trace("sharegpt"), least=4, most=2048)).limited(12_000)
    context = float((trace.prompt_tokens + trace.output_tokens / 2).mean())
    for model, goal in (("h100-llama-8b", 2.0), ("h100-llama-70b", 1.5)):
        run = setup(model, 1024)
        ours = _saturated("twinplane", trace, run).output_tokens_per_s
        measured = _saturated("prefill-first", trace, run).output_tokens_per_s
        yield at_least(f"{model}: throughput against prefill-first, measured host time", "2.8x", ours / measured, goal)
        slow_host = dataclasses.replace(run, host_us={"prefill-first": published_host_us(run, context)})
        published = _saturated("prefill-first", trace, slow_host).output_tokens_per_s
        name = f"{model}: throughput against prefill-first, host {HOST_SHARE:.0%} of a step"
        yield at_least(name, "2.8x", ours / published, goal)


GROUPS = (
    Group("inter-token latency", ("azure-conv",), latency),
    Group("inter-token latency at a target", ("azure-conv",), latency_target),
    Group("throughput without sharing", ("sharegpt",), throughput),
)

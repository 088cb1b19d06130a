"""The figures of arXiv 2309.06180 ("PagedAttention"), with the production scheduler where the paper has its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from twinplane.shared.config import ServeSettings

from . import devices, traces
from .cells import (
    Cell,
    Data,
    Group,
    at_least,
    at_most,
    between,
    highest_rate,
    judge,
    lengths_between,
    near,
    of_lengths,
    shuffled,
    sustained,
    with_prefix,
    with_samples,
)
from .run import Result, Setup
from .traces import Trace

MAX_MODEL_LEN = 2048
CONTIGUOUS = ("orca-max", "orca-pow2", "orca-oracle")

# Mean latency per output token up to which a rate counts as served: where the curves of Fig. 12 have left their plateau.
LATENCY_LIMIT_S = 0.5
# Fig. 2 and 13a were measured at this rate, on a 13B model.
RATE = 2.0


def setup(model: str) -> Setup:
    """As in the paper: one step at a time, prompts whole as far as they fit, blocks of 16."""
    settings = ServeSettings(
        max_num_seqs=256,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_chunk_tokens=MAX_MODEL_LEN,
        overlap_depth=1,
        max_waiting_requests=1_000_000,
        max_waiting_tokens=1 << 40,
        block_size=16,
    )
    return Setup(devices.load(model), settings)


def sharegpt(data: Data) -> Trace:
    """First turns of ShareGPT; in random order, since neighbours in the file are alike."""
    return shuffled(lengths_between(data.trace("sharegpt"), least=4, most=MAX_MODEL_LEN))


@functools.cache
def alpaca() -> Trace:
    """Lengths like those of Alpaca, which no permissive licence covers: means as in the paper's Fig. 11, log-normal around them."""
    return traces.synthetic("alpaca-like", 60_000, (19.31, 0.62, 4, 512), (58.9, 0.90, 2, 1024))


def _memory_shares(result: Result) -> tuple[float, float, float, float]:
    """Percent of KV memory: tokens, reserved, internal fragmentation, external fragmentation and free."""
    a = result.averages
    held, reserved, internal = (100 * a[name] / a["capacity_tokens"] for name in ("held_tokens", "reserved_tokens", "overreserved_tokens"))
    return held, reserved, internal, 100 - held - reserved - internal


def memory(data: Data) -> Iterator[Cell]:
    """Fig. 2 and 13a, one run each."""
    published = {
        "orca-max": ((20.4, 13.3, 57.3, 8.9), 5.0, 7.0),
        "orca-pow2": ((26.8, 17.9, 13.6, 41.6), 5.0, 9.8),
        "orca-oracle": ((38.2, 25.2, 0.0, 36.6), 2.0, 13.6),
    }
    trace, opt = sharegpt(data), setup("a100-opt-13b")
    for system, (shares, points, batch) in published.items():
        result = sustained(system, trace, opt, rate=RATE, seconds=3600)
        got = _memory_shares(result)
        is_ok = all(abs(a - b) <= points for a, b in zip(got, shares, strict=True))
        source = f"Fig. 2: {' / '.join(f'{s:g}' for s in shares)} %"
        goal = f"each within {points:g} points"
        yield judge(f"{system}: tokens / reserved / internal / external %, ShareGPT", source, got, goal, is_ok=is_ok)
        yield near(f"{system}: running batch, ShareGPT", f"Fig. 13a: {batch}", result.averages["running"], batch, share=0.12)
    result = sustained("twinplane", trace, opt, rate=RATE, seconds=3600)
    yield near("twinplane: running batch, ShareGPT", "Fig. 13a, paged: 30.4", result.averages["running"], 30.4, share=0.12)
    used = 100 * result.averages["held_tokens"] / result.averages["allocated_tokens"]
    yield at_least("twinplane: tokens / allocated %, ShareGPT, blocks of 16", "Fig. 2, paged: 96.3 %", used, 97.5)
    yield at_most("twinplane: KV waste %, ShareGPT, blocks of 16", "section 1: below 4 %", 100 - used, 4.0)


def alpaca_memory(data: Data) -> Iterator[Cell]:
    result = sustained("twinplane", alpaca(), setup("a100-opt-13b"), rate=30.0, seconds=1200)
    used = 100 * result.averages["held_tokens"] / result.averages["allocated_tokens"]
    yield at_least("twinplane: tokens / allocated %, Alpaca-like, blocks of 16", "Fig. 2, paged: 96.3 %", used, 90.5)
    yield near("twinplane: running batch, Alpaca-like", "Fig. 13b, paged: 132.44", result.averages["running"], 132.44, share=0.12)


def rates(data: Data) -> Iterator[Cell]:
    """Fig. 12 for ShareGPT: how much more load at the same latency."""
    trace = sharegpt(data)
    for model in ("a100-opt-13b", "a100-opt-66b"):
        found = {
            system: highest_rate(system, trace, setup(model), limit_s=LATENCY_LIMIT_S, seconds=3600)
            for system in ("twinplane", "orca-oracle", "orca-max", "static")
        }
        name, ours = model.removeprefix("a100-"), found["twinplane"]
        yield between(f"{name}: rate against orca-oracle, ShareGPT", "Fig. 12: 1.7 to 2.7x", ours / found["orca-oracle"], 1.7, 2.7)
        yield between(f"{name}: rate against orca-max, ShareGPT", "Fig. 12: 2.7 to 8x", ours / found["orca-max"], 2.7, 8.0)
        source, gain = "Fig. 12: up to 22x; static batches answer together", ours / found["static"]
        yield judge(f"{name}: rate against static, ShareGPT", source, gain, "5 to 22", is_ok=5 <= gain <= 22)


def parallel_sampling(data: Data) -> Iterator[Cell]:
    """Fig. 15a: blocks that samples of one prompt share, of those they would take apart."""
    opt = setup("a100-opt-13b")
    kinds = (
        ("Alpaca-like", alpaca(), 20.0, {2: (5.1, 7.1), 4: (7.5, 9.5), 6: (8.8, 10.8)}, "Fig. 15a: 6.1, 8.5, 9.8 % for 2, 4, 6"),
        ("ShareGPT", sharegpt(data), 1.5, dict.fromkeys((2, 4, 6), (16.2, 30.5)), "section 6.3: 16.2 to 30.5 %"),
    )
    for name, trace, sequences_per_s, bands, source in kinds:
        for n, (least, most) in bands.items():
            result = sustained("twinplane", with_samples(trace, n), opt, rate=sequences_per_s / n, seconds=3600)
            got = 100 * (1 - result.averages["allocated_tokens"] / result.averages["mapped_tokens"])
            cell = f"{name}: blocks saved by {n} samples %"
            yield between(cell, source, got, least, most)


def shared_prefix(data: Data) -> Iterator[Cell]:
    """Fig. 16: translation behind one example (80 tokens) or five (341). The sentences' lengths are assumed: WMT16 is not at hand."""
    sentences = traces.synthetic("sentences", 120_000, (31.0, 0.5, 4, 256), (34.0, 0.5, 4, 256))
    opt = setup("a100-opt-13b")
    for tokens, published in ((80, 1.67), (341, 3.58)):
        trace = with_prefix(sentences, tokens)
        ours, oracle = (highest_rate(system, trace, opt, limit_s=LATENCY_LIMIT_S, seconds=900) for system in ("twinplane", "orca-oracle"))
        name, goal = f"shared prefix of {tokens} tokens: rate against orca-oracle", published - 0.2
        yield judge(name, f"Fig. 16: {published}x", ours / oracle, f">= {goal:.2f}", is_ok=ours / oracle >= goal)


def chatbot(data: Data) -> Iterator[Cell]:
    """Fig. 17: the last 1,024 tokens of a conversation as prompt, answers of up to 1,024, nothing kept between turns."""
    turns = data.trace("multiturn")
    trace = of_lengths("chatbot", np.minimum(turns.prompt_tokens, 1024), np.minimum(turns.output_tokens, 1024))
    opt = setup("a100-opt-13b")
    found = {s: highest_rate(s, trace, opt, limit_s=LATENCY_LIMIT_S, seconds=3600) for s in ("twinplane", *CONTIGUOUS)}
    for system in CONTIGUOUS:
        got = found["twinplane"] / found[system]
        yield judge(f"chatbot: rate against {system}", "Fig. 17: 2.0x", got, "1.4 or more", is_ok=got >= 1.4)


def swapping(data: Data) -> Iterator[Cell]:
    """Fig. 19a: 256 tokens out and in again, against computing them again beside the others' decodes."""
    model = devices.load("a100-opt-13b")
    assert model.swap is not None
    tokens, blocks = 256, (1, 16, 256)
    swap_ms = {size: 2 * model.swap.time_us(tokens, size) / 1e3 for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    published = (135.0, 25.0, 15.0)
    got = tuple(swap_ms[size] for size in blocks)
    is_ok = all(abs(a - b) <= 0.25 * b for a, b in zip(got, published, strict=True))
    yield judge("swap of 256 tokens, blocks of 1 / 16 / 256, ms", "Fig. 19a: ~135 / 25 / 15", got, "each within 25 %", is_ok=is_ok)
    recompute_ms = (model.step_us(tokens) - model.step_us(1)) / 1e3
    worst = max(recompute_ms / ms for size, ms in swap_ms.items() if size >= 16)
    yield at_most("recompute of 256 tokens / swap, worst of blocks of 16 or more", "section 7.3: at most 1.2", worst, 1.2)


GROUPS = (
    Group("Fig. 2 and 13a, ShareGPT", ("sharegpt",), memory),
    Group("Fig. 2 and 13b, Alpaca-like", (), alpaca_memory),
    Group("Fig. 12, ShareGPT", ("sharegpt",), rates),
    Group("Fig. 15a, parallel sampling", ("sharegpt",), parallel_sampling),
    Group("Fig. 16, shared prefix", (), shared_prefix),
    Group("Fig. 17, chatbot", ("multiturn",), chatbot),
    Group("Fig. 19a, swap and recompute", (), swapping),
)

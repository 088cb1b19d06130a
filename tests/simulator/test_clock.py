"""The virtual clock against schedules worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from simulator_rig import MS, flat_device, ms, random_trace, replay, token_device, trace_of
from twinplane.control_plane import _core, _simulator
from twinplane.control_plane.simulator import traces
from twinplane.control_plane.simulator.traces import Row, Run

FINISHED, REFUSED = 1, 2


def test_one_request_alone():
    # A step of 10 ms per token; the prompt goes in one step.
    result = replay(trace_of((5, 20, 3)), flat_device())
    assert ms(result["arrival_s"]) == [0.0]  # traces begin with their first request
    assert ms(result["first_scheduled_s"]) == [0.0]
    assert ms(result["first_token_s"]) == [10.0]
    assert ms(result["finish_s"]) == [30.0]
    assert ms(result["gaps_s"]) == [10.0, 10.0]
    assert list(result["tokens"]) == [3] and list(result["outcome"]) == [FINISHED]
    assert (result["totals"]["steps"], result["totals"]["sequence_steps"], result["totals"]["model_tokens"]) == (3, 3, 22)


def test_a_prompt_arrives_while_another_decodes():
    # depth 1, a millisecond per token in the step, budget 8:
    #   0..4    A's prompt (4)              A token 1
    #   4..5    A decodes                   A token 2        B arrives at 4.5 with a prompt of 9
    #   5..13   A decodes + 7 of B          A token 3
    #   13..16  A decodes + 2 of B          A token 4 and last; B token 1
    #   16..17  B decodes                   B token 2 and last
    result = replay(trace_of((0, 4, 4), (4.5, 9, 2)), token_device(), max_step_tokens=8)
    assert ms(result["first_scheduled_s"]) == [0.0, 5.0]
    assert ms(result["first_token_s"]) == [4.0, 16.0]
    assert ms(result["finish_s"]) == [16.0, 17.0]
    assert sorted(ms(result["gaps_s"])) == [1.0, 1.0, 3.0, 8.0]
    assert result["totals"]["steps"] == 5
    assert result["totals"]["model_tokens"] == 4 + 1 + 8 + 3 + 1


def test_host_time_is_exposed_at_depth_1_and_hidden_at_depth_2():
    # Host 4 ms, step 10 ms. Depth 1: every token costs 14. Depth 2: only the first step waits for the host, but the step after the
    # last one is under way before the end is known.
    exposed = replay(trace_of((0, 4, 5)), flat_device(), host_ms=4)
    assert ms(exposed["finish_s"]) == [70.0]
    hidden = replay(trace_of((0, 4, 5)), flat_device(), host_ms=4, depth=2)
    assert ms(hidden["first_token_s"]) == [14.0] and ms(hidden["finish_s"]) == [54.0]
    assert hidden["totals"]["sequence_steps"] == 6  # five, and the one that was for nothing


def test_a_step_begins_when_the_one_before_is_done():
    # Two steps of A are in flight when B arrives: the second one waits for A's first token, which turns out to be its last. B is
    # planned when the first returns, and runs behind the second.
    result = replay(trace_of((0, 4, 1), (3, 4, 1)), flat_device(), depth=2)
    assert ms(result["first_scheduled_s"]) == [0.0, 10.0]
    assert ms(result["finish_s"]) == [10.0, 30.0]


def test_the_clock_jumps_over_idle_time():
    result = replay(trace_of((0, 4, 1), (1_000_000, 4, 1)), flat_device())
    assert ms(result["finish_s"]) == [10.0, 1_000_010.0]
    assert result["totals"]["steps"] == 2
    assert result["averages"]["running"] == pytest.approx(20 / 1_000_010)


def test_what_can_not_be_served_is_refused_and_the_rest_goes_on():
    result = replay(trace_of((0, 100, 10), (0, 4, 1), (0, 200, 200)), flat_device(), num_blocks=4, block_size=4, max_model_len=256)
    assert list(result["outcome"]) == [REFUSED, FINISHED, REFUSED]
    assert math.isnan(result["finish_s"][0]) and math.isnan(result["first_token_s"][2])


def test_the_clock_stops_where_it_is_told():
    options = _simulator.Options(stop_at_ns=25 * MS)
    pool = _core.Pool(num_blocks=100, block_size=16)
    config = _core.CoreConfig(depth=1)
    result = _simulator.twinplane(trace_of((0, 4, 100)), flat_device(), options, config=config, pool=pool)
    assert list(result["outcome"]) == [0] and list(result["tokens"]) == [2]
    assert math.isnan(result["finish_s"][0])


def test_memory_over_time():
    # Blocks of 4; prompt 6 and the next token: 2 blocks; token 8 fills the second, the 9th enters a third.
    result = replay(trace_of((0, 6, 4)), flat_device(), num_blocks=10, block_size=4)
    samples = result["memory"]
    assert samples["at_s"][0] == 0 and samples["held_tokens"][0] == 6 and samples["allocated_tokens"][0] == 8
    averages = result["averages"]
    # held 6, 7, 8, 9 and allocated 8, 8, 8, 12, each for 10 ms.
    assert averages["held_tokens"] == pytest.approx(7.5)
    assert averages["allocated_tokens"] == pytest.approx(9.0)
    assert averages["capacity_tokens"] == 40 and averages["running"] == 1


def test_short_of_memory_the_scheduler_preempts_and_everyone_finishes():
    result = replay(trace_of((0, 16, 40), (0, 16, 40), (0, 16, 40)), flat_device(), num_blocks=8, block_size=16)
    assert list(result["outcome"]) == [FINISHED] * 3 and list(result["tokens"]) == [40] * 3
    assert result["preempted"] == result["preemptions"].sum() > 0
    assert result["preemptions"][0] == 0  # the oldest never yields (INV-7)


def test_blocks_that_are_swapped_take_the_device_time():
    device = _simulator.Device(by_tokens_ns=[(0, 10 * MS)], per_swapped_block_ns=3 * MS)
    rows = trace_of((0, 16, 40), (0, 16, 40), (0, 16, 40))
    result = replay(rows, device, num_blocks=8, block_size=16, num_host_blocks=8, swap_block_ns=1)
    moved = result["blocks_swapped_out"] + result["blocks_swapped_in"]
    assert list(result["outcome"]) == [FINISHED] * 3 and result["blocks_swapped_out"] > 0
    assert result["totals"]["device_busy_s"] == pytest.approx(0.010 * result["totals"]["steps"] + 0.003 * moved)


def test_a_prompt_that_was_there_before_is_not_computed_again():
    # Blocks of 4, a millisecond a token. The second prompt shares 10 tokens with the first: two blocks, and half a block that is copied.
    rows = [Row(0.0, 12, 1, [Run(0, 0, 12)]), Row(1.0, 12, 1, [Run(0, 0, 10), Run(1, 0, 2)]), Row(2.0, 12, 1, [Run(0, 0, 12)])]
    result = replay(traces.build("shared", rows).native(), token_device(), block_size=4)
    assert list(result["cached_tokens"]) == [0, 10, 11]  # the last token of a prompt is always computed
    assert ms(result["first_token_s"] - result["arrival_s"]) == [12, 2, 1]


def test_an_answer_is_part_of_the_next_prompt():
    rows = [Row(0.0, 8, 9, [Run(0, 0, 8)]), Row(1.0, 20, 1, [Run(0, 0, 8), Run(traces.output_stream(0), 0, 9), Run(0, 8, 3)])]
    result = replay(traces.build("chat", rows).native(), token_device(), block_size=4)
    assert result["cached_tokens"][1] == 16  # 8 of the prompt, 8 of the answer: its last token was never computed


def test_what_sequences_share_is_allocated_once():
    rows = [Row(0.0, 64, 64, [Run(0, 0, 64)]), Row(0.0005, 65, 64, [Run(0, 0, 64), Run(1, 0, 1)])]
    averages = replay(traces.build("shared", rows).native(), flat_device(1.0))["averages"]
    assert averages["allocated_tokens"] < 0.8 * averages["mapped_tokens"]
    assert averages["held_tokens"] + averages["reserved_tokens"] <= averages["allocated_tokens"]


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_a_prompt_share_its_blocks_and_each_is_answered(depth):
    rows = [Row(i * 0.05, 32, 20, samples=4) for i in range(5)]
    result = replay(traces.build("samples", rows).native(), flat_device(), block_size=8, depth=depth)
    assert list(result["outcome"]) == [FINISHED] * 5 and list(result["tokens"]) == [80] * 5
    assert len(result["gaps_s"]) == 5 * 4 * 19
    averages = result["averages"]
    # The prompt's four blocks once instead of four times, beside at most three blocks of each answer.
    assert 0.3 < 1 - averages["allocated_tokens"] / averages["mapped_tokens"] < 0.75
    assert averages["held_tokens"] + averages["reserved_tokens"] <= averages["allocated_tokens"]


@pytest.mark.parametrize("seed", range(8))
def test_samples_finish_however_short_memory_is(seed):
    """Groups that are preempted and come back find more than their prompt in the cache, and the others of a group follow them."""
    dice = np.random.default_rng(seed)
    rows = []
    for i in range(80):
        prompt, output, shared = (int(n) for n in dice.integers(1, 80, 3))
        shared = min(shared, prompt)
        runs = [Run(int(dice.integers(0, 3)), 0, shared), Run(1000 + i, 0, prompt - shared)]
        rows.append(Row(i * 1e-3, prompt, output, runs, samples=int(dice.integers(1, 4))))
    settings = {"max_rows": 12, "max_step_tokens": 12 + 4 * seed, "max_chunk_tokens": 24, "max_model_len": 160, "depth": 1 + seed % 2}
    result = replay(traces.build("samples", rows).native(), flat_device(1.0), num_blocks=50, block_size=8, **settings)
    assert (result["outcome"] == FINISHED).all() and result["preempted"] > 0
    assert list(result["tokens"]) == [row.samples * row.output for row in rows]


def test_other_systems_know_no_samples():
    trace = traces.build("samples", [Row(0.0, 4, 1, samples=2)]).native()
    with pytest.raises(ValueError, match="request 0: has several samples"):
        _simulator.static(trace, flat_device(), _simulator.Options(), capacity_tokens=64, max_model_len=8, max_batch=4)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [16, 1000])
def test_every_token_is_accounted_for(depth, num_blocks):
    trace = random_trace(depth)
    result = replay(trace.native(), token_device(0.2), num_blocks=num_blocks, block_size=8, depth=depth)
    assert (result["outcome"] == FINISHED).all()
    assert (result["tokens"] == trace.output_tokens).all()
    assert len(result["gaps_s"]) == int(trace.output_tokens.sum()) - len(trace)
    assert (result["first_scheduled_s"] >= result["arrival_s"]).all()
    assert (result["first_token_s"] > result["first_scheduled_s"]).all()
    assert (result["finish_s"] >= result["first_token_s"]).all()
    # Gaps of a request add up to the time between its first and last token.
    spans = (result["finish_s"] - result["first_token_s"]).sum()
    assert result["gaps_s"].sum(dtype=np.float64) == pytest.approx(spans, rel=1e-5)
    computed = int(trace.prompt_tokens.sum()) + int(trace.output_tokens.sum()) - len(trace)
    assert result["totals"]["model_tokens"] >= computed
    if num_blocks == 1000 and depth == 1:
        assert result["preempted"] == 0 and result["totals"]["model_tokens"] == computed
    samples = result["memory"]
    assert (samples["held_tokens"] + samples["reserved_tokens"] <= samples["allocated_tokens"]).all()
    assert (samples["allocated_tokens"] <= samples["capacity_tokens"]).all()


def test_the_same_input_gives_the_same_output():
    def once() -> dict[str, Any]:
        return replay(random_trace(7).native(), token_device(0.3), num_blocks=20, block_size=8, depth=2)

    first, second = once(), once()
    for name in ("first_token_s", "finish_s", "gaps_s", "preemptions"):
        assert np.array_equal(first[name], second[name]), name
    assert first["totals"] == second["totals"] and first["averages"] == second["averages"]


def test_substeps_save_the_hosts_time_and_an_arrival_waits_for_the_one_under_way():
    """One stream of 12 tokens; steps of 10 ms, 5 ms of host time before each, but not before a substep."""
    alone = trace_of((0, 1, 12))
    options = {"host_ms": 5.0, "depth": 1}
    assert ms(replay(alone, flat_device(), **options)["finish_s"]) == [12 * 15]
    # Steps of 1, 1, 2, 4 and 4 tokens.
    assert ms(replay(alone, flat_device(), max_substeps=4, **options)["finish_s"]) == [12 * 10 + 5 * 5]
    # Steps of 1, 1 and 2 tokens end at 15, 30 and 55 ms. At 83 ms the third token of the fourth is under way, until 90 ms.
    busy = replay(trace_of((0, 1, 12), (83, 1, 1)), flat_device(), max_substeps=4, **options)
    assert ms(busy["first_token_s"])[1] == 90 + 15


def test_progress_is_reported_and_can_end_the_simulation():
    trace = random_trace(1, count=60_000, rate=1e5).native()
    seen: list[int] = []

    def progress(done: int, now_s: float) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    pool = _core.Pool(num_blocks=10_000, block_size=16)
    config = _core.CoreConfig(max_rows=8, max_step_tokens=8, max_waiting_requests=100_000, max_waiting_tokens=1 << 40)
    with pytest.raises(KeyboardInterrupt):
        _simulator.twinplane(trace, flat_device(), _simulator.Options(), config=config, pool=pool, progress=progress)
    assert len(seen) == 1


def test_the_device_model_adds_up():
    device = _simulator.Device(
        by_tokens_ns=[(1, 100), (11, 200)], fixed_ns=1000, per_sequence_ns=10, per_context_token_ns=0.5, per_pair_ns=0.25
    )
    assert device.time_ns(tokens=1) == 1000 + 100 + 10
    assert device.time_ns(tokens=6, sequences=2, context_tokens=100, chunk_pairs=40) == 1000 + 150 + 20 + 50 + 10
    assert device.time_ns(tokens=21) == 1000 + 300 + 10  # the last line goes on
    assert device.time_ns(tokens=0, sequences=0) == 0


@pytest.mark.parametrize(
    "points", [[], [(1, -1)], [(1, 5), (1, 6)], [(2, 5), (1, 6)], [(1, 5), (2, 4)], [(float("nan"), 1)], [(1, float("inf"))]]
)
def test_a_device_that_makes_no_sense_is_refused(points):
    with pytest.raises(ValueError):
        _simulator.Device(by_tokens_ns=points)


def arrays(**changes: Any) -> dict[str, Any]:
    given = {
        "arrival_ns": [0, 5],
        "prompt_tokens": [3, 4],
        "output_tokens": [1, 2],
        "priority": [0, 0],
        "samples": [1, 1],
        "tenant": [0, 0],
        "run_offsets": [0, 1, 3],
        "run_stream": [1, 1, 2],
        "run_first": [0, 0, 0],
        "run_length": [3, 2, 2],
    } | changes
    kinds = {"arrival_ns": np.uint64, "run_offsets": np.uint64, "run_stream": np.uint64, "run_first": np.uint64, "priority": np.int32}
    return {name: np.array(values, dtype=kinds.get(name, np.uint32)) for name, values in given.items()} | {"tenants": ["somebody"]}


def test_runs_say_which_prompts_begin_alike():
    trace = _simulator.Trace(**arrays())
    first, second = trace.prompt(0), trace.prompt(1)
    assert (first[:2] == second[:2]).all() and len(second) == 4
    assert not (second[2:] == _simulator.Trace(**arrays(run_stream=[1, 1, 3])).prompt(1)[2:]).any()
    assert (first >= 0).all()
    with pytest.raises(IndexError):
        trace.prompt(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_ns": [5, 0]}, "request 1: arrives before"),
        ({"prompt_tokens": [0, 4]}, "request 0: has an empty prompt"),
        ({"output_tokens": [1, 0]}, "request 1: asks for no output"),
        ({"prompt_tokens": [3, 5]}, "request 1: has a prompt of 5 tokens, but runs of 4"),
        ({"output_tokens": [1, 2**32 - 1]}, "request 1: is longer"),
        ({"run_offsets": [0, 3, 2]}, "run_offsets"),
        ({"run_offsets": [0, 3]}, "run_offsets"),
        ({"run_offsets": [0, 4, 3]}, "request"),
        ({"priority": [0]}, "one length"),
        ({"samples": [1]}, "one length"),
        ({"samples": [1, 0]}, "request 1: asks for 0 samples"),
        ({"samples": [1, 2000]}, "request 1: asks for 2000 samples"),
        ({"tenant": [0]}, "one length"),
        ({"tenant": [0, 1]}, "request 1: is of a tenant without a name"),
        ({"run_first": [0]}, "one length"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _simulator.Trace(**arrays(**changes))


def test_a_million_sequence_steps_a_second():
    """A loose bound, for a busy machine and with the checks of a debug build far away: it is several millions when idle."""
    import time

    trace = random_trace(3, count=20_000, rate=1e4).native()
    pool = _core.Pool(num_blocks=10_000, block_size=16)
    config = _core.CoreConfig(max_rows=256, max_step_tokens=2048, max_waiting_requests=100_000, max_waiting_tokens=1 << 40)
    started = time.process_time()
    result = _simulator.twinplane(trace, flat_device(), _simulator.Options(), config=config, pool=pool)
    assert result["totals"]["sequence_steps"] / (time.process_time() - started) > 1e6

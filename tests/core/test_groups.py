"""Groups on the fake device: parallel samples and beams share blocks, leave and come together, and answer as if alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from core_device import EOS, VOCAB, Request, candidates_of
from core_rig import Rig
from twinplane.control_plane import _core
from twinplane.shared import wire

BLOCK = 4


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed + i * i * (seed + 1)) % 49 + 1 for i in range(length))


# ------------------------------------------------------------------------------------------------ samples


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 9 * BLOCK + 2])
def test_A27_samples_equal_separate_requests(length: int, cache: bool, depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit(10, Request(prompt(length), max_tokens=20, seed=7, n=4, cache=cache))
    rig.run()  # each record is verified against the request alone
    assert len({tuple(rig.records[10 + i].tokens) for i in range(4)}) > 1


@pytest.mark.parametrize("length", [2 * BLOCK + 1, 2 * BLOCK + 3, 3 * BLOCK])
def test_samples_share_the_prompt_and_copy_at_most_one_block(length: int) -> None:
    rig = Rig(max_chunk_tokens=64)
    rig.submit(10, Request(prompt(length), max_tokens=8, seed=7, n=4, cache=False))
    steps = [rig.tick(), rig.tick()]
    assert steps[0] is not None and steps[1] is not None
    assert steps[0].forks["num_blocks"].tolist() == [(length - 1) // BLOCK] * 3
    assert len(steps[0].copies) == 0
    assert len(steps[1].copies) == (3 if (length - 1) % BLOCK else 0)
    running = rig.snapshot()["running"]
    shared = (length - 1) // BLOCK
    assert len({tuple(s["blocks"][:shared]) for s in running}) == 1
    assert rig.stats().prompt_tokens_computed == length
    rig.run()


def test_one_sample_can_be_cancelled_and_the_others_go_on() -> None:
    rig = Rig()
    rig.submit(10, Request(prompt(20), max_tokens=20, seed=7, n=3))
    for _ in range(5):
        rig.turn()
    rig.cancel(10)
    rig.run()
    assert [rig.records[10 + i].finish for i in range(3)] == [_core.FINISH_CANCELLED, _core.FINISH_LENGTH, _core.FINISH_LENGTH]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sample_cancelled_while_the_prompt_is_computed(victim: int) -> None:
    rig = Rig(max_chunk_tokens=4)
    rig.submit(10, Request(prompt(30), max_tokens=6, seed=7, n=3))
    rig.turn()
    rig.turn()
    assert [s["is_following"] for s in rig.snapshot()["running"]] == [False, True, True]
    rig.cancel(10 + victim)
    rig.run()
    assert [rig.records[10 + i].finish for i in range(3)].count(_core.FINISH_LENGTH) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_leaves_and_comes_back_as_a_whole(depth: int) -> None:
    rig = Rig(num_blocks=26, depth=depth, max_rows=8)
    rig.submit(0, Request(prompt(12, 1), max_tokens=80))
    rig.submit(10, Request(prompt(13), max_tokens=24, seed=7, n=3))
    rig.submit(20, Request(prompt(9, 2), max_tokens=30))
    preempted = False
    while rig.turn():
        where = {i: line for line in ("running", "waiting") for i in rig.order(line) if 10 <= i < 20}
        assert len(set(where.values())) <= 1, "a group is split"
        preempted |= bool(where) and "waiting" in where.values() and rig.stats().preemptions > 0
    rig.run()
    assert preempted


def test_a_group_needs_its_rows_its_ids_and_its_place_in_the_queue() -> None:
    rig = Rig(max_rows=4, max_waiting_requests=6)
    refusal = rig.submit(1, Request(prompt(3), n=5))
    assert refusal is not None and refusal.reason == "NEVER_FITS" and (refusal.limit, refusal.asked) == (4, 5)
    assert rig.submit(1, Request(prompt(3), n=3)) is None
    refusal = rig.submit(3, Request(prompt(3)))
    assert refusal is not None and refusal.reason == "DUPLICATE_ID"
    refusal = rig.submit(10, Request(prompt(3), n=4))
    assert refusal is not None and refusal.reason == "QUEUE_FULL"
    rig.run()


def test_a_group_that_can_not_fit_apart_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=20)
    # 9 blocks of prompt are shared (37 tokens); apart each may need 2 more.
    assert rig.submit(1, Request(prompt(37), max_tokens=8, n=5)) is None
    refusal = rig.submit(10, Request(prompt(37), max_tokens=8, n=6))
    assert refusal is not None and refusal.reason == "NEVER_FITS" and (refusal.limit, refusal.asked) == (20, 21)
    rig.run()


# -------------------------------------------------------------------------------------------------- beams


def beam_search(request: Request) -> list[tuple[float, list[int], int]]:
    """transformers' rules, on lists: (score, tokens, FINISH_*), best first."""
    width, stops = request.beam_width, set(request.eos + request.stops)
    kept = max(2, 1 + len(stops)) * width
    beams: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    finished: list[tuple[np.float32, list[int], bool]] = []
    can_improve = True
    for length in range(1, request.max_tokens + 1):
        suppressed = stops if length <= request.min_tokens else ()
        options = [
            (np.float32(logprob) + score, beam, token)
            for beam, (score, output) in enumerate(beams)
            for token, logprob in candidates_of(list(request.prompt) + output, suppressed)[:kept]
        ]
        options = sorted(options, key=lambda option: -option[0])[:kept]
        ends = [length == request.max_tokens or (token in stops and length > request.min_tokens) for _, _, token in options]
        full = len(finished) == width
        for i, (score, beam, token) in enumerate(options[:width]):
            if ends[i] and can_improve and not (full and request.early_stopping == 1):
                penalized = score / np.float32(length**request.length_penalty)
                by_length = not (token in stops and length > request.min_tokens)
                finished.append((penalized, [*beams[beam][1], token], by_length))
        finished = sorted(finished, key=lambda f: -f[0])[:width]
        following = [(score, [*beams[beam][1], token]) for (score, beam, token), end in zip(options, ends, strict=True) if not end][:width]
        if len(finished) == width and following:
            ahead = request.max_tokens if request.early_stopping == 2 and request.length_penalty > 0 else length
            can_improve &= bool(following[0][0] / np.float32(ahead**request.length_penalty) > finished[-1][0])
        if all(ends) or not can_improve or (len(finished) == width and request.early_stopping == 1):
            break
        beams = following
    return [
        (
            float(score),
            tokens,
            _core.FINISH_LENGTH if by_length else (_core.FINISH_EOS if tokens[-1] in request.eos else _core.FINISH_STOP_TOKEN),
        )
        for score, tokens, by_length in finished
    ]


def assert_beams(rig: Rig, request_id: int, request: Request) -> None:
    expected = beam_search(request)
    records = [rig.records[request_id + i] for i in range(request.beam_width)]
    assert [record.tokens for record in records] == [tokens for _, tokens, _ in expected]
    assert [record.finish for record in records] == [finish for _, _, finish in expected]
    assert [record.last.score for record in records if record.last] == pytest.approx([score for score, _, _ in expected])


def requests(width: int, **more: object) -> Sequence[Request]:
    return [
        Request(prompt(length, width), max_tokens=12, eos=(EOS, 3), beam_width=width, **more)  # type: ignore[arg-type]
        for length in (1, BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1)
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize(("length_penalty", "early_stopping"), [(1.0, 0), (0.0, 2), (2.0, 2), (-0.5, 0), (1.0, 1)])
def test_A27_beams_are_those_of_the_reference(width: int, length_penalty: float, early_stopping: int, depth: int) -> None:
    for request in requests(width, length_penalty=length_penalty, early_stopping=early_stopping):
        rig = Rig(num_blocks=96, depth=depth)
        rig.submit(10, request)
        rig.run()
        assert_beams(rig, 10, request)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_beams_of_different_widths_and_plain_requests_in_one_batch(cache: bool, min_tokens: int) -> None:
    rig = Rig(num_blocks=200, max_rows=24, max_step_tokens=200)
    wanted = {
        100 * i: request
        for i, request in enumerate(r for width in (2, 3, 5) for r in requests(width, cache=cache, min_tokens=min_tokens)[:2])
    }
    for request_id, request in wanted.items():
        rig.submit(request_id + 10, request)
        rig.submit(request_id, Request(prompt(7, request_id), max_tokens=15))
    rig.run()
    for request_id, request in wanted.items():
        assert_beams(rig, request_id + 10, request)


@pytest.mark.parametrize("request_", [Request(prompt(30), max_tokens=12, seed=7, n=3), Request(prompt(30), max_tokens=12, beam_width=3)])
def test_a_cache_reset_in_any_phase_of_a_group_changes_nothing(request_: Request) -> None:
    for turns in range(1, 14):
        rig = Rig(max_chunk_tokens=8)
        rig.submit(10, request_)
        for _ in range(turns):
            rig.turn()
        rig.scheduler.reset_prefix_cache()
        rig.check()
        rig.run()
        if request_.beam_width:
            assert_beams(rig, 10, request_)


@pytest.mark.parametrize("depth", [1, 2])
def test_beams_survive_preemption_and_a_lost_data_plane(depth: int) -> None:
    rig = Rig(num_blocks=40, depth=depth, max_rows=10)
    request = Request(prompt(9, 5), max_tokens=36, beam_width=3)
    rig.submit(0, Request(prompt(12, 1), max_tokens=80))
    rig.submit(20, Request(prompt(9, 2), max_tokens=50, seed=3, n=2))
    rig.submit(10, request)
    for _ in range(6):
        rig.turn()
    rig.detach()
    rig.attach(40, BLOCK, None)
    rig.run()
    assert rig.stats().preemptions > 0
    assert_beams(rig, 10, request)


def test_a_pool_that_just_holds_the_beams_apart_is_enough() -> None:
    for max_tokens in range(2, 18):
        request = Request(prompt(6, max_tokens), max_tokens=max_tokens, beam_width=3)
        needed = 1 + 3 * (-(-(6 + max_tokens - 1) // BLOCK) - 1)
        rig = Rig(num_blocks=needed)
        assert rig.submit(10, request) is None
        rig.run()
        assert_beams(rig, 10, request)


def test_cancelling_one_beam_ends_the_search_without_results() -> None:
    rig = Rig()
    rig.submit(10, Request(prompt(9), max_tokens=20, beam_width=3))
    for _ in range(6):
        rig.turn()
    rig.cancel(11)
    rig.run()
    for i in range(3):
        assert rig.records[10 + i].finish == _core.FINISH_CANCELLED and rig.records[10 + i].tokens == []


def test_beams_share_what_they_have_in_common() -> None:
    rig = Rig(num_blocks=200, max_rows=8)
    rig.submit(10, Request(prompt(40), max_tokens=40, beam_width=4))
    for _ in range(30):
        rig.turn()
    running = rig.snapshot()["running"]
    held = [block for s in running for block in s["blocks"]]
    assert len(set(held)) < 0.6 * len(held)
    rig.run()


def test_what_does_not_go_with_beams_is_refused() -> None:
    for wrong in ({"temperature": 1.0}, {"n": 2}, {"logprobs": True}, {"presence_penalty": 0.5}, {"early_stopping": 3}):
        with pytest.raises(ValueError, match=r"beam_width|early_stopping"):
            _core.RequestParams(max_tokens=5, beam_width=3, **wrong)
    rig = Rig()
    refusal = rig.submit(1, Request(prompt(5), stops=tuple(range(20)), beam_width=4))
    assert refusal is not None and refusal.reason == "NEVER_FITS" and "candidates" in refusal.message
    assert VOCAB > 2 * 6


def test_a_candidate_that_has_no_order_stops_the_session() -> None:
    rig = Rig()
    rig.submit(10, Request(prompt(5), max_tokens=5, beam_width=3))
    assert rig.tick() is not None
    result = bytearray(rig.device.run_next())
    at = wire.ResultSlotLayout(rig.capacities).candidates
    np.frombuffer(result, wire.CANDIDATE, 1, at)["logprob"][0] = np.nan
    with pytest.raises(Exception, match=r"broke the protocol: candidate .* log-probability"):
        rig.scheduler.retire(bytes(result), rig.now)

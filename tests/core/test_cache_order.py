"""Among waiting requests that are equal, the one of which the prefix cache has more comes in first, within a bound."""

from __future__ import annotations

from typing import Any

import pytest
from core_device import Request
from core_rig import Rig

WARM = tuple(i % 40 + 1 for i in range(32))


def cold(seed: int, length: int = 32) -> tuple[int, ...]:
    return tuple((7 * i + 11 * seed + 3 * i * i * seed) % 47 + 1 for i in range(length))


def warmed(max_overtaken: int = 8, **settings: Any) -> Rig:
    """WARM is cached, one of one row is taken for a while, and whoever is submitted now waits."""
    rig = Rig(**({"num_blocks": 200, "max_rows": 1, "max_waiting_requests": 100} | settings), max_overtaken=max_overtaken)
    rig.submit(1000, Request(WARM, max_tokens=1))
    rig.run()
    rig.submit(1001, Request(cold(77), max_tokens=20))
    rig.turn()
    return rig


def order_of_admission(rig: Rig) -> list[int]:
    seen: list[int] = []
    before = -1
    while rig.turn():
        seen += [i for i in rig.order("running") if i not in seen and i < 1000]
        assert len(seen) >= before
        before = len(seen)
    rig.check_at_rest()
    return seen


@pytest.mark.parametrize("policy", ["priority", "fair", "fcfs"])
def test_the_longer_cached_prefix_comes_in_before_its_equals(policy: str) -> None:
    rig = warmed(policy=policy)
    for i, prompt in enumerate([cold(1), WARM[:12] + cold(2, 20), WARM[:24] + cold(3, 8), cold(4)]):
        rig.submit(i, Request(prompt, max_tokens=2))
    assert order_of_admission(rig) == [2, 1, 0, 3]


def test_without_it_equals_are_first_come() -> None:
    rig = warmed(max_overtaken=0)
    for i, prompt in enumerate([cold(1), cold(2), WARM]):
        rig.submit(i, Request(prompt, max_tokens=2))
    assert order_of_admission(rig) == [0, 1, 2]
    assert all(s["overtaken"] == 0 for s in rig.snapshot()["waiting"])


def test_a_higher_priority_is_not_overtaken() -> None:
    rig = warmed(policy="priority")
    rig.submit(0, Request(cold(1), max_tokens=2, priority=1))
    rig.submit(1, Request(WARM, max_tokens=2, priority=0))
    rig.submit(2, Request(cold(2), max_tokens=2, priority=1))
    assert order_of_admission(rig) == [0, 2, 1]


def test_the_tenant_whose_turn_it_is_chooses_among_its_own() -> None:
    rig = warmed(policy="fair")
    rig.submit(0, Request(cold(1), max_tokens=2, tenant="a"))
    rig.submit(1, Request(WARM, max_tokens=2, tenant="b"))
    rig.submit(2, Request(WARM, max_tokens=2, tenant="a"))
    # a's turn: its cached one, which is charged next to nothing; then b's, cheap as well; then a's cold one.
    order = order_of_admission(rig)
    assert order.index(2) < order.index(0)
    assert set(order) == {0, 1, 2}


@pytest.mark.parametrize("most", [1, 3, 8])
def test_nobody_is_overtaken_more_often_than_the_bound(most: int) -> None:
    """A cold request waits while cached ones keep coming: so many come in before it, then it does."""
    rig = warmed(max_overtaken=most)
    rig.submit(0, Request(cold(1), max_tokens=2))
    for i in range(1, 40):
        rig.submit(i, Request(WARM[:28] + cold(i, 4), max_tokens=2))
    assert order_of_admission(rig).index(0) == most


def test_a_whole_queue_of_cold_requests_is_served_within_the_bound() -> None:
    rig = warmed(max_overtaken=4)
    for i in range(6):
        rig.submit(i, Request(cold(i + 1), max_tokens=2))
    for i in range(6, 60):
        rig.submit(i, Request(WARM[:28] + cold(i, 4), max_tokens=2))
    order = order_of_admission(rig)
    for i in range(6):
        later = [other for other in order[: order.index(i)] if other > i]
        assert len(later) <= 4


def test_who_has_been_resident_is_not_overtaken() -> None:
    rig = Rig(num_blocks=24, max_rows=8, max_overtaken=8)
    rig.submit(1000, Request(WARM, max_tokens=1))
    rig.run()
    for i in range(4):
        rig.submit(i, Request(cold(i + 1, 16), max_tokens=40))
    while not rig.stats().preemptions:
        assert rig.turn()
    back = set(rig.order("waiting"))
    assert back
    rig.submit(100, Request(WARM, max_tokens=2))
    while back & set(rig.order("waiting")):
        assert rig.turn()
        assert 100 in rig.order("waiting") or not back & set(rig.order("waiting"))
    rig.run()


def test_the_one_whose_turn_it_is_without_room_holds_everyone_up() -> None:
    """What is cached does not let a small request past a large one that lacks memory."""
    rig = Rig(num_blocks=40, max_rows=4, max_overtaken=8, max_model_len=160)
    rig.submit(1000, Request(WARM, max_tokens=1))
    rig.run()
    rig.submit(1001, Request(cold(5, 60), max_tokens=20))
    rig.turn()
    rig.submit(0, Request(cold(6, 100), max_tokens=4))
    rig.submit(1, Request(WARM[:8], max_tokens=2))
    while 1001 in rig.order("running"):
        assert rig.order("waiting") == [0, 1]
        rig.turn()
    rig.run()


def test_a_pass_looks_ahead_a_bounded_way() -> None:
    rig = warmed(max_overtaken=1000)
    for i in range(30):
        rig.submit(i, Request(cold(i + 1), max_tokens=2))
    rig.submit(30, Request(WARM, max_tokens=2))
    order = order_of_admission(rig)
    assert 0 < order.index(30) < 30, "not before it comes into view, then at once"

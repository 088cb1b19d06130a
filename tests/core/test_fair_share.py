"""Policies, and the fair share between tenants (CONTRACT.md, "Whose turn it is"; Sheng et al., OSDI 2024)."""

import random
from collections import Counter
from typing import Any

import pytest
from core_device import VOCAB, Request
from core_rig import Rig
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_device import TimedRig, linear_cost
from twinplane.control_plane import _core

OUTPUT_WEIGHT = 2  # FairShare::kOutputWeight
MAX_TENANTS = 256  # FairShare::kMaxTenants
DEVICE = linear_cost(constant=10_000, decode=500, token=100)


def prompt(n: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * salt) % (VOCAB - 1) + 1 for i in range(n))


def tenants(rig: TimedRig) -> dict[str, dict[str, Any]]:
    return {tenant["name"]: tenant for tenant in rig.scheduler.snapshot()["tenants"]}


class Load:
    """Keeps so many requests of each tenant waiting or running."""

    def __init__(self, rig: TimedRig, dice: random.Random, *, max_prompt: int, max_output: int) -> None:
        self.rig, self.dice = rig, dice
        self.max_prompt, self.max_output = max_prompt, max_output
        self.owner: dict[int, str] = {}
        self.prompts: dict[int, int] = {}

    def top_up(self, tenant: str, count: int) -> None:
        live = sum(self.owner[i] == tenant for i, stream in self.rig.streams.items() if not stream.finish and i in self.owner)
        for _ in range(count - live):
            length = self.dice.randint(1, self.max_prompt)
            request = self.rig.submit(length, self.dice.randint(1, self.max_output), tenant=tenant)
            self.owner[request], self.prompts[request] = tenant, length

    def tokens(self) -> Counter[str]:
        served: Counter[str] = Counter()
        for request, stream in self.rig.streams.items():
            served[self.owner[request]] += len(stream.token_times)
        return served


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 8),
    chunk=st.sampled_from([8, 64]),
    weights=st.lists(st.sampled_from([1, 1, 2, 5]), min_size=2, max_size=4),
    num_blocks=st.sampled_from([24, 400]),
)
@settings(max_examples=25, deadline=None)
def test_C5_the_service_of_backlogged_tenants_differs_by_a_bounded_amount(
    seed: int, rows: int, chunk: int, weights: list[int], num_blocks: int
) -> None:
    """The bound of CONTRACT.md: of tenants with newcomers waiting, none is ahead of the least served by more than its largest prompt
    and what its resident requests may still emit, divided by its weight."""
    names = [f"tenant-{i}" for i in range(len(weights))]
    rig = TimedRig(
        DEVICE, policy="fair", tenant_weights=list(zip(names, weights, strict=True)), max_rows=rows, max_chunk_tokens=chunk,
        max_step_tokens=64, max_model_len=100, num_blocks=num_blocks, block_size=4,
    )  # fmt: skip
    load = Load(rig, random.Random(seed), max_prompt=60, max_output=30)
    bound = 60 + OUTPUT_WEIGHT * rows * 30
    weight_of = dict(zip(names, weights, strict=True))
    for turn in range(150):
        for name in names[: len(names) if turn > 40 else 2]:  # some come late
            load.top_up(name, 2 * rows + 1)
        rig.turn()
        backlogged = {name: t["service"] for name, t in tenants(rig).items() if t["waiting"]}
        for name, service in backlogged.items():
            assert service - min(backlogged.values()) <= bound / weight_of[name] + 1e-3
        if turn % 10 == 0:
            rig.scheduler.check()


def test_service_is_what_was_computed_and_emitted() -> None:
    rig = TimedRig(DEVICE, policy="fair", tenant_weights=[("b", 4)], max_rows=4)
    for i, tenant in enumerate("aab"):
        rig.submit(100 + i, 10, tenant=tenant)
    while rig.turn():
        pass
    served = tenants(rig)
    assert served["a"]["service"] == 100 + 101 + OUTPUT_WEIGHT * 20
    assert served["b"]["service"] == pytest.approx((102 + OUTPUT_WEIGHT * 10) / 4, abs=1e-3)


def test_what_the_prefix_cache_held_costs_nothing() -> None:
    rig = Rig(policy="fair", block_size=4)
    for i, tenant in enumerate("ab"):
        rig.submit(i, Request(prompt(40), max_tokens=2, tenant=tenant))
        rig.run()
    services = {tenant["name"]: tenant["service"] for tenant in rig.snapshot()["tenants"]}
    assert services["a"] == 40 + OUTPUT_WEIGHT * 2
    assert services["b"] < services["a"] + 10, "lifted to the last one's service, then charged what was computed"


# The first step of a beam search samples in one row for all of them.
@pytest.mark.parametrize(("group", "tokens"), [({"n": 3}, 3 * 6), ({"beam_width": 3}, 1 + 3 * 5)])
def test_every_sequence_of_a_group_is_paid_for_and_their_prompt_once(group: dict[str, int], tokens: int) -> None:
    rig = Rig(policy="fair", block_size=4)
    rig.submit(0, Request(prompt(16), max_tokens=6, seed=1 if "n" in group else 0, tenant="a", **group))  # type: ignore[arg-type]
    rig.run()
    (served,) = rig.snapshot()["tenants"]
    assert served["service"] == 16 + OUTPUT_WEIGHT * tokens
    assert served["live"] == served["waiting"] == 0


def test_a_tenant_that_floods_the_queue_does_not_hold_up_another() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=4)
    for _ in range(100):
        rig.submit(50, 20, tenant="flood")
    for _ in range(10):
        rig.turn()
    polite = rig.submit(50, 20, tenant="polite")
    waiting_before = rig.scheduler.stats().waiting
    while not rig.streams[polite].token_times:
        assert rig.turn()
    assert rig.scheduler.stats().waiting >= waiting_before - 4, "it came in with the next free rows"


@pytest.mark.parametrize("weight", [1, 3])
def test_equal_tenants_get_equal_shares_and_others_theirs_by_weight(weight: int) -> None:
    rig = TimedRig(DEVICE, policy="fair", tenant_weights=[("heavy", weight)], max_rows=8, max_model_len=256)
    load = Load(rig, random.Random(1), max_prompt=40, max_output=40)
    for _ in range(1500):
        load.top_up("heavy", 20)
        load.top_up("light", 20)
        rig.turn()
    served = load.tokens()
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.1)


def test_a_tenant_with_short_requests_gets_as_many_tokens_as_one_with_long_ones() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=8, max_model_len=256)
    short = Load(rig, random.Random(1), max_prompt=10, max_output=10)
    long = Load(rig, random.Random(2), max_prompt=120, max_output=100)
    for _ in range(1500):
        short.top_up("short", 20)
        long.top_up("long", 20)
        rig.turn()
    served = tenants(rig)
    assert served["short"]["service"] == pytest.approx(served["long"]["service"], rel=0.1)


def test_idleness_is_not_saved_up() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=2)
    load = Load(rig, random.Random(3), max_prompt=30, max_output=10)
    idle = rig.submit(10, 1, tenant="idle")
    load.owner[idle] = "idle"
    for _ in range(400):
        load.top_up("busy", 6)
        rig.turn()
    before = load.tokens()
    for _ in range(200):
        load.top_up("busy", 6)
        load.top_up("idle", 6)
        rig.turn()
    after = load.tokens()
    assert after["busy"] - before["busy"] == pytest.approx(after["idle"] - before["idle"], rel=0.3)


def test_nobody_waits_while_there_is_room_however_much_was_served_to_it() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=4)
    for _ in range(12):
        rig.submit(20, 10, tenant="alone")
    while rig.turn():
        pass
    with_work = [step for step, _ in rig.steps if len(step.seqs)]
    assert len(with_work) == 3 * 10, "three rounds of four at once, ten tokens each"


def test_a_preempted_request_keeps_its_place_ahead_of_the_newcomers_of_less_served_tenants() -> None:
    rig = Rig(num_blocks=16, block_size=4, policy="fair", max_rows=4)
    for i in range(3):
        rig.submit(i, Request(prompt(9, i), max_tokens=25, tenant="much"))
    while rig.stats().preemptions == 0:
        assert rig.turn()
    victim = next(s["id"] for s in rig.snapshot()["waiting"])
    rig.submit(10, Request(prompt(4), max_tokens=2, tenant="little"))
    assert rig.order("waiting")[0] == victim
    while victim in rig.order("waiting"):
        rig.turn()
        assert not rig.records[10].tokens
    rig.run()


def test_INV_7_the_oldest_on_the_device_finishes_without_being_preempted() -> None:
    rig = Rig(num_blocks=10, block_size=4, policy="fair")
    for i in range(12):
        rig.submit(i, Request(prompt(5 + i, i), max_tokens=20, tenant=f"tenant-{i % 3}"))
    rig.run()  # every invariant is looked at on the way
    assert rig.records[0].last is not None and rig.records[0].last.preemptions == 0
    assert rig.stats().preemptions > 0


def test_within_a_tenant_priority_decides_and_between_tenants_it_does_not() -> None:
    rig = Rig(policy="fair", max_rows=1)
    for i, (tenant, priority) in enumerate([("a", 0), ("a", 0), ("a", 5), ("b", 0), ("b", 9)]):
        rig.submit(i, Request(prompt(4, i), max_tokens=4, tenant=tenant, priority=priority))
    first: list[int] = []
    while rig.turn():
        first += [i for i, record in rig.records.items() if record.tokens and i not in first]
    assert first == [2, 4, 0, 3, 1]


def test_fcfs_takes_no_notice_of_priority() -> None:
    rig = Rig(policy="fcfs", max_rows=1)
    for i in range(4):
        rig.submit(i, Request(prompt(4), max_tokens=4, priority=i))
    first: list[int] = []
    while rig.turn():
        first += [i for i, record in rig.records.items() if record.tokens and i not in first]
    assert first == [0, 1, 2, 3]


def test_F10_an_urgent_request_is_next_in_under_policy_priority() -> None:
    rig = Rig(policy="priority", max_rows=2)
    for i in range(10):
        rig.submit(i, Request(prompt(4), max_tokens=6))
    rig.turn()
    rig.submit(99, Request(prompt(4), max_tokens=2, priority=1))
    while not rig.records[99].tokens:
        rig.turn()
        assert sum(bool(record.tokens) for record in rig.records.values()) <= 4


def test_tenants_beyond_the_table_share_one_share_and_all_are_served() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=4)
    for i in range(MAX_TENANTS + 50):
        rig.submit(5, 2, tenant=f"tenant-{i}")
    assert tenants(rig)[""]["waiting"] == 50 + 1
    while rig.turn():
        pass
    assert all(stream.finish for stream in rig.streams.values())
    rig.scheduler.check()


def test_a_seat_is_given_to_another_only_when_that_forgets_no_debt() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=1)
    for _ in range(3):
        rig.submit(200, 50, tenant="indebted")
    while rig.turn():
        pass
    debt = tenants(rig)["indebted"]["service"]
    for i in range(2 * MAX_TENANTS):  # each served little, one after the other
        rig.submit(1, 1, tenant=f"tenant-{i}")
        while rig.turn():
            pass
    assert tenants(rig)["indebted"]["service"] == debt
    rig.submit(1, 1, tenant="indebted")
    rig.submit(1, 1, tenant="new")
    rig.scheduler.check()


def test_an_endless_row_of_new_names_does_not_starve_a_tenant_that_was_served_more() -> None:
    rig = TimedRig(DEVICE, policy="fair", max_rows=1)
    rig.submit(300, 50, tenant="steady")
    rig.turn()
    steady = rig.submit(10, 1, tenant="steady")
    for i in range(5000):
        if rig.streams[steady].finish:
            break
        if rig.scheduler.stats().waiting < 3:
            rig.submit(4, 1, tenant=f"name-{i}")
        rig.turn()
    assert rig.streams[steady].finish


def test_long_names_and_bad_policies() -> None:
    rig = TimedRig(DEVICE, policy="fair")
    rig.submit(1, 1, tenant="x" * 200)
    assert list(tenants(rig)) == ["x" * 64]
    with pytest.raises(ValueError, match="policy is 'unfair'"):
        _core.CoreConfig(policy="unfair")
    with pytest.raises(ValueError, match="weight of tenant 'a' is 0"):
        _core.CoreConfig(policy="fair", tenant_weights=[("a", 0)])

"""The production scheduler on the fake device and a clock of its own, with every invariant checked at every move."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from core_device import FakeDevice, Request, Step, expected_output, logprob_of
from twinplane.control_plane import _core
from twinplane.shared import wire

STEP_NS = 1_000_000


@dataclass
class Record:
    """What a client has seen of its request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: int = _core.FINISH_NONE
    match: int = -1
    last: _core.Event | None = None

    def verify(self) -> None:
        """INV-10: what came is what the request gets alone; complete, unless it was ended from outside."""
        if self.request.beam_width > 1:
            return  # the tests of beams have an oracle of their own
        tokens, finish, match = expected_output(self.request)
        assert self.tokens == tokens[: len(self.tokens)]
        if self.request.logprobs:
            start = len(self.request.prompt)
            assert self.logprobs == [logprob_of(token, start + i) for i, token in enumerate(self.tokens)]
        if self.finish in (_core.FINISH_EOS, _core.FINISH_STOP_TOKEN, _core.FINISH_LENGTH, _core.FINISH_NOT_FINITE):
            assert (self.tokens, self.finish, self.match) == (tokens, finish, match)


class Rig:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        capacities: wire.Capacities | None = None,
        num_host_blocks: int = 0,
        swap_block_ns: int = 1,
        **config: Any,
    ) -> None:
        self.settings = {"max_rows": 8, "max_step_tokens": 64, "max_chunk_tokens": 16, "max_model_len": 128} | config
        self.config = _core.CoreConfig(**self.settings)
        self.depth = int(self.settings.get("depth", 2))
        self.scheduler = _core.Scheduler(self.config)
        self.now = 1
        self.records: dict[int, Record] = {}
        self.steps: list[Step] = []  # all that were sent in this session
        self.cancelled: list[tuple[int, set[int]]] = []  # (steps sent when it happened, blocks it held)
        self.resumed_with: dict[int, int] = {}  # known tokens of each request when it was last preempted
        self.num_host_blocks, self.swap_block_ns = num_host_blocks, swap_block_ns
        self.attach(num_blocks, block_size, capacities)

    # --- session ---

    def attach(self, num_blocks: int, block_size: int, capacities: wire.Capacities | None = None) -> None:
        pool = _core.Pool(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=self.num_host_blocks, swap_block_ns=self.swap_block_ns
        )
        self.capacities = capacities or wire.Capacities(*_core.capacities_for(self.config, pool))
        self.scheduler.attach(pool, list(self.capacities))
        self.device = FakeDevice(self.capacities, num_blocks, block_size, self.num_host_blocks)
        self.steps = []
        self.cancelled = []
        self.check()

    def detach(self, *, step_failed: bool = False) -> None:
        self.scheduler.detach(step_failed=step_failed)
        self.check()
        self.poll()

    # --- requests ---

    def submit(self, request_id: int, request: Request) -> _core.Refusal | None:
        prompt = np.array(request.prompt, np.int32)
        refusal = self.scheduler.submit(request_id, prompt, request.params(), self.now)
        if refusal is None:
            for i in range(max(request.n, request.beam_width, 1)):
                assert request_id + i not in self.records or self.records[request_id + i].finish
                # Each sample is what it is alone.
                alone = dataclasses.replace(request, n=1, stream=request.stream + i) if request.n > 1 else request
                self.records[request_id + i] = Record(alone)
        self.check()
        return refusal

    def cancel(self, request_id: int) -> bool:
        held = {s["id"]: set(s["blocks"]) for s in self.snapshot()["running"]}.get(request_id, set())
        found = self.scheduler.cancel(request_id)
        self.cancelled.append((len(self.steps), held))
        self.check()
        return found

    # --- steps ---

    def tick(self) -> Step | None:
        before = self.snapshot()
        slot = self.scheduler.tick(self.now)
        self.check()
        self.check_preemptions(before)
        self.check_overtaking(before)
        if slot is None:
            return None
        step = self.device.send(slot)
        assert step.number == len(self.steps)
        self.steps.append(step)
        self.check_decodes_come_first(before, step)
        return step

    def retire(self, *, early: bool = False) -> None:
        """A substep of the oldest step in flight is executed and its result taken. ``early``: the step ends with it, unasked."""
        self.now += STEP_NS
        self.device.now_ns = self.now
        self.scheduler.retire(self.device.run_next(2**63 if early else self.scheduler.interrupted), self.now)
        self.check()
        self.check_cancelled_blocks()

    def turn(self) -> bool:
        """Fill the pipeline, retire one step. False if there was nothing at all to do."""
        while len(self.device.in_flight) < self.depth and self.tick() is not None:
            pass
        if not self.device.in_flight:
            return False
        self.retire()
        self.poll()
        return True

    def run(self, turns: int = 10_000) -> None:
        """Until nothing is left to do; every request must have ended by then."""
        for _ in range(turns):
            if not self.turn():
                break
        else:
            raise AssertionError(f"not done after {turns} turns: {self.snapshot()}")
        self.poll()
        assert all(record.finish for record in self.records.values())
        self.check_at_rest()

    def poll(self) -> list[_core.Event]:
        events = self.scheduler.poll()
        for event in events:
            record = self.records[event.request_id]
            assert not record.finish, "an event after the last"
            record.tokens += event.tokens
            record.logprobs += event.logprobs
            record.finish, record.match = event.finish, event.match
            assert event.tokens or event.finish
            if event.finish:
                record.last = event
            record.verify()
        return events

    # --- looking ---

    def snapshot(self) -> dict[str, Any]:
        return self.scheduler.snapshot()

    def stats(self) -> _core.Stats:
        return self.scheduler.stats()

    def order(self, line: str) -> list[int]:
        return [s["id"] for s in self.snapshot()[line]]

    def check(self) -> None:
        self.scheduler.check()  # INV-5 and all other redundancies

    def check_decodes_come_first(self, before: dict[str, Any], step: Step) -> None:
        """INV-6."""
        is_chunk = [bool(seq["flags"] & wire.SeqFlag.CHUNK) for seq in step.seqs]
        assert is_chunk == sorted(is_chunk) and is_chunk.count(False) == step.num_decodes
        assert int(step.seqs["num_tokens"].sum()) == len(step.token_ids) <= self.settings["max_step_tokens"]
        assert all(seq["num_tokens"] <= self.settings["max_chunk_tokens"] for seq in step.seqs)
        after = self.snapshot()
        running = {s["id"] for s in after["running"]}
        for s in before["running"]:
            known = s["num_tokens"] + s["num_pending"]
            if s["is_beam"] or s["is_following"]:
                continue  # waits for the results of its group
            if s["id"] not in running or known == s["limit"] or known - s["num_computed"] != 1 or s["row"] in step.rows:
                continue
            # Left out: then it needs a block, there is none, and either some are on their way or everyone behind it is protected.
            # A group goes as a whole or not at all.
            group = [other for other in before["running"] if other["group"] == s["group"]]
            assert any(other["num_tokens"] + other["num_pending"] > len(other["blocks"]) * self.device.block_size for other in group)
            place = [other["id"] for other in after["running"]].index(s["id"])
            behind = [other for other in after["running"][place + 1 :] if other["group"] != s["group"]]
            assert self.stats().blocks_fenced or s["is_protected"] or (behind and all(other["is_protected"] for other in behind))

    def check_preemptions(self, before: dict[str, Any]) -> None:
        """INV-7: the first in line never yields, nor who resumed and has not emitted; and only the youngest of the others do."""
        after = self.snapshot()
        preemptions = {s["id"]: s["preemptions"] for s in after["running"] + after["waiting"]}
        still_running = {s["id"]: s for s in after["running"]}
        protected = {s["group"] for s in before["running"] if s["is_protected"]}  # a group counts as one
        stayed_unprotected = False  # somebody younger than `s` who could have yielded did not
        for place, s in reversed(list(enumerate(before["running"]))):
            if preemptions.get(s["id"], s["preemptions"]) == s["preemptions"]:
                stayed_unprotected |= s["id"] in still_running and s["group"] not in protected
                continue
            assert place != 0 and s["group"] not in protected and not stayed_unprotected
            tokens = s["num_tokens"] + s["num_pending"]
            assert tokens > self.resumed_with.get(s["id"], -1), "preempted again before it emitted a token"
            self.resumed_with[s["id"]] = tokens

    def check_overtaking(self, before: dict[str, Any]) -> None:
        """Nobody is overtaken more often than it may be, and only by newcomers that came in just now."""
        after = self.snapshot()
        most = self.settings.get("max_overtaken", 0)
        overtaken = {s["id"]: s["overtaken"] for s in before["waiting"]}
        new = {s["id"] for s in before["waiting"] if not s["was_resident"]} & {s["id"] for s in after["running"]}
        for s in after["waiting"] + after["running"]:
            more = s["overtaken"] - overtaken.get(s["id"], s["overtaken"])
            assert 0 <= more <= len(new) and s["overtaken"] <= most

    def check_cancelled_blocks(self) -> None:
        """INV-9: what a cancelled request held is fenced for at most the steps that were in flight then."""
        snapshot = self.snapshot()
        due = [blocks for sent, blocks in self.cancelled if snapshot["retired"] >= sent]
        self.cancelled = [(sent, blocks) for sent, blocks in self.cancelled if snapshot["retired"] < sent]
        if due:
            references = snapshot["block_references"]
            free = set(snapshot["free_blocks"])
            for block in set().union(*due) - {None}:
                # Free, or already somebody else's.
                assert block in free or references[block] or block in snapshot["fenced_blocks"] or block in snapshot["tree_blocks"]
                if block in snapshot["fenced_blocks"]:
                    assert len(self.device.in_flight) > 0

    def check_at_rest(self) -> None:
        stats = self.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert self.device.rows == {}, "rows left open"

"""The scheduler under any sequence of events: every invariant after each, and never a wrong, lost or repeated token."""

from typing import Any

import hypothesis.strategies as st
from core_device import NAN_TOKEN, VOCAB, Request
from core_rig import STEP_NS, Rig
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from twinplane.control_plane import _core

MAX_MODEL_LEN = 40
FINAL_BY_ITSELF = {_core.FINISH_EOS, _core.FINISH_STOP_TOKEN, _core.FINISH_LENGTH, _core.FINISH_NOT_FINITE}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    length = draw(st.integers(1, MAX_MODEL_LEN))
    prompt = tuple(draw(st.lists(st.integers(1, VOCAB - 1), min_size=length, max_size=length)))
    if draw(st.booleans()):  # begins like others
        stem = draw(st.integers(1, 3))
        prompt = tuple((stem * i * i) % (VOCAB - 1) + 1 for i in range(draw(st.integers(1, length)))) + prompt
        prompt = prompt[:length]
    if draw(st.integers(0, 30)) == 0:
        prompt = (*prompt[:-1], NAN_TOKEN)
    kind = draw(st.sampled_from(["one", "one", "one", "samples", "beams"]))
    if kind == "beams":
        return Request(
            prompt,
            max_tokens=draw(st.integers(1, 20)),
            eos=draw(st.sampled_from([(), (0, 1)])),
            min_tokens=draw(st.sampled_from([0, 3])),
            beam_width=draw(st.integers(2, 4)),
            early_stopping=draw(st.integers(0, 2)),
            cache=draw(st.booleans()),
        )
    return Request(
        prompt,
        n=draw(st.integers(2, 4)) if kind == "samples" else 1,
        max_tokens=draw(st.integers(1, MAX_MODEL_LEN)),
        eos=draw(st.sampled_from([(), (0,), (0, 1, 2, 3, 4)])),
        stops=draw(st.sampled_from([(), (5, 6, 7)])),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        seed=draw(st.integers(0, 3)),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        logprobs=draw(st.booleans()),
        allowed=draw(st.sampled_from([(), tuple(range(8, 20))])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        cache=draw(st.sampled_from([True, True, True, False])),
        cache_key=draw(st.sampled_from([b"", b"", b"k" * 32])),
        tenant=draw(st.sampled_from(["", "a", "b"])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        substeps=st.sampled_from([1, 2, 4]),
        block_size=st.sampled_from([1, 2, 4, 16]),
        tokens=st.integers(24, 160),
        rows=st.integers(1, 6),
        chunk=st.integers(1, 20),
        spare=st.integers(0, 20),
        host=st.sampled_from([0, 0, 4, 40]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        itl_target_us=st.sampled_from([0, 500, 2000]),
        max_overtaken=st.sampled_from([0, 1, 8]),
    )
    def begin(
        self,
        depth: int,
        substeps: int,
        block_size: int,
        tokens: int,
        rows: int,
        chunk: int,
        spare: int,
        host: int,
        policy: str,
        itl_target_us: int,
        max_overtaken: int,
    ) -> None:
        self.pool: dict[str, Any] = {"num_blocks": -(-tokens // block_size), "block_size": block_size}
        self.rig = Rig(
            **self.pool,
            num_host_blocks=host,
            depth=depth,
            max_substeps=substeps,
            max_rows=rows,
            max_chunk_tokens=chunk,
            max_step_tokens=rows + spare,
            max_model_len=MAX_MODEL_LEN,
            max_waiting_requests=10,
            max_waiting_tokens=200,
            policy=policy,
            itl_target_us=itl_target_us,
            max_overtaken=max_overtaken,
        )
        self.is_attached = True
        self.next_id = 0

    @rule(request=requests(), deadline=st.sampled_from([0, 0, 0, 2, 9]))
    def submit(self, request: Request, deadline: int) -> None:
        if deadline:
            request = Request(**(vars(request) | {"deadline_ns": self.rig.now + deadline * STEP_NS}))
        self.submit_now(request)

    def submit_now(self, request: Request) -> None:
        self.rig.submit(self.next_id, request)
        self.next_id += max(request.n, request.beam_width)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.next_id:
            request_id = data.draw(st.integers(max(0, self.next_id - 8), self.next_id - 1))
            record = self.rig.records.get(request_id)
            found = self.rig.cancel(request_id)
            assert record is not None or not found

    @rule()
    def tick(self) -> None:
        stats = self.rig.stats()
        step = self.rig.tick()
        if self.is_attached and not self.rig.device.in_flight and step is None:
            assert (stats.running, self.rig.stats().waiting) == (0, 0), "the device is idle, work is there, nothing is sent"

    @precondition(lambda self: self.is_attached and self.rig.device.in_flight)
    @rule(early=st.sampled_from([False, False, False, True]))
    def retire(self, early: bool) -> None:
        self.rig.retire(early=early)

    @rule(turns=st.integers(1, 6))
    def turns(self, turns: int) -> None:
        if self.is_attached:
            for _ in range(turns):
                self.rig.turn()

    @rule(request=requests(), results=st.integers(0, 2), what=st.sampled_from(["submit", "cancel", "expire", "lose"]))
    def come_in_the_middle_of_a_step(self, request: Request, results: int, what: str) -> None:
        """Left to chance, hardly anything happens while a step of several substeps is in flight."""
        device = self.rig.device
        self.submit_now(Request((7, 8, 9), max_tokens=MAX_MODEL_LEN - 3))  # somebody who takes long
        while self.is_attached and not (device.in_flight and 0 < device.substeps_run < device.in_flight[0][0].num_substeps):
            if not self.rig.turn():
                return
        for _ in range(results if self.is_attached else 0):
            if len(device.in_flight) == 1:
                self.rig.retire()
        if what == "submit":
            self.submit_now(request)
        elif what == "cancel" and (running := self.rig.order("running")):
            self.rig.cancel(running[0])
        elif what == "expire":
            self.rig.now += 12 * STEP_NS
            self.rig.tick()
        elif what == "lose" and self.is_attached:
            self.rig.detach()
            self.is_attached = False

    @rule()
    def poll(self) -> None:
        self.rig.poll()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.rig.scheduler.reset_prefix_cache()
        self.rig.check()
        assert self.rig.stats().blocks_cached == 0

    @rule(steps=st.integers(1, 12))
    def let_time_pass(self, steps: int) -> None:
        self.rig.now += steps * STEP_NS

    @precondition(lambda self: self.is_attached)
    @rule(step_failed=st.booleans())
    def lose_data_plane(self, step_failed: bool) -> None:
        self.rig.detach(step_failed=step_failed)
        self.is_attached = False

    @precondition(lambda self: not self.is_attached)
    @rule(block_size=st.sampled_from([1, 2, 4, 16]), tokens=st.integers(24, 160))
    def new_data_plane(self, block_size: int, tokens: int) -> None:
        self.rig.attach(-(-tokens // block_size), block_size)
        self.is_attached = True

    def teardown(self) -> None:
        """Whatever happened: everything left is served to its end and nothing stays behind."""
        if not hasattr(self, "rig"):
            return
        if not self.is_attached:
            self.rig.attach(**self.pool)
        self.rig.run()
        ended = {record.finish for record in self.rig.records.values()}
        assert ended <= FINAL_BY_ITSELF | {
            _core.FINISH_CANCELLED,
            _core.FINISH_DEADLINE,
            _core.FINISH_QUARANTINED,
            _core.FINISH_NEVER_FITS,
        } | {_core.FINISH_UNREACHABLE}
        assert sum(self.rig.stats().finished) == len(self.rig.records)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

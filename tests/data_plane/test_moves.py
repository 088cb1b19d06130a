"""Moves of KV blocks: copies and swaps carry a sequence's context exactly, in the order of the protocol, or not at all."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from planner import Result, StepBuilder, run_step
from tiny_models import NATIVE, Served
from twinplane.data_plane.moves import measure_swap_ns
from twinplane.data_plane.worker import StepFailedError
from twinplane.shared.wire import RowFlag, StepStatus

GREEDY = int(RowFlag.GREEDY)
PROMPT = list(range(40, 40 + 29))  # two blocks of 16
KERNELS = (None, "reference")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=[(kernels, dtype) for kernels in KERNELS for dtype in (torch.float32, torch.bfloat16)], ids=str)
def served(request, path) -> Served:
    kernels, dtype = request.param
    return Served(path, num_host_blocks=8, kernels=kernels, kv_dtype=dtype)


def prefill(worker, rings, blocks=(3, 4), row=0) -> int:
    """The prompt in `blocks`; returns the token after it."""
    step = StepBuilder(0, writes=[(row, index, block) for index, block in enumerate(blocks)])
    step.open(row, flags=GREEDY)
    step.sequence(row, 0, PROMPT, samples=True)
    return int(run_step(worker, rings, step).entries[0]["token"])


def decode(step: StepBuilder, token: int, row: int = 0) -> StepBuilder:
    step.sequence(row, len(PROMPT), [token], samples=True)
    return step


def expected(served: Served) -> tuple[int, bytes]:
    """The first token and, to the bit, the entry of the second, without any moves."""
    worker, rings = served.session()
    first = prefill(worker, rings)
    return first, run_step(worker, rings, decode(StepBuilder(1), first)).entries[0].tobytes()


def scribble(worker, rings, blocks, step_number: int) -> None:
    """Another sequence's context over `blocks`."""
    step = StepBuilder(step_number, writes=[(9, index, block) for index, block in enumerate(blocks)])
    step.open(9, flags=GREEDY)
    step.sequence(9, 0, list(range(100, 100 + 16 * len(blocks))), samples=False)
    run_step(worker, rings, step)


def test_a_copied_block_is_the_same_context_and_its_source_stays(served):
    first, second = expected(served)
    worker, rings = served.session()
    assert prefill(worker, rings) == first
    step = StepBuilder(1, writes=[(0, 0, 20), (0, 1, 21)], copies=[(3, 20), (4, 21)])
    assert run_step(worker, rings, decode(step, first)).entries[0].tobytes() == second
    scribble(worker, rings, (20, 21), 2)
    back = StepBuilder(3, writes=[(0, 0, 3), (0, 1, 4)])
    assert run_step(worker, rings, decode(back, first)).entries[0].tobytes() == second


def test_copies_read_all_sources_before_they_write(served):
    first, second = expected(served)
    worker, rings = served.session()
    prefill(worker, rings, blocks=(3, 4))
    step = StepBuilder(1, writes=[(0, 0, 4), (0, 1, 3)], copies=[(3, 4), (4, 3)])
    assert run_step(worker, rings, decode(step, first)).entries[0].tobytes() == second


def test_what_was_swapped_out_comes_back_exactly_and_elsewhere(served):
    first, second = expected(served)
    worker, rings = served.session()
    prefill(worker, rings)
    out = run_step(worker, rings, StepBuilder(1, closes=[0], swap_outs=[(3, 7), (4, 0)]))
    assert int(out.header["status"]) == StepStatus.OK and len(out.entries) == 0
    scribble(worker, rings, (3, 4), 2)
    back = StepBuilder(3, writes=[(2, 0, 30), (2, 1, 3)], swap_ins=[(30, 7), (3, 0)])
    back.open(2, flags=GREEDY)
    entry = run_step(worker, rings, decode(back, first, row=2)).entries[0]
    assert (int(entry["row"]), entry.tobytes()[4:]) == (2, second[4:])


def test_one_step_saves_restores_and_copies_in_this_order(served):
    """Block 3 is saved, then restored into by another's first block, which is then copied: every link needs the one before."""
    first, second = expected(served)
    worker, rings = served.session()
    prefill(worker, rings)
    run_step(worker, rings, StepBuilder(1, swap_outs=[(3, 5)]))
    scribble(worker, rings, (3,), 2)  # what is to be saved now, while 3 comes back
    step = StepBuilder(3, writes=[(0, 0, 50)], swap_outs=[(3, 6)], swap_ins=[(3, 5)], copies=[(3, 50)])
    assert run_step(worker, rings, decode(step, first)).entries[0].tobytes() == second
    other = StepBuilder(4, writes=[(9, 0, 51)], swap_ins=[(51, 6)])
    other.sequence(9, 16, [5], samples=True)
    alone, alone_rings = served.session()
    scribble(alone, alone_rings, (3,), 0)
    step = StepBuilder(1)
    step.writes = [(9, 1, 8)]
    step.sequence(9, 16, [5], samples=True)
    other.writes.append((9, 1, 52))
    assert run_step(worker, rings, other).entries[0].tobytes() == run_step(alone, alone_rings, step).entries[0].tobytes()


def test_measuring_swaps_leaves_both_pools_as_they_were(path):
    served = Served(path, num_host_blocks=8)
    worker, rings = served.session()
    prefill(worker, rings, blocks=(3, 4))
    tensors = (*served.device._cache.k, *served.device._cache.v)
    before = [tensor.clone() for tensor in tensors]
    assert measure_swap_ns(served.device, num_blocks=64, num_host_blocks=8) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert measure_swap_ns(served.device, num_blocks=64, num_host_blocks=0) == 0


FAULTS = {
    "copy from outside": ({"copies": [(64, 1)]}, "copy names block 64, the pool has 64"),
    "copy to outside": ({"copies": [(1, 64)]}, "copy names block 64, the pool has 64"),
    "two copies into one block": ({"copies": [(1, 9), (2, 9)]}, "copy writes block 9 more than once"),
    "swap out of no block": ({"swap_outs": [(99, 0)]}, "swap out names block 99, the pool has 64"),
    "swap out to no block": ({"swap_outs": [(1, 8)]}, "swap out names block 8, the host's pool has 8"),
    "two swaps out to one block": ({"swap_outs": [(1, 2), (3, 2)]}, "swap out writes block 2 more than once"),
    "swap in to no block": ({"swap_ins": [(64, 0)]}, "swap in names block 64, the pool has 64"),
    "swap in of no block": ({"swap_ins": [(0, 4000000000)]}, "swap in names block 4000000000, the host's pool has 8"),
    "two swaps into one block": ({"swap_ins": [(5, 1), (5, 2)]}, "swap in writes block 5 more than once"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_move_outside_the_pools_fails_the_step_before_anything_has_moved(fault, path):
    parts, message = FAULTS[fault]
    served = Served(path, num_host_blocks=8)
    worker, rings = served.session()
    prefill(worker, rings)
    cache = served.device._cache
    before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
    step = StepBuilder(1, **parts)
    if "copies" not in parts:
        step.copies = [(3, 10)]
    rings.steps.append(step.build())
    with pytest.raises(StepFailedError, match=message):
        worker.run(lambda: False)
    assert int(Result.parse(rings.results[-1]).header["status"]) == StepStatus.FAILED
    assert all(torch.equal(old, new) for old, new in zip(before, (*cache.k, *cache.v), strict=True))


def test_without_swap_space_every_swap_is_a_fault(path):
    worker, rings = Served(path).session()
    rings.steps.append(StepBuilder(0, swap_outs=[(1, 0)]).build())
    with pytest.raises(StepFailedError, match="block 0, the host's pool has 0"):
        worker.run(lambda: False)

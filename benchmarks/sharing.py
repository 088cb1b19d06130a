"""How much KV memory the sequences of a request save by sharing blocks (the paper's section 6.3), on the demo model.

The production scheduler and the production worker run in one process, step by step, so that every block table can be read after
each of them. The saving is the mean over all steps of 1 - (distinct blocks held) / (blocks in all tables).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from twinplane.control_plane import _core
from twinplane.control_plane.text.tokenizer import load_tokenizer
from twinplane.data_plane.cpu import CpuDevice
from twinplane.data_plane.kv_cache import KVSpec
from twinplane.data_plane.loader import open_weights
from twinplane.data_plane.models.base import BuildContext
from twinplane.data_plane.models.registry import model_class, text_config
from twinplane.data_plane.worker import Worker
from twinplane.shared.model_files import read_model_card
from twinplane.shared.wire import Capacities, ResultSlotLayout

from .server import demo_model

# Plain continuations of different kinds: a story, an explanation, a list, a letter, a sum.
PROMPTS = (
    "The old lighthouse keeper had not spoken to anyone for three weeks when, one morning,",
    "The reason why the sky looks blue during the day and red in the evening is that",
    "Ten things to pack for a long walk in the mountains:\n1.",
    "Dear Margaret,\n\nI hope this letter finds you well. I am writing to tell you about",
    "If a train travels 60 miles in one hour and 90 miles in the next two hours, then its average speed is",
)


class _Rings:
    """Both ends of the rings in plain memory: one step in, one result out."""

    def __init__(self, capacities: Capacities) -> None:
        self.capacities = tuple(capacities)
        self._steps: deque[NDArray[np.uint8]] = deque()
        self._slot = np.zeros(ResultSlotLayout(capacities).bytes, np.uint8)
        self._next = 0
        self._current: NDArray[np.uint8] | None = None
        self.result: bytes | None = None

    def send(self, step: bytes) -> None:
        self.result = None
        self._steps.append(np.frombuffer(step, np.uint8))

    def wait_step(self, timeout_ns: int) -> int | None:
        self._current = self._steps.popleft()
        self._next += 1
        return self._next - 1

    def step(self, sequence: int) -> NDArray[np.uint8]:
        assert self._current is not None
        return self._current

    def consume(self, sequence: int) -> None: ...

    def result_slot(self, timeout_ns: int) -> NDArray[np.uint8]:
        return self._slot

    def publish(self) -> None:
        self.result = self._slot.tobytes()

    def interrupted(self) -> int:
        return 0

    def set_phase(self, phase: int, step: int) -> None: ...


def _saving(scheduler: _core.Scheduler) -> float | None:
    """Of the sequences on the device now; None if nothing is held."""
    tables = [[block for block in s["blocks"] if block is not None] for s in scheduler.snapshot()["running"] if not s["is_following"]]
    held = sum(map(len, tables))
    return 1 - len({block for table in tables for block in table}) / held if len(tables) > 1 and held else None


def _prompts(encode: Callable[[str], list[int]], length: int) -> list[NDArray[np.int32]]:
    """The built-in ones; with a `length`, the first so many tokens of each paragraph of the sample text that has them."""
    if length == 0:
        return [np.array(encode(prompt), np.int32) for prompt in PROMPTS]
    paragraphs = [encode(line) for line in (Path(__file__).parent / "quality_sample.txt").read_text(encoding="utf-8").splitlines()]
    whole = [np.array(ids[:length], np.int32) for ids in paragraphs if len(ids) >= length]
    if not whole:
        raise ValueError(f"prompt_tokens is {length}; the longest paragraph has {max(map(len, paragraphs))}")
    return whole


def run(tokens: int = 128, *, prompts: int = len(PROMPTS), prompt_tokens: int = 0, block_size: int = 16) -> dict[str, object]:
    """``beams`` and ``samples``: per width the percentage of blocks saved, over the first ``prompts`` prompts and ``tokens`` new tokens
    each. ``prompt_tokens``: 0 for the built-in prompts (12 to 26), or the length of longer ones."""
    card = read_model_card(demo_model())
    config, cls = text_config(card), model_class(card)
    device, source = CpuDevice(), open_weights(card)
    device.load(cls, BuildContext(card.path, config, source, device.ops, device.choose_format("auto", card, native=True), 1024))
    spec = KVSpec(cls.shape(config).layers, device.choose_kv_dtype("float32"), block_size)
    core = _core.CoreConfig(max_rows=8, max_step_tokens=256, max_chunk_tokens=256, max_model_len=512, depth=1)
    pool = _core.Pool(num_blocks=256, block_size=block_size)
    device.allocate_kv(spec, 256)
    texts = _prompts(load_tokenizer(card.path).encode, prompt_tokens)[:prompts]

    def measure(ids: NDArray[np.int32], **params: object) -> list[float]:
        scheduler = _core.Scheduler(core)
        capacities = Capacities(*_core.capacities_for(core, pool))
        scheduler.attach(pool, list(capacities))
        rings = _Rings(capacities)
        worker = Worker(device, rings, block_size=block_size, num_blocks=256, max_model_len=512, vocab_size=cls.shape(config).vocab_size)
        refusal = scheduler.submit(1, ids, _core.RequestParams(max_tokens=tokens, **params), 1)  # type: ignore[arg-type]
        if refusal is not None:
            raise ValueError(refusal.message)
        savings = []
        while (step := scheduler.tick(1)) is not None:
            rings.send(step)
            worker.run(lambda: rings.result is not None)
            assert rings.result is not None
            saving = _saving(scheduler)
            savings += [] if saving is None else [saving]
            scheduler.retire(rings.result, 1)
            scheduler.poll()
        return savings

    def mean(**params: object) -> float:
        savings = [saving for ids in texts for saving in measure(ids, **params)]
        return round(100 * float(np.mean(savings)), 1)

    return {
        "tokens": tokens,
        "prompts": [len(ids) for ids in texts],
        "beams": {width: mean(beam_width=width) for width in (2, 4, 6)},
        "samples": {n: mean(n=n, temperature=1.0, seed=1) for n in (2, 4, 6)},
    }

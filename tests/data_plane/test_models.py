"""Models under random chunking, mixed batches, scattered blocks and preemption answer as transformers' generate() does."""

from __future__ import annotations

import pytest
import tiny_models
from planner import Planner, Request
from tiny_models import FALLBACK, NATIVE, Served, prompts, reference_tokens
from twinplane.data_plane.models.fallback import FallbackModel
from twinplane.data_plane.models.llama import LlamaModel

NEW = 24


def serve(served: Served, texts: list[list[int]], new: int = NEW, **options) -> list[list[int]]:
    worker, rings = served.session()
    planner = Planner(worker, rings, block_size=served.block_size, num_blocks=served.num_blocks, **options)
    return planner.serve([Request(list(text), new, arrival=3 * i) for i, text in enumerate(texts)])


@pytest.mark.parametrize("family", [*NATIVE, *FALLBACK])
def test_greedy_answers_equal_generate_whatever_chunks_blocks_and_neighbours(family, tmp_path):
    model = tiny_models.make({**NATIVE, **FALLBACK}[family]())
    served = Served(tiny_models.save(model, tmp_path))
    assert isinstance(served.model, LlamaModel if family in NATIVE else FallbackModel)
    expected = reference_tokens(model, prompts(), NEW)
    assert len({token for answer in expected for token in answer}) > 20  # the answers are worth comparing
    assert serve(served, prompts(), seed=1) == expected
    assert serve(served, prompts(), seed=2, max_chunk=7, preempt=0.05) == expected

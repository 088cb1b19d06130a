"""The demo model (SmolLM2-135M-Instruct, GGUF Q4_1): our weights, logits and answers against transformers on the same tensors."""

from __future__ import annotations

import pytest
import torch
import transformers
from planner import Planner, Request
from tiny_models import Served, reference_tokens
from twinplane.data_plane.loader import open_weights
from twinplane.shared.model_files import read_model_card

pytestmark = pytest.mark.model

# Token ids of: "The capital of France is"; "def fibonacci(n):\n"; "Once upon a time"; a long one of repeated text.
PROMPTS = [[504, 3575, 282, 4649, 314], [1604, 6713, 24, 94, 727, 198], [6403, 1980, 253, 655], [504, 3575, 282, 4649, 314] * 30]


@pytest.fixture(scope="module")
def reference(demo_gguf):
    """transformers' LlamaForCausalLM filled with our dequantized tensors."""
    card = read_model_card(demo_gguf)
    source = open_weights(card)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**card.config))
    state = {name: source.take(name, source.shape(name), torch.float32) for name in source.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(model.config)
    model.model.rotary_emb = rotary
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module", params=["float32", "auto"])  # dequantized, and in the file's own blocks
def served(demo_gguf, request):
    return Served(demo_gguf, num_blocks=128, max_model_len=1024, dtype=request.param)


def test_every_tensor_of_the_file_is_used(served):
    assert served.source.unused() == []
    assert served.source.bytes_done == served.source.total_bytes


def test_greedy_answers_equal_transformers_on_the_same_weights(served, reference):
    worker, rings = served.session()
    planner = Planner(worker, rings, block_size=served.block_size, num_blocks=served.num_blocks, max_chunk=64)
    got = planner.serve([Request(list(p), 12) for p in PROMPTS])
    assert got == reference_tokens(reference, PROMPTS, 12)


def test_logits_equal_transformers_on_the_same_weights(served, reference):
    worker, rings = served.session()
    captured = []
    forward = served.device.forward
    served.device.forward = lambda batch: captured.append(forward(batch)) or captured[-1].clone()
    try:
        Planner(worker, rings, block_size=served.block_size, num_blocks=served.num_blocks, max_chunk=1000).serve([Request(PROMPTS[3], 1)])
    finally:
        del served.device.forward
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[3]])).logits[0, -1]
    torch.testing.assert_close(captured[0][0], expected, rtol=1e-3, atol=2e-3)

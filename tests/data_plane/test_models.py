"""Models under random chunking, mixed batches, scattered blocks and preemption answer as transformers' generate() does."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny_models
import torch
import transformers
from planner import Planner, Request, StepBuilder, run_step
from tiny_models import FALLBACK, NATIVE, Served, prompts, reference_tokens
from twinplane.data_plane.models import registry
from twinplane.data_plane.models.base import UnsupportedModelError
from twinplane.data_plane.models.fallback import FallbackModel
from twinplane.data_plane.models.llama import LlamaModel, LlamaSpec
from twinplane.shared.model_files import read_model_card
from twinplane.shared.wire import RowFlag

NEW = 16


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
    assert len({token for answer in expected for token in answer}) > 10  # the answers are worth comparing
    assert serve(served, prompts(), seed=1) == expected
    assert serve(served, prompts(), seed=2, max_chunk=7, preempt=0.05) == expected


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_E10_learned_positions_survive_chunks_of_seven_and_preemption(family, tmp_path):
    model = tiny_models.make(FALLBACK[family]())
    served = Served(tiny_models.save(model, tmp_path))
    text = prompts((33,))
    assert serve(served, text, 60, max_chunk=7, preempt=0.05, seed=3) == reference_tokens(model, text, 60)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_E10_the_last_position_of_the_table_is_served(family, tmp_path):
    model = tiny_models.make(FALLBACK[family]())
    served = Served(tiny_models.save(model, tmp_path))
    text = prompts((255,))
    assert serve(served, text, 1, max_chunk=64) == reference_tokens(model, text, 1)


HEADS = {
    "explicit larger head_dim": {"head_dim": 32},
    "explicit smaller head_dim": {"head_dim": 8},
    "head_dim derived": {"head_dim": None},
    "hidden no multiple of heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads as heads": {"num_key_value_heads": 4},
    "kv heads absent": {"num_key_value_heads": None},
}


@pytest.mark.parametrize("heads", HEADS)
def test_E08_head_shapes_of_every_kind_give_the_reference_answer_and_the_stated_bytes(heads, tmp_path):
    # Llama's own config forbids the case of hidden sizes that are no multiple of the heads.
    family = transformers.Qwen3Config if heads == "hidden no multiple of heads" else transformers.LlamaConfig
    config = family(**{**tiny_models.COMMON, **HEADS[heads]})
    model = tiny_models.make(config)
    served = Served(tiny_models.save(model, tmp_path))
    before = weight_checksum(served.model)
    texts = prompts((19, 50))
    assert serve(served, texts, 40, max_chunk=11) == reference_tokens(model, texts, 40)
    assert weight_checksum(served.model) == before
    head_dim = HEADS[heads].get("head_dim", 16) or 64 // 4
    kv_heads = HEADS[heads].get("num_key_value_heads", 2) or 4
    assert served.spec.bytes_per_token == 2 * 3 * kv_heads * head_dim * 4


def weight_checksum(model: LlamaModel) -> float:
    """Over what the reference kernels keep of the weights (other kernels pack them where Python can not look)."""
    tensors = [model._decoder.norm, *(layer.input_norm for layer in model._decoder.layers)]
    return sum(float(tensor.double().abs().sum()) for tensor in tensors)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_logits_do_not_depend_on_how_a_prompt_was_chunked(kv_dtype, tmp_path):
    served = Served(tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path), kv_dtype=kv_dtype)
    texts = prompts((90,))
    answers = {tuple(serve(served, texts, 12, max_chunk=chunk, seed=chunk)[0]) for chunk in (1, 5, 90)}
    assert len(answers) == 1


def test_a_prompt_that_shares_copied_blocks_continues_like_the_original(tmp_path):
    """Copy-on-write as the planner uses it: row 1 starts from copies of row 0's blocks and computes only its last token."""
    served = Served(tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path))
    worker, rings = served.session()
    text = prompts((40,))[0]
    first = StepBuilder(0, writes=[(0, i, 10 + i) for i in range(3)])
    first.open(0, flags=int(RowFlag.GREEDY))
    first.sequence(0, 0, text, samples=True)
    expected = int(run_step(worker, rings, first).entries[0]["token"])
    second = StepBuilder(1, writes=[(1, i, 20 + i) for i in range(3)], copies=[(10 + i, 20 + i) for i in range(3)])
    second.open(1, flags=int(RowFlag.GREEDY))
    second.sequence(1, 39, text[39:], samples=True)
    assert int(run_step(worker, rings, second).entries[0]["token"]) == expected


def answer(session, text: list[int], new: int, row: int, table: list[int], computed: int, chunk: int) -> list[int]:
    """`new` tokens after `text` from a row whose first `computed` tokens are in the blocks of its table already."""
    worker, rings, numbers = session
    tokens: list[int] = []
    step = StepBuilder(next(numbers), writes=[(row, index, block) for index, block in enumerate(table)])
    step.open(row, flags=int(RowFlag.GREEDY))
    while len(tokens) < new:
        part = text[computed : computed + chunk] or tokens[-1:]
        step.sequence(row, computed, part, samples=computed + len(part) >= len(text))
        computed += len(part)
        tokens += [int(entry["token"]) for entry in run_step(worker, rings, step).entries]
        step = StepBuilder(next(numbers))
    return tokens


@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize("family", ["mistral sliding window", "qwen2 some layers windowed", "gemma3"])
def test_A20_windows_hold_at_every_edge_in_chunks_and_behind_cached_blocks(family, chunk, tmp_path):
    """A prompt computed in chunks; then another row that begins with its whole blocks, as the prefix cache hands them over."""
    config = {**NATIVE, **FALLBACK}[family]()
    model = tiny_models.make(config)
    served = Served(tiny_models.save(model, tmp_path))
    window, size = config.sliding_window, served.block_size
    for length in (window - 1, window, window + 1, 3 * window + 8):
        text, new = prompts((length,), seed=length)[0], 6
        blocks, cached = -(-(length + new) // size), (length - 1) // size
        session = (*served.session(), itertools.count())
        expected = reference_tokens(model, [text], new)[0]
        assert answer(session, text, new, 0, [10 + i for i in range(blocks)], 0, chunk) == expected
        mine = [30 + i for i in range(blocks - cached)]
        assert answer(session, text, new, 1, [10 + i for i in range(cached)] + mine, cached * size, chunk) == expected


def test_a_model_with_its_own_attention_is_refused_by_name():
    config = transformers.BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(UnsupportedModelError, match=r"BloomForCausalLM computes attention by itself"):
        FallbackModel.shape(config)


def test_a_recurrent_model_is_refused_by_name():
    config = transformers.Qwen3NextConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=4, head_dim=16
    )
    with pytest.raises(UnsupportedModelError, match=r"Qwen3NextForCausalLM keeps a recurrent state"):
        FallbackModel.shape(config)


def test_layers_of_different_shape_are_refused_by_name(tmp_path):
    """DeepSeek's latent attention has values of another width than its keys, which its config does not tell us."""
    config = transformers.DeepseekV3Config(
        **{**tiny_models.COMMON, "num_key_value_heads": 4, "head_dim": 16},
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    path = tiny_models.save(tiny_models.make(config), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV3Attention of layer 0 caches .* the config implies"):
        Served(path)


def test_a_custom_model_registered_by_entry_point_is_used(tmp_path, monkeypatch):
    class Mine(LlamaModel):
        pass

    class Point:
        name, value = "MineForCausalLM", "mine:Mine"

        def load(self):
            return Mine

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "twinplane.models" else [])
    card = read_model_card(tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path))
    assert registry.model_class(replace(card, architecture="MineForCausalLM")) is Mine
    assert registry.model_class(card) is LlamaModel


PLAIN = ["llama", "llama tied", "llama biased", "mistral sliding window", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", NATIVE)
def test_a_config_read_without_transformers_means_the_same(family, tmp_path):
    config = NATIVE[family]()
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    plain = registry.plain_config(raw)
    assert (plain is not None) == (family in PLAIN)
    if plain is not None:
        assert LlamaSpec.from_config(plain) == LlamaSpec.from_config(config)
        assert plain.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]
    incomplete = {key: value for key, value in raw.items() if key != "rms_norm_eps"}
    assert registry.plain_config(incomplete) is None


def test_a_native_model_is_loaded_without_importing_transformers(demo_gguf):
    """It would cost a restarted data plane seconds."""
    code = (
        "import sys, threading; from twinplane.data_plane.main import DataPlane; from twinplane.data_plane.config import DataPlaneConfig\n"
        "DataPlane(DataPlaneConfig(model=sys.argv[1], kv_cache_bytes=1 << 20, threads=1), threading.Event())\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(demo_gguf)], check=False, capture_output=True).returncode == 0

"""What config files say about a model: limits, end-of-sequence ids, fingerprints; and what is said about bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from twinplane.shared.model_files import ModelFileError, fingerprint, max_positions, read_model_card, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 7}}, "added_tokens": [{"id": 9, "content": "<|end|>"}]}


def directory(path: Path, config: dict, **files: dict) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": 2}, {"generation_config": {"eos_token_id": [2, 5]}}, (2, 5)),
        ({}, {"generation_config": {"eos_token_id": 5}}, (5,)),
        ({"eos_token_id": None}, {"generation_config": {"eos_token_id": None}}, ()),
        ({}, {"tokenizer_config": {"eos_token": "<|end|>"}, "tokenizer": TOKENIZER}, (9,)),
        ({"eos_token_id": 2}, {"tokenizer_config": {"eos_token": {"content": "</s>"}}, "tokenizer": TOKENIZER}, (2, 7)),
        ({}, {"tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {"11": {"content": "<x>"}}}}, (11,)),
        (
            {"eos_token_id": 1},
            {"generation_config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "</s>"}, "tokenizer": TOKENIZER},
            (1, 5, 7),
        ),
    ],
)
def test_E04_the_stop_set_is_the_union_of_all_that_is_declared(config, files, expected, tmp_path):
    assert read_model_card(directory(tmp_path, config, **files)).eos_token_ids == expected


def test_E04_ids_outside_the_vocabulary_are_ignored_with_a_warning(tmp_path):
    card = read_model_card(directory(tmp_path, {"eos_token_id": [2, 100, -1]}))
    assert card.eos_token_ids == (2,)
    assert [w for w in card.warnings if "100" in w] and [w for w in card.warnings if "-1" in w]


def test_E04_a_gguf_file_declares_eos_eot_and_eom(tmp_path):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in (("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 8), ("block_count", 0)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 50)
    writer.add_tensor("token_embd.weight", np.zeros((20, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = read_model_card(tmp_path)  # a directory with one .gguf file will do
    assert card.eos_token_ids == (3, 5)
    assert "tokenizer.ggml.eom_token_id declares end-of-sequence id 50" in card.warnings[0]


def test_the_demo_model_is_described_by_its_metadata(demo_gguf):
    card = read_model_card(demo_gguf)
    assert (card.architecture, card.vocab_size, card.max_model_len, card.eos_token_ids) == ("LlamaForCausalLM", 49152, 8192, (2,))
    assert (card.num_layers, card.num_heads, card.num_kv_heads, card.head_dim, card.hidden_size) == (30, 9, 3, 64, 576)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 1024,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
            },
            4096,
        ),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}, 4096),
    ],
)
def test_the_position_limit_follows_static_rope_scaling_only(config, limit):
    assert max_positions(config) == limit


def test_the_text_part_of_a_multimodal_config_is_used(tmp_path):
    text = {"vocab_size": 50, "max_position_embeddings": 77, "eos_token_id": 4}
    card = read_model_card(directory(tmp_path, {"text_config": text, "eos_token_id": 3}))
    assert (card.vocab_size, card.max_model_len, card.eos_token_ids) == (50, 77, (3, 4))


def test_the_fingerprint_follows_config_and_weights(tmp_path):
    path = directory(tmp_path, {})
    (path / "model.safetensors").write_bytes(b"x" * 300_000)
    first = fingerprint(read_model_card(path))
    assert fingerprint(read_model_card(path)) == first
    (path / "model.safetensors").write_bytes(b"x" * 299_999 + b"y")
    second = fingerprint(read_model_card(path))
    directory(path, {"hidden_size": 65})
    assert len({first, second, fingerprint(read_model_card(path))}) == 3


def test_faults_name_the_file(tmp_path):
    with pytest.raises(ModelFileError, match=r"nothing does not exist: give a model directory"):
        read_model_card(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match=r"holds neither config\.json nor a \.gguf file"):
        read_model_card(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json can not be read as JSON"):
        read_model_card(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFileError, match=r"config\.json is a git-LFS pointer"):
        read_model_card(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelFileError, match=r"bad\.gguf does not start with the GGUF magic"):
        read_model_card(tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError, match=r"missing\.gguf does not exist"):
        resolve_model("missing.gguf")


def test_the_control_plane_can_read_a_card_without_torch():
    code = "import sys, twinplane.shared.model_files; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

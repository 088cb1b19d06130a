"""Weight files: what is missing, damaged or surprising is named before anything serves; what is legal loads exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from planner import Planner, Request
from safetensors.torch import load_file, save_file
from tiny_models import NATIVE, Served, prompts, reference_tokens
from twinplane.data_plane.config import DataPlaneError
from twinplane.data_plane.cpu import CpuDevice
from twinplane.data_plane.loader import GGUFSource, WeightError, open_weights
from twinplane.data_plane.loader.gguf import unpermute
from twinplane.shared.model_files import ModelFileError, read_model_card

INDEX = "model.safetensors.index.json"


def served_tokens(path: Path, new: int = 8, **options) -> list[list[int]]:
    served = Served(path, **options)
    worker, rings = served.session()
    planner = Planner(worker, rings, block_size=served.block_size, num_blocks=served.num_blocks)
    return planner.serve([Request(list(text), new) for text in prompts((9, 21))])


@pytest.fixture
def sharded(tmp_path) -> Path:
    model = tiny_models.make(NATIVE["llama"]())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    return tmp_path


@pytest.fixture
def single(tmp_path) -> Path:
    return tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path)


def rewrite(path: Path, change) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------- safetensors


def test_shards_and_a_single_file_give_the_same_answers(sharded, tmp_path_factory):
    model = transformers.AutoModelForCausalLM.from_pretrained(sharded, dtype=torch.float32)
    whole = tiny_models.save(model, tmp_path_factory.mktemp("whole"))
    assert served_tokens(sharded) == served_tokens(whole)


def test_E05_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightError, match=rf"{shard.name} is missing, though the weight index names it"):
        open_weights(read_model_card(sharded))


def test_E05_a_truncated_shard_is_named_with_both_sizes(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1000])
    with pytest.raises(WeightError, match=rf"{shard.name} is truncated: {len(data) - 1000} bytes, its header says {len(data)}"):
        open_weights(read_model_card(sharded))


@pytest.mark.parametrize("keep", [0, 4, 40])
def test_E05_a_file_cut_off_in_its_header_is_named(single, keep):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors is no safetensors file, or is cut off inside its header"):
        open_weights(read_model_card(single))


def test_E05_an_index_that_places_a_tensor_in_the_wrong_shard_names_both(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(n for n, f in index["weight_map"].items() if f == files[0])
    index["weight_map"][name] = files[1]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=rf"{files[1]}: tensor {name} is missing, though the index places it there"):
        open_weights(read_model_card(sharded))


def test_E05_a_tensor_missing_everywhere_is_named_with_its_shape(single):
    rewrite(single, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight \[96, 64\].* is missing"):
        Served(single)


def test_E05_a_tensor_missing_from_a_fallback_model_is_named(tmp_path):
    tiny_models.save(tiny_models.make(tiny_models.FALLBACK["phi3"]()), tmp_path)
    rewrite(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(WeightError, match=r"1 tensors that the model needs are missing: model\.layers\.1\.mlp\.down_proj\.weight"):
        Served(tmp_path)


def test_E05_a_wrong_shape_is_named_with_both_shapes(single):
    rewrite(single, lambda weights: weights.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(WeightError, match=r"tensor model\.norm\.weight is \[65\], the config calls for \[64\]"):
        Served(single)


def test_E05_a_wrong_dtype_is_named(single):
    rewrite(single, lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}))
    with pytest.raises(WeightError, match=r"tensor model\.norm\.weight is torch\.int64, expected a floating-point type"):
        Served(single)


def test_E05_unknown_extra_tensors_are_listed_and_do_no_harm(single):
    expected = served_tokens(single)
    rewrite(single, lambda weights: weights.update({"rotary.leftover": torch.ones(3)}))
    served = Served(single)
    assert served.source.unused() == ["rotary.leftover"]
    assert served_tokens(single) == expected


def test_E05_a_git_lfs_pointer_says_so(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(WeightError, match=r"model\.safetensors is a git-LFS pointer, not the weights: run `git lfs pull`"):
        open_weights(read_model_card(single))


def test_E05_safetensors_are_preferred_and_pickles_alone_are_refused_by_name(single):
    (single / "pytorch_model.bin").write_bytes(b"not read")
    open_weights(read_model_card(single))
    (single / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"holds only pickle weights \(pytorch_model\.bin\), which are not read"):
        open_weights(read_model_card(single))


def test_progress_counts_every_byte_once(single):
    seen: list[tuple[int, int]] = []
    card = read_model_card(single)
    source = open_weights(card, lambda done, total: seen.append((done, total)))
    for name in source.names():
        source.take(name, source.shape(name), torch.float32)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (source.total_bytes, source.total_bytes)


# ----------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_E06_logits_follow_transformers_for_every_combination_of_flag_and_head(flag, head, tmp_path):
    tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings")
    if flag is not None:
        config["tie_word_embeddings"] = flag
    (tmp_path / "config.json").write_text(json.dumps(config))

    def change(weights):
        if head == "absent":
            del weights["lm_head.weight"]
        elif head == "equal":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, change)
    if head == "absent" and not flag:  # transformers would make the head up at random
        with pytest.raises(WeightError, match=r"tie_word_embeddings: false but the files hold no lm_head\.weight"):
            Served(tmp_path)
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert served_tokens(tmp_path) == reference_tokens(model, prompts((9, 21)), 8)
    warned = "head" in Served(tmp_path).model.warnings()
    assert warned == bool(flag and head == "different")


# ------------------------------------------------------------------------------------------------ GGUF


def write_gguf(model, path: Path, architecture: str, kind: gguf.GGMLQuantizationType, change=None) -> Path:
    """A GGUF file of a tiny model, as llama.cpp's converter lays it out: names, metadata, q/k rows permuted for llama."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA if architecture == "llama" else gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        value = tensor.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            value = value.reshape(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        data = value.numpy()
        quantized = kind if data.ndim > 1 and "embed" not in name else gguf.GGMLQuantizationType.F32
        if kind.name.endswith("_K") and name.split(".")[-2] in ("v_proj", "down_proj"):
            quantized = gguf.GGMLQuantizationType.Q6_K  # as the usual mixtures of K-quants do
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) + ("." + name.rsplit(".", 1)[1])
        blocks = _k_quants(data.shape, quantized) if quantized.name.endswith("_K") else gguf.quantize(data, quantized)
        writer.add_tensor(target.replace(".weight.weight", ".weight").replace(".bias.bias", ".bias"), blocks, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _k_quants(shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of about the size of weights: the gguf package can read these types, but not quantize to them."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(shape[0]).integers(0, 256, (shape[0], shape[1] // weights, size), dtype=np.uint8)
    scale = np.full(1, 1e-4 if kind.name == "Q6_K" else 4e-4, np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        blocks[:, :, 208:] = scale
    else:
        blocks[:, :, 0:2], blocks[:, :, 2:4] = scale, np.full(1, 3e-3, np.float16).view(np.uint8)  # their means nearly cancel
    return blocks.reshape(shape[0], -1)


def logits_of(path: Path, **options) -> torch.Tensor:
    """Logits of the last token of a prompt."""
    from twinplane.data_plane.batch import Batch

    served = Served(path, **options)
    text = prompts((30,))[0]
    batch = Batch(
        token_ids=torch.tensor(text),
        positions=torch.arange(30),
        slots=torch.arange(30),
        query_start=torch.tensor([0, 30], dtype=torch.int32),
        context_lens=torch.tensor([30], dtype=torch.int32),
        block_tables=torch.arange(2, dtype=torch.int32)[None],
        sample_tokens=torch.tensor([29]),
    )
    with torch.inference_mode():
        return served.device.forward(batch)[0]


WIDE = {**tiny_models.COMMON, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # K-quants have blocks of 256


@pytest.mark.parametrize(
    ("kind", "cosine"), [("F16", 0.999), ("Q8_0", 0.99), ("BF16", 0), ("Q5_1", 0), ("Q5_0", 0), ("Q4_1", 0), ("Q4_0", 0)]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_E11_gguf_logits_equal_those_of_the_dequantized_weights(kind, cosine, architecture, tmp_path):
    """Exactly what the file holds, whatever its type; and near the original where the type is fine enough."""
    quantization = gguf.GGMLQuantizationType[kind]
    model = tiny_models.make(transformers.LlamaConfig(**WIDE) if architecture == "llama" else transformers.Qwen2Config(**WIDE))
    path = write_gguf(model, tmp_path / "model.gguf", architecture, quantization)
    text = torch.tensor([prompts((30,))[0]])
    got = logits_of(path)
    with torch.inference_mode():
        assert torch.nn.functional.cosine_similarity(got, model(text).logits[0, -1], dim=0) > cosine
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.data = torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), quantization), quantization))
        torch.testing.assert_close(got, model(text).logits[0, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_E11_k_quants_are_dequantized_as_the_gguf_package_does(kind, tmp_path):
    """Random blocks instead of quantized weights: the package only reads these types."""
    quantization = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(0).integers(0, 256, (4, size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in (("context_length", 64), ("embedding_length", 256), ("feed_forward_length", 256), ("block_count", 0)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(read_model_card(tmp_path / "model.gguf"))
    got = source.take("model.embed_tokens.weight", (4, 256), torch.float32)
    torch.testing.assert_close(got, torch.from_numpy(gguf.dequantize(blocks, quantization)), equal_nan=True, rtol=0, atol=0)


def test_E11_unpermute_is_the_inverse_of_the_converter():
    weight = torch.randn(4 * 16, 8)
    stored = weight.reshape(4, 2, 8, 8).transpose(1, 2).reshape(weight.shape)
    assert torch.equal(unpermute(stored, 4), weight)
    assert not torch.equal(stored, weight)


def test_E11_an_unknown_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(tiny_models.make(NATIVE["llama"]()), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.F32)
    data = path.read_bytes().replace(b"llama", b"lldma")
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"holds architecture 'lldma'; GGUF files can be read for: llama, qwen2, qwen3"):
        read_model_card(path)


def test_E11_an_unreadable_tensor_type_is_refused_by_name(tmp_path):
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.TQ2_0)
    with pytest.raises(WeightError, match=r"has ggml type 35, which can not be read; readable types: F32, .*Q6_K"):
        open_weights(read_model_card(path))


@pytest.mark.parametrize("keep", [0.999, 0.1, 0.001])
def test_E05_a_truncated_gguf_file_is_refused(keep, tmp_path):
    path = write_gguf(tiny_models.make(NATIVE["llama"]()), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.F32)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises((WeightError, ModelFileError), match="truncated"):
        open_weights(read_model_card(path))


def test_gguf_and_safetensors_of_one_model_answer_alike(tmp_path):
    model = tiny_models.make(NATIVE["llama"]())
    path = write_gguf(model, tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.F32)
    assert served_tokens(path) == reference_tokens(model, prompts((9, 21)), 8)


# ----------------------------------------------------------------------------------------------- dtype


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_E13_auto_never_narrows_what_the_files_hold(stored, tmp_path):
    model = tiny_models.make(NATIVE["llama"]()).to(stored)
    tiny_models.save(model, tmp_path)
    chosen = Served(tmp_path, dtype="auto").format
    assert chosen.dtype in (torch.float32, stored)
    assert chosen.dtype != torch.float16 and chosen.reason.startswith("auto: ")
    assert served_tokens(tmp_path, dtype="auto") == reference_tokens(model.float(), prompts((9, 21)), 8)


def test_E13_float16_is_refused_with_the_alternatives(single):
    with pytest.raises(DataPlaneError, match=r"float16 is not computed on CPUs: use float32 .* or bfloat16"):
        Served(single, dtype="float16")


def test_E13_an_explicit_dtype_is_honoured_and_bfloat16_is_said_to_be_storage(single):
    card, device = read_model_card(single), CpuDevice(threads=1)
    assert device.choose_format("float32", replace(card, dtype="bfloat16"), native=True).dtype == torch.float32
    chosen = device.choose_format("bfloat16", card, native=True)
    assert chosen.dtype == torch.bfloat16 and "storage only, arithmetic is float32" in chosen.reason


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("kernels", [None, "reference"])
def test_E13_blocks_kept_as_they_are_answer_as_their_dequantized_values(kind, kernels, tmp_path):
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType[kind])
    assert served_tokens(path, dtype="auto", kernels=kernels) == served_tokens(path, dtype="float32", kernels="reference")


def test_k_quants_are_served_without_a_dequantized_copy(tmp_path):
    """q, k of one format and v of another, as one linear."""
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.Q4_K)
    served = Served(path, dtype="auto")
    layer = served.model._decoder.layers[0]
    assert (layer.qkv.kind, layer.gate_up.kind, layer.down.kind) == ("Q4_K+Q6_K", "Q4_K", "Q6_K")
    assert layer.gate_up.nbytes == 2 * 512 * 148  # per 256 weights of a row
    assert set(served.model.memory()) == {"embedding_and_head", "attention", "mlp"}
    assert served.model.memory()["mlp"].endswith(" MB Q4_K, Q6_K")


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_0", "F16"])
def test_the_memory_plan_of_a_gguf_file_counts_what_is_not_kept_in_blocks_as_float32(kind, tmp_path):
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType[kind])
    served = Served(path, dtype="auto")
    model = served.model
    held = sum(linear.nbytes for layer in model._decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
    held += model._decoder.embedding.nbytes + model._decoder.head.nbytes
    assert served.format.bytes_held(served.shape, served.source) == pytest.approx(held, rel=0.01)


# ------------------------------------------------------------------------- quantization, 8-bit activations


@pytest.mark.parametrize(("quantization", "layers"), [("q8", "Q8_0"), ("q4", "Q4_1")])
def test_weights_quantized_at_load_answer_as_the_same_weights_rounded(quantization, layers, tmp_path):
    model = tiny_models.make(transformers.LlamaConfig(**WIDE))
    tiny_models.save(model, tmp_path)
    served = Served(tmp_path, dtype="auto", quantization=quantization)
    assert served.format.name == f"{quantization}+float32" and layers in served.format.reason
    assert served.model._decoder.layers[0].qkv.kind == layers and served.model._decoder.head.kind == "Q8_0"
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            kind = gguf.GGMLQuantizationType["Q8_0" if "embed" in name or "lm_head" in name else layers]
            parameter.data = torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind))
    assert served_tokens(tmp_path, dtype="auto", quantization=quantization) == reference_tokens(model, prompts((9, 21)), 8)


@pytest.mark.parametrize("quantization", ["q8", "q4"])
def test_the_memory_plan_of_quantized_weights_is_what_they_take(quantization, tmp_path):
    tiny_models.save(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path)
    served = Served(tmp_path, dtype="auto", quantization=quantization)
    model = served.model
    held = sum(linear.nbytes for layer in model._decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
    held += model._decoder.embedding.nbytes + model._decoder.head.nbytes
    assert served.format.bytes_held(served.shape, served.source) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K"])
def test_8_bit_activations_stay_near_the_exact_answer(kind, tmp_path):
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType[kind])
    exact, rounded = logits_of(path, dtype="auto"), logits_of(path, dtype="auto", activations="int8")
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99  # random weights amplify what is rounded


def test_8_bit_activations_answer_the_same_alone_and_in_company(tmp_path):
    path = write_gguf(tiny_models.make(transformers.LlamaConfig(**WIDE)), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.Q4_1)
    served = Served(path, dtype="auto", activations="int8")
    assert served.format.name == "gguf+int8" and "activations are rounded to 8 bits" in served.format.reason
    assert served.spec.dtype == torch.bfloat16  # which costs no quality beside them

    def answers(texts: list[list[int]], max_chunk: int) -> list[list[int]]:
        worker, rings = served.session()
        planner = Planner(worker, rings, block_size=served.block_size, num_blocks=served.num_blocks, max_chunk=max_chunk)
        return planner.serve([Request(list(text), 12) for text in texts])

    texts = prompts((9, 21, 40))
    together = answers(texts, 7)
    assert [answers([text], 64)[0] for text in texts] == together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "q8", "dtype": "bfloat16"}, "dtype bfloat16 and quantization q8 both say how weights are held"),
        (
            {"activations": "int8", "dtype": "auto"},
            "these are kept as float32: use a GGUF file with dtype auto, or",
        ),
        (
            {"activations": "int8", "dtype": "auto", "quantization": "q8", "kernels": "reference"},
            "is for weights of 4 to 8 bits",
        ),
    ],
)
def test_what_can_not_be_quantized_is_refused_with_the_alternatives(options, message, single):
    with pytest.raises(DataPlaneError, match=message):
        Served(single, **options)


def test_quantizing_a_gguf_file_or_a_model_of_transformers_is_refused(tmp_path):
    path = write_gguf(tiny_models.make(NATIVE["llama"]()), tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.F32)
    with pytest.raises(DataPlaneError, match=r"quantization q4 is for safetensors: .*m\.gguf keeps the numbers it has"):
        Served(path, dtype="auto", quantization="q4")
    folder = tiny_models.save(tiny_models.make(tiny_models.FALLBACK["gpt2"]()), tmp_path / "gpt2")
    with pytest.raises(DataPlaneError, match="GPT2LMHeadModel runs through transformers: use dtype float32 or bfloat16"):
        Served(folder, dtype="auto", quantization="q4")


def test_rows_that_do_not_divide_into_blocks_are_refused_by_name(tmp_path):
    config = transformers.LlamaConfig(**{**tiny_models.COMMON, "intermediate_size": 100})
    tiny_models.save(tiny_models.make(config), tmp_path)
    with pytest.raises(WeightError, match=r"down_proj\.weight has rows of 100 numbers, quantization q8 needs a multiple of 32"):
        Served(tmp_path, dtype="auto", quantization="q8")


def test_E13_float16_weights_with_large_activations_stay_finite(tmp_path):
    """In float16 arithmetic the products of these weights overflow; float32 arithmetic does not."""
    model = tiny_models.make(NATIVE["llama"]())
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data *= 300
        layer.mlp.gate_proj.weight.data *= 300
    tiny_models.save(model.half(), tmp_path)
    served = Served(tmp_path, dtype="auto")
    worker, rings = served.session()
    request = Request(prompts((20,))[0], 8)
    Planner(worker, rings, block_size=16, num_blocks=64).serve([request])
    assert request.flags == [0] * 8


def test_E13_bfloat16_storage_answers_as_the_rounded_weights_do(tmp_path):
    model = tiny_models.make(NATIVE["llama"]())
    tiny_models.save(model, tmp_path)
    assert served_tokens(tmp_path, dtype="bfloat16") == reference_tokens(_rounded(model), prompts((9, 21)), 8)


def _rounded(model):
    """Matrices rounded to bfloat16, arithmetic in float32; norms keep their float32 values."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16().float()
    return model

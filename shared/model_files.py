"""What a model's files say about it, for both planes: no torch, no transformers, no weights read.

`read_model_card` accepts a directory in Hugging Face form (``config.json`` beside ``*.safetensors``), a ``.gguf`` file, or a
directory that holds one ``.gguf`` file and no ``config.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinplane.shared.gguf_file import GGUFError, GGUFFile, read_gguf

_LFS_MAGIC = b"version https://git-lfs"
_EDGE_BYTES = 1 << 16  # of each weight file, first and last so many enter the fingerprint

# general.architecture -> (Hugging Face class, model_type). Others are refused by name: a guess would talk nonsense.
GGUF_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


class ModelFileError(ValueError):
    """The model's files can not be used; the message names the file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Everything that can be known without the weights. None = the files do not say (the model class has a default)."""

    path: Path  # the directory, or the .gguf file
    format: str  # "safetensors" or "gguf"
    architecture: str  # Hugging Face class name, e.g. LlamaForCausalLM
    config: dict[str, Any]  # in the form of a Hugging Face config.json; the text part of a multimodal model
    vocab_size: int | None
    max_model_len: int | None  # positions the model can address: a hard limit for learned tables, else the trained length
    eos_token_ids: tuple[int, ...]  # sorted union of everything declared (config, generation config, tokenizer, GGUF)
    bos_token_id: int | None
    hidden_size: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    dtype: str | None  # as stored, e.g. "bfloat16"
    warnings: tuple[str, ...] = ()


def read_model_card(path: str | Path) -> ModelCard:
    """Raises ModelFileError, naming the file at fault."""
    path = Path(path)
    if path.is_dir() and not (path / "config.json").exists():
        path = _only_gguf(path)
    if path.is_file():
        return _card_of_gguf(path)
    if not path.is_dir():
        raise ModelFileError(f"{path} does not exist: give a model directory (config.json and *.safetensors) or a .gguf file")
    return _card_of_directory(path)


def resolve_model(name: str) -> Path:
    """A local path as it is; otherwise a Hugging Face hub name, taken from the local cache or downloaded.

    Raises ModelFileError if it is neither.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") != 1 or name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        raise ModelFileError(f"{name} does not exist, and it is no Hugging Face name (owner/model)")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # whatever the hub client raises: offline, not found, gated
        raise ModelFileError(f"{name} is not a local path and could not be fetched from the Hugging Face hub: {error}") from error


def weight_files(card: ModelCard) -> list[Path]:
    """The files that hold weights, sorted. For a sharded directory those its index names, present or not."""
    if card.format == "gguf":
        return [card.path]
    index = card.path / "model.safetensors.index.json"
    if index.exists():
        names = set(_read_json(index).get("weight_map", {}).values())
        return sorted(card.path / name for name in names)
    single = card.path / "model.safetensors"
    return [single] if single.exists() else sorted(card.path.glob("*.safetensors"))


def fingerprint(card: ModelCard) -> str:
    """16 hex digits that change when the config or any weight file changes (size, head or tail of the file)."""
    digest = hashlib.sha256(json.dumps(card.config, sort_keys=True, default=str).encode())
    for path in weight_files(card):
        size = path.stat().st_size if path.exists() else -1
        digest.update(f"{path.name}:{size}".encode())
        if size >= 0:
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def is_lfs_pointer(path: Path) -> bool:
    """True if the file is a git-LFS pointer, that is, the real content was never downloaded."""
    with path.open("rb") as file:
        return file.read(len(_LFS_MAGIC)) == _LFS_MAGIC


# ------------------------------------------------------------------------------------------- directory


def _card_of_directory(path: Path) -> ModelCard:
    whole = _read_json(path / "config.json")
    config = {**whole, **whole["text_config"]} if isinstance(whole.get("text_config"), dict) else whole
    architectures = whole.get("architectures") or [""]
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    vocab_size = _first(config, "vocab_size")
    declared = {
        "config.json": _ids(config.get("eos_token_id")) + _ids(whole.get("eos_token_id")),
        "generation_config.json": _ids(generation.get("eos_token_id")),
        "tokenizer_config.json": _tokenizer_eos(path),
    }
    eos, warnings = _union(declared, vocab_size)
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    return ModelCard(
        path=path,
        format="safetensors",
        architecture=str(architectures[0]),
        config=config,
        vocab_size=vocab_size,
        max_model_len=max_positions(config),
        eos_token_ids=eos,
        bos_token_id=_first(config, "bos_token_id"),
        hidden_size=hidden,
        num_layers=_first(config, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=_first(config, "num_key_value_heads") or heads,
        head_dim=_first(config, "head_dim") or (hidden // heads if hidden and heads else None),
        dtype=_first(config, "dtype", "torch_dtype"),
        warnings=warnings,
    )


def max_positions(config: dict[str, Any]) -> int | None:
    """Longest sequence a config allows, in tokens.

    Static RoPE scaling (linear, YaRN) whose config gives the original length extends it by its factor. Variants that
    change their frequencies with the sequence's length (dynamic NTK, LongRoPE) are held to the original length: there
    the same token would get another key depending on how long its neighbours are.
    """
    limit: int | None = _first(config, "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
    if limit is None or kind is None:
        return limit
    original = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if kind in ("dynamic", "longrope", "su"):
        return int(original or limit)
    if kind in ("linear", "yarn") and scaling.get("factor"):
        return max(limit, int((original or limit) * scaling["factor"]))
    return limit


def _tokenizer_eos(path: Path) -> list[int]:
    """Id of the tokenizer's eos_token, looked up where the files list added tokens."""
    settings_path = path / "tokenizer_config.json"
    if not settings_path.exists():
        return []
    settings = _read_json(settings_path)
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return []
    by_text = {entry.get("content"): int(i) for i, entry in (settings.get("added_tokens_decoder") or {}).items()}
    if text not in by_text and (path / "tokenizer.json").exists():
        tokenizer = _read_json(path / "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab")
        by_text = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        by_text.update({entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []})
    return [by_text[text]] if text in by_text else []


# ------------------------------------------------------------------------------------------------ GGUF


def _card_of_gguf(path: Path) -> ModelCard:
    if is_lfs_pointer(path):
        raise ModelFileError(f"{path} is a git-LFS pointer, not the weights: run `git lfs pull`")
    try:
        file = read_gguf(path)
    except GGUFError as error:
        raise ModelFileError(str(error)) from error
    config = gguf_config(file)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    eos, warnings = _union({key: _ids(file.metadata.get(key)) for key in keys}, config["vocab_size"])
    return ModelCard(
        path=path,
        format="gguf",
        architecture=config["architectures"][0],
        config=config,
        vocab_size=config["vocab_size"],
        max_model_len=max_positions(config),
        eos_token_ids=eos,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        dtype=file.tensors["token_embd.weight"].type_name,
        warnings=warnings,
    )


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """A GGUF file's metadata as a Hugging Face config. Raises ModelFileError for an architecture not known here."""
    if file.architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelFileError(f"{file.path} holds architecture {file.architecture!r}; GGUF files can be read for: {known}")
    if file.arch("expert_count"):
        raise ModelFileError(f"{file.path} is a mixture of {file.arch('expert_count')} experts, which is not supported from GGUF files")
    architecture, model_type = GGUF_ARCHITECTURES[file.architecture]
    try:
        embedding = file.tensors["token_embd.weight"]
        hidden, heads = int(file.arch("embedding_length")), int(file.arch("attention.head_count"))
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": int(file.arch("feed_forward_length")),
            "num_hidden_layers": int(file.arch("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(file.arch("attention.head_count_kv", heads)),
            "head_dim": int(file.arch("attention.key_length", hidden // heads)),
            "max_position_embeddings": int(file.arch("context_length")),
            "rms_norm_eps": float(file.arch("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "rope_parameters": _gguf_rope(file),
        }
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{file.path} lacks metadata or a tensor that {file.architecture!r} needs: {error}") from error
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[key] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if file.arch("attention.sliding_window"):
        config["sliding_window"] = int(file.arch("attention.sliding_window"))
    return config


def _gguf_rope(file: GGUFFile) -> dict[str, Any]:
    kind = str(file.arch("rope.scaling.type", "none"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.arch("rope.freq_base", 10000.0))}
    if kind in ("linear", "yarn"):
        rope["rope_type"] = kind
        rope["factor"] = float(file.arch("rope.scaling.factor", 1.0))
        if file.arch("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(file.arch("rope.scaling.original_context_length"))
    elif kind != "none":
        raise ModelFileError(f"{file.path} uses RoPE scaling {kind!r}, which can not be read from GGUF files")
    return rope


def _only_gguf(path: Path) -> Path:
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        what = f"{len(found)} .gguf files ({', '.join(f.name for f in found[:4])})" if found else "neither config.json nor a .gguf file"
        raise ModelFileError(f"{path} holds {what}: give a directory with config.json, or name one .gguf file")
    return found[0]


# --------------------------------------------------------------------------------------------- helpers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        if path.exists() and is_lfs_pointer(path):
            raise ModelFileError(f"{path} is a git-LFS pointer, not the file itself: run `git lfs pull`") from error
        raise ModelFileError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _ids(value: Any) -> list[int]:
    """Token ids from an int, a list of ints, or null."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _union(declared: dict[str, list[int]], vocab_size: int | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sorted union of the declared end-of-sequence ids, and a warning for each id outside the vocabulary."""
    union, warnings = set(), []
    for source, ids in declared.items():
        for token in ids:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                warnings.append(f"{source} declares end-of-sequence id {token}, outside the vocabulary of {vocab_size}: ignored")
            else:
                union.add(token)
    return tuple(sorted(union)), tuple(warnings)

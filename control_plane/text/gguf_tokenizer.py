"""Builds a tokenizer from the metadata of a GGUF file.

GGUF stores a vocabulary and merges, but only the *name* of the rule that cuts text into words before merging
(``tokenizer.ggml.pre``). A wrong rule gives plausible but different ids, so a name that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from twinplane.control_plane.text.detokenizer import UnsupportedTokenizerError


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class BpeRule:
    """How one family cuts text. ``pattern`` None: GPT-2's own, which the ByteLevel step contains."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_SPACE = "▁"  # U+2581, how SentencePiece writes a space

# Cutting patterns are those published with the models (tiktoken's cl100k_base and its variants).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

BPE_RULES: Mapping[str, BpeRule] = {
    "gpt-2": BpeRule(),
    "smollm": BpeRule(single_digits=True),
    "llama-bpe": BpeRule(pattern=_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": BpeRule(pattern=_QWEN2, nfc=True),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> FastTokenizer:
    """The tokenizer a GGUF file describes. Raises UnsupportedTokenizerError naming what is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _build_byte_level(metadata)
    if kind == "llama":
        return _build_sentencepiece(metadata)
    raise UnsupportedTokenizerError(
        f"tokenizer.ggml.model is {kind!r} in the GGUF file; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are supported:"
        " give the model's Hugging Face tokenizer with --tokenizer"
    )


def _build_byte_level(metadata: Mapping[str, Any]) -> FastTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    rule = BPE_RULES.get(str(name))
    if rule is None:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.pre is {name!r} in the GGUF file; known are {', '.join(BPE_RULES)}:"
            " give the model's Hugging Face tokenizer with --tokenizer"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges, ignore_merges=rule.ignore_merges)
    tokenizer = FastTokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, TokenType.CONTROL))
    tokenizer.add_tokens(_added(tokens, types, TokenType.USER_DEFINED))
    tokenizer.post_processor = _post_processor(metadata, tokens, add_bos=rule.add_bos)
    return tokenizer


def _build_sentencepiece(metadata: Mapping[str, Any]) -> FastTokenizer:
    """SentencePiece BPE (Kudo and Richardson 2018): the pair whose union scores highest is merged first."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedTokenizerError(
                f"tokenizer.ggml.{key} is set in the GGUF file, a text normalization that is not supported:"
                " give the model's Hugging Face tokenizer with --tokenizer"
            )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        _merges_by_score(tokens, metadata["tokenizer.ggml.scores"], types),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    tokenizer = FastTokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens([*_added(tokens, types, TokenType.UNKNOWN), *_added(tokens, types, TokenType.CONTROL)])
    tokenizer.add_tokens(_added(tokens, types, TokenType.USER_DEFINED))
    tokenizer.post_processor = _post_processor(metadata, tokens, add_bos=True)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece stores pieces and scores; a merge is every way to cut a piece into two pieces, ranked by the piece's score.

    Among cuts of one piece the longer left part goes first, as in Hugging Face's conversion.
    """
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == TokenType.NORMAL}
    merges = [
        (score, at, piece[:at], piece[at:])
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in merges]


def _pre_tokenizer(rule: BpeRule) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None)
    if rule.pattern is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule.pattern), "isolated"), byte_level])
    if rule.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _added(tokens: list[str], types: list[int], kind: TokenType) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind is not TokenType.USER_DEFINED, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]


def _post_processor(metadata: Mapping[str, Any], tokens: list[str], *, add_bos: bool) -> processors.PostProcessor:
    """Puts BOS before and EOS after a text, as the file says."""
    nothing = processors.ByteLevel(trim_offsets=False)  # changes offsets only
    template = ["$A"]
    used = []
    for key, place, default in (("bos", 0, add_bos), ("eos", 1, False)):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{key}_token", default) and index is not None:
            template.insert(0 if place == 0 else len(template), tokens[index])
            used.append((tokens[index], index))
    if not used:
        return nothing
    return processors.TemplateProcessing(single=template, special_tokens=used)

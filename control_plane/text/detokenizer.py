"""Token ids to text, token by token, in constant time each, never half a character.

A token is a run of bytes; a sequence's text is the UTF-8 decoding of all of them in a row. So a table of each token's
bytes plus a stateful UTF-8 decoder is all there is, and the concatenated deltas equal the decoding of the whole by
construction, wherever a stream is cut. Bytes that are no valid UTF-8 become U+FFFD, one per maximal ill-formed
subpart (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts"), in streams and in unary replies alike.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class UnsupportedTokenizerError(Exception):
    """The tokenizer is of a kind that is not implemented; the message names it."""


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (Radford et al. 2019, GPT-2).

    Bytes that print stand for themselves; the other 68 are moved to U+0100 and up, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


class TokenBytes:
    """The bytes of every token of a vocabulary.

    ``strips_first_space``: the tokenizer puts a space in front of every text (SentencePiece's dummy prefix), so
    decoding drops one at the very beginning.
    """

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int], *, strips_first_space: bool) -> None:
        self.pieces = pieces
        self.visible = [b"" if index in special else piece for index, piece in enumerate(pieces)]
        self.special = special
        self.strips_first_space = strips_first_space

    @classmethod
    def of(cls, tokenizer: FastTokenizer) -> TokenBytes:
        """Read the decoder and vocabulary of ``tokenizer``. Raises UnsupportedTokenizerError naming an unknown decoder."""
        decoder = json.loads(tokenizer.to_str())["decoder"]
        to_bytes, strips_first_space = _piece_decoder(decoder)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, index in vocabulary.items():
            pieces[index] = to_bytes(piece)
        special = frozenset(index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        return cls(pieces, special, strips_first_space=strips_first_space)

    def join(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        """Ids outside the vocabulary (padding of the model's embedding) have no bytes."""
        table = self.visible if skip_special else self.pieces
        size = len(table)
        return b"".join([table[index] for index in ids if index < size])

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence from its beginning."""
        data = self.join(ids, skip_special=skip_special)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")


class Detokenizer:
    """Text of a sequence that goes on after its prompt.

    The deltas concatenated are decode(prompt + output) without decode(prompt). A first space is therefore kept, unless
    the prompt has no text of its own (only special tokens) and the tokenizer's dummy prefix would stand there.
    """

    def __init__(self, table: TokenBytes, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._table = table
        self._skip_special = skip_special
        self._decoder = _Utf8Decoder(errors="replace")
        hidden = table.special if skip_special else frozenset()
        self._strip = table.strips_first_space and all(index in hidden for index in prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Whole characters that became complete with ``ids``."""
        data = self._table.join(ids, skip_special=self._skip_special)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The sequence ended: one U+FFFD if it ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _piece_decoder(decoder: dict[str, Any] | None) -> tuple[Any, bool]:
    """How a vocabulary entry becomes bytes, and whether a first space is dropped, for a decoder as tokenizer.json has it."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_piece, False
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_decoder(steps)
    raise UnsupportedTokenizerError(
        f"the tokenizer's decoder {'+'.join(kinds) or '(none)'} is not supported: byte-level BPE (ByteLevel) and"
        " SentencePiece (Replace, ByteFallback, Fuse, Strip, Metaspace) are"
    )


_ALPHABET = byte_level_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    # Added tokens may hold characters outside the alphabet (a plain space, say): those stand for themselves.
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_decoder(steps: list[dict[str, Any]]) -> tuple[Any, bool]:
    replacements: list[tuple[str, str]] = []
    byte_fallback = strips_first_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                replacements.append((mark, " "))
                strips_first_space |= scheme in ("always", "first")
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips_first_space = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnsupportedTokenizerError(f"the step {step} of the tokenizer's decoder is not supported")

    def to_bytes(piece: str) -> bytes:
        # "<0xE4>" is the single byte 0xE4, a part of a character the vocabulary does not hold.
        if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        for pattern, content in replacements:
            piece = piece.replace(pattern, content)
        return piece.encode()

    return to_bytes, strips_first_space

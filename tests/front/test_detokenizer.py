"""Token ids to text: whole characters, spaces kept, and streams equal to the whole."""

from __future__ import annotations

import time

import pytest
from front_support import EOS
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from twinplane.control_plane.text.detokenizer import Detokenizer, TokenBytes, UnsupportedTokenizerError
from twinplane.control_plane.text.tokenizer import Tokenizer

HARD = "👨‍👩‍👧‍👦 🇫🇷 日本語 שלום e\u0301 naïve 𝔘 \u200b\n\n\ttabs  double"


def sentencepiece(*, strip: bool = True) -> FastTokenizer:
    """A Llama-like SentencePiece tokenizer: marks for spaces, byte tokens for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "!", "▁▁", "\n", "Hello", "é"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


SP = sentencepiece()
SP_TABLE = TokenBytes.of(SP)


def stream(table: TokenBytes, ids: list[int], prompt: list[int] | None = None, *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(table, prompt if prompt is not None else [4], skip_special=skip_special)
    return [*(detokenizer.push((token,)) for token in ids), detokenizer.flush()]


def test_B13_no_delta_holds_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD)
    deltas = stream(tokenizer.bytes, ids)
    assert "".join(deltas) == HARD == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas.count("") > 20  # single bytes of a character come in silence


def test_B13_an_answer_that_ends_inside_a_character_ends_in_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 👋")[:-1]
    deltas = stream(tokenizer.bytes, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "ok \ufffd"
    assert deltas[-1] == "\ufffd"


@given(st.lists(st.integers(0, 263), max_size=60))
def test_B13_streams_equal_the_whole_for_any_tokens(ids: list[int]) -> None:
    table = TokenBytes.of(tiny())
    for skip_special in (True, False):
        assert "".join(stream(table, ids, skip_special=skip_special)) == table.decode(ids, skip_special=skip_special)


@given(st.lists(st.integers(0, 263), max_size=60))
def test_B13_byte_level_decoding_equals_the_tokenizers_library(ids: list[int]) -> None:
    assert TokenBytes.of(tiny()).decode(ids) == tiny().decode(ids)


_TINY: list[FastTokenizer] = []


def tiny() -> FastTokenizer:
    if not _TINY:
        from front_support import tiny_metadata
        from twinplane.control_plane.text.gguf_tokenizer import build_tokenizer

        _TINY.append(build_tokenizer(tiny_metadata()))
    return _TINY[0]


def test_special_tokens_are_hidden_only_on_request_and_added_words_never(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><tool>b")
    assert EOS in ids
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|><tool>b"


def test_B15_a_continuation_keeps_its_first_space_and_a_text_loses_it() -> None:
    hello, world = SP.token_to_id("▁Hello"), SP.token_to_id("▁world")
    assert SP_TABLE.decode([hello, world]) == SP.decode([hello, world]) == "Hello world"
    assert stream(SP_TABLE, [world], prompt=[hello]) == [" world", ""]
    assert stream(SP_TABLE, [hello, world], prompt=[1]) == ["Hello", " world", ""]  # nothing but <s> before


@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.lists(st.integers(0, 10), max_size=20))
def test_B15_deltas_equal_the_decoded_whole_without_the_decoded_prompt(prompt: list[int], output: list[int]) -> None:
    whole, before = SP.decode(prompt + output), SP.decode(prompt)
    assert "".join(stream(SP_TABLE, output, prompt)) == whole.removeprefix(before)


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="▁"), min_size=1, max_size=12))
def test_B15_characters_outside_the_vocabulary_come_through_as_bytes(text: str) -> None:
    ids = [SP.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(stream(SP_TABLE, ids)) == text
    assert SP_TABLE.decode([1, SP.token_to_id("!"), *ids]) == SP.decode([1, SP.token_to_id("!"), *ids]) == "!" + text


def test_metaspace_and_strip_free_decoders_are_read() -> None:
    metaspace = FastTokenizer(models.BPE({"▁Hi": 0, "▁you": 1}, []))
    metaspace.decoder = decoders.Metaspace(prepend_scheme="first")
    assert TokenBytes.of(metaspace).decode([0, 1]) == metaspace.decode([0, 1]) == "Hi you"
    gemma = sentencepiece(strip=False)
    assert TokenBytes.of(gemma).decode([4, 5]) == gemma.decode([4, 5]) == " Hello world"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    wordpiece = FastTokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizerError, match="WordPiece"):
        TokenBytes.of(wordpiece)


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([10**6, *tokenizer.encode("x"), 500]) == "x"


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    """Even bytes that never become a character, which windowed decoders go over again and again."""
    stray = tokenizer.encode("é")[-1]
    detokenizer = tokenizer.detokenizer()
    start = time.perf_counter()
    for _ in range(200_000):
        detokenizer.push((stray,))
    assert time.perf_counter() - start < 30  # quadratic work would take hours

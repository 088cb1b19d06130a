"""Tokenizers from GGUF files and Hugging Face folders, against independent references."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from front_support import CHATML, EOS, demo_model, sentencepiece_metadata, serving, tiny_metadata, tiny_model, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from twinplane.client import AsyncClient, Chat
from twinplane.control_plane.text.chat import Conversation
from twinplane.control_plane.text.detokenizer import TokenBytes, UnsupportedTokenizerError
from twinplane.control_plane.text.gguf_tokenizer import build_tokenizer
from twinplane.control_plane.text.tokenizer import INLINE_CHARACTERS, Tokenizer, TokenizerError, load_tokenizer
from twinplane.shared.gguf_file import read_gguf

SAMPLES = [
    "Hello world",
    "a 1 b 23\n456 \n 7\t890 x1y22z",
    "1234567890 3.14159 0x1F 2026-11-29",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A: pass",
    "👋🏽 👨‍👩‍👧 🇫🇷 émigré naïve 日本語 שלום ß \u200b\u00a0",
    "It's we've I'LL don't  'quoted'",
    "   leading and trailing   ",
    "\r\n\r\n\t \x00 \ufeff",
    "",
    "<|im_start|>user\nHi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def reference() -> FastTokenizer:
    """SmolLM's rules written down independently: single digits, then GPT-2's byte-level BPE."""
    path = demo_model()
    if path is None:
        pytest.skip("the demo model is not installed")
    metadata = read_gguf(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = FastTokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:17])
    return tokenizer


@pytest.mark.model
@pytest.mark.parametrize("text", SAMPLES)
def test_the_demo_models_ids_equal_the_reference(demo_tokenizer: Tokenizer, reference: FastTokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@given(st.text(max_size=60))
def test_the_demo_models_ids_equal_the_reference_on_any_text(demo_tokenizer: Tokenizer, reference: FastTokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert demo_tokenizer.decode(ids) == reference.decode(ids)  # not always `text`: this vocabulary lacks some control characters


@pytest.mark.model
def test_known_ids_of_the_demo_model(demo_tokenizer: Tokenizer) -> None:
    """Facts of the vocabulary: digits stand alone, and a space before one is a token of its own."""
    pieces = lambda text: [demo_tokenizer.bytes.pieces[i] for i in demo_tokenizer.encode(text)]  # noqa: E731
    assert pieces("year 2026\n 12") == [b"year", b" ", b"2", b"0", b"2", b"6", b"\n ", b"1", b"2"]
    assert demo_tokenizer.encode("<|im_start|>") == [1]
    assert demo_tokenizer.vocab_size == 49152


@pytest.mark.model
def test_the_demo_models_chat_equals_transformers(demo_tokenizer: Tokenizer, reference: FastTokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    path = demo_model()
    assert path is not None
    template = read_gguf(path).metadata["tokenizer.chat_template"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=reference, chat_template=template)
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "👍"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert demo_tokenizer.encode_chat(Conversation(messages)) == expected


# ---------------------------------------------------------------------------- families, against transformers' own


MERGES = ["1 2", "12 3", "123 4", "Ġ a", "a b", "ab c", "' s", "' S", "Ġ Ġ", "Ċ Ċ", "! Ċ", "Ġ 1", "Ã ©", "e Ì", "e s"]
TRICKY = "123 1234 12345 ab abc  abc!\n\nabc's ABC'S it's\r\n e\u0301 é １２３ a1b22c333 _x_ \t x\u00a0y"


def family_metadata(pre: str) -> dict[str, Any]:
    """A vocabulary with merges that make every rule of cutting visible."""
    tokens: list[str] = [*tiny_metadata()["tokenizer.ggml.tokens"][:259], *(merge.replace(" ", "") for merge in MERGES)]  # type: ignore[index]
    return tiny_metadata(pre=pre, tokens=tokens, merges=MERGES, token_type=[3] * 3 + [1] * (len(tokens) - 3))


def of_transformers(pre: str) -> Any:
    """The tokenizer transformers builds for the family from the same vocabulary and merges."""
    import transformers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    metadata = family_metadata(pre)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    if pre == "llama-bpe":
        backend = FastTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
        pattern = TikTokenConverter(vocab_file="").pattern
        from tokenizers import Regex

        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        return lambda text: backend.encode(text).ids
    kind = {"qwen2": transformers.Qwen2Tokenizer, "gpt-2": transformers.GPT2Tokenizer}[pre]
    return kind(vocab=vocabulary, merges=merges).backend_tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
@given(text=st.one_of(st.just(TRICKY), st.text(max_size=40), st.text("12 ab'sS\n\r!é\u0301_", max_size=30)))
def test_each_familys_cutting_equals_what_transformers_has_for_it(pre: str, text: str) -> None:
    if pre not in _PAIRS:
        theirs = of_transformers(pre)
        _PAIRS[pre] = (build_tokenizer(family_metadata(pre)), theirs if pre == "llama-bpe" else lambda text: theirs.encode(text).ids)
    ours, theirs_ids = _PAIRS[pre]
    assert ours.encode(text, add_special_tokens=False).ids == theirs_ids(text)


_PAIRS: dict[str, Any] = {}


def test_families_really_differ_on_the_tricky_text() -> None:
    ids = {pre: tuple(build_tokenizer(family_metadata(pre)).encode(TRICKY, add_special_tokens=False).ids) for pre in KNOWN}
    assert len(set(ids.values())) == len(ids)


KNOWN = ("gpt-2", "smollm", "llama-bpe", "qwen2")


@pytest.mark.parametrize("pre", ["viking", "default", None])
def test_an_unknown_rule_is_refused_by_name_with_the_known_ones_and_the_remedy(pre: str | None) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=rf"{pre!r}.*gpt-2, smollm, llama-bpe, qwen2.*--tokenizer"):
        build_tokenizer(tiny_metadata(pre=pre))
    with pytest.raises(UnsupportedTokenizerError, match="'t5'"):
        build_tokenizer(tiny_metadata(model="t5"))


# ----------------------------------------------------------------------------------------------- SentencePiece


def by_definition(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE as its paper has it: merge the adjacent pair whose union scores highest, the leftmost of equals."""
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = {token: (score, index) for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)) if kind == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [(pieces[a + b][0], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([pieces[part][1]] if part in pieces else [tokens.index(f"<0x{b:02X}>") for b in part.encode()])]


@given(st.text(st.sampled_from("theab-  é\n世👋1"), max_size=40))
def test_sentencepiece_ids_equal_the_definition_and_decode_to_the_text(text: str) -> None:
    if "sp" not in _PAIRS:
        _PAIRS["sp"] = build_tokenizer(sentencepiece_metadata()), sentencepiece_metadata()
    ours, metadata = _PAIRS["sp"]
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == by_definition(metadata, text)
    assert ours.decode(ids) == TokenBytes.of(ours).decode(ids) == text


def test_sentencepiece_adds_bos_unless_the_file_says_no_and_parses_control_and_user_tokens() -> None:
    ids = lambda text, **changes: build_tokenizer(sentencepiece_metadata(**changes)).encode(text).ids  # noqa: E731
    assert ids("the")[0] == 2
    assert ids("the", add_bos_token=False)[0] != 2
    tool = sentencepiece_metadata()["tokenizer.ggml.tokens"].index("<tool>")  # type: ignore[attr-defined]
    assert ids("a<|im_end|><tool>", add_bos_token=False)[-2:] == [3, tool]
    spaces = [build_tokenizer(sentencepiece_metadata(add_space_prefix=on, add_bos_token=False)).encode("a").tokens for on in (True, False)]
    assert spaces == [["▁a"], ["a"]]


@pytest.mark.parametrize("key", ["precompiled_charsmap", "remove_extra_whitespaces"])
def test_a_normalization_that_is_not_done_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=key):
        build_tokenizer(sentencepiece_metadata(**{key: True}))


# --------------------------------------------------------------------------------------------------- BOS and EOS


def test_E02_bos_is_added_as_the_file_says_and_never_twice() -> None:
    bos = 1
    plain, adding = tiny_tokenizer(), tiny_tokenizer(add_bos_token=True, add_eos_token=True)
    assert plain.encode("x") == adding.encode("x", add_special_tokens=False) == plain.encode("x", add_special_tokens=False)
    assert adding.encode("x") == [bos, *plain.encode("x"), EOS]
    assert adding.encode("<|im_start|>x") == [bos, *plain.encode("x"), EOS]
    assert adding.encode("<|im_start|><|im_start|>x") == [bos, bos, *plain.encode("x"), EOS]  # two were written
    written_as_text = adding.encode("<|im_start|>x", parse_special_tokens=False)
    assert written_as_text.count(bos) == 1
    assert adding.decode(written_as_text) == "<|im_start|>x"


async def test_E02_every_path_gives_the_same_prompt_and_chat_has_one_bos() -> None:
    tokenizer = tiny_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", add_bos_token=True)
    engine = FakeEngine()
    chat = Chat([{"role": "user", "content": "Hi"}])
    async with serving(engine, tiny_model(tokenizer)) as (target, _), AsyncClient(target) as client:
        by_rpc = [await client.tokenize(chat), await client.tokenize("Hi"), await client.tokenize("Hi", add_special_tokens=False)]
        await client.generate(chat)
        await client.generate("Hi")
        await client.generate("Hi", add_special_tokens=False)
    assert [list(request.prompt_token_ids) for request in engine.requests] == by_rpc
    assert by_rpc[0] == by_rpc[1] == [1, *by_rpc[2]]


# ------------------------------------------------------------------------------------------------ folders, files


def save_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = build_tokenizer(tiny_metadata(add_bos_token=True))
    tokenizer.add_tokens([AddedToken("<extra>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_hugging_face_folder_gives_the_ids_of_auto_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_folder(tmp_path / "model", chat_template=CHATML)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*SAMPLES, "a <extra> b", TRICKY]:
        assert ours.encode(text) == _without_doubled_bos(theirs(text)["input_ids"], text)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.encode_chat(Conversation(messages)) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _without_doubled_bos(ids: list[int], text: str) -> list[int]:
    return ids[1:] if text.startswith("<|im_start|>") else ids


def test_E01_templates_are_found_in_their_own_file_and_a_given_one_goes_first(tmp_path: Path) -> None:
    messages = Conversation([{"role": "user", "content": "Hi"}])
    folder = save_folder(tmp_path / "model")
    assert not load_tokenizer(folder).has_chat_template
    (folder / "chat_template.jinja").write_text("file:{{ messages[0].content }}")
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode_chat(messages)) == "file:Hi"
    given_file = tmp_path / "given.jinja"
    given_file.write_text("given:{{ messages[0].content }}")
    given_tokenizer = load_tokenizer(folder, chat_template=given_file)
    assert given_tokenizer.decode(given_tokenizer.encode_chat(messages)) == "given:Hi"


def test_a_template_of_its_own_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load_tokenizer(save_folder(tmp_path / "model", chat_template=templates))
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(Conversation(messages))) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(Conversation(messages, tools=[{}]))) == "tools"


def test_what_can_not_be_loaded_is_an_error_naming_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    for source in (broken, tmp_path / "absent", tmp_path / "absent.gguf"):
        with pytest.raises(TokenizerError, match=source.name):
            load_tokenizer(source)


# ------------------------------------------------------------------------------------------------------ large inputs


async def test_B18_tokenizing_a_large_legal_prompt_does_not_hold_up_the_loop(demo_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(max_model_len=2_000_000)
    text = "Hello 12 world, don't stop. " * 40_000  # 1.1 M characters
    async with serving(engine, tiny_model(demo_tokenizer)) as (target, _), AsyncClient(target) as client, AsyncClient(target) as probe:
        counting = asyncio.create_task(client.tokenize(text))
        gaps = []
        while not counting.done():
            start = time.perf_counter()
            await probe.load()
            gaps.append(time.perf_counter() - start)
        assert len(await counting) > 200_000
    assert len(gaps) > 10  # the loop went on meanwhile
    assert max(gaps) < 5.0
    assert len(text) > INLINE_CHARACTERS


async def test_B18_a_text_that_can_not_fit_is_refused_without_tokenizing(address: str, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    from twinplane.client import TwinplaneError

    async with AsyncClient(address) as client:
        for prompt in ("x" * 50_000_000, Chat([{"role": "user", "content": "x" * 50_000_000}])):
            with pytest.raises(TwinplaneError, match="bytes; more than"):
                await client.generate(prompt, timeout=60)
    assert engine.requests == []


async def test_tokenize_and_detokenize_are_inverse_and_tell_bytes(address: str) -> None:
    import grpc
    from twinplane.v1 import tokenizer_pb2, tokenizer_pb2_grpc

    text = "Ünï 12 👋 the<|im_end|>"
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        ids = await client.tokenize(text)
        assert await client.detokenize(ids, skip_special_tokens=False) == text
        assert await client.detokenize(ids) == text.removesuffix("<|im_end|>")
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        response = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=text, return_pieces=True))
    assert b"".join(response.pieces) == text.encode()
    assert response.max_model_len == 2048


async def test_detokenizing_ids_outside_the_vocabulary_is_refused(client: AsyncClient) -> None:
    from twinplane.client import TwinplaneError

    for ids in ([512], [2**32 - 1]):
        with pytest.raises(TwinplaneError, match="vocabulary ends at 511"):
            await client.detokenize(ids)
    with pytest.raises(TwinplaneError, match="at most 1048576"):
        await client.detokenize([1] * (2**20 + 1))
    assert await client.detokenize([]) == ""

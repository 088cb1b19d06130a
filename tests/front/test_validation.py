"""Every field of a request: what is allowed, what it becomes, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from front_support import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from twinplane.control_plane.text.model import ServedModel, read_generation_config
from twinplane.control_plane.types import EarlyStopping, EngineError, InvalidRequestError, PromptTooLongError, SamplingParams
from twinplane.control_plane.validation import (
    RANGES,
    ModelLimits,
    SamplingInput,
    StopInput,
    check_beams,
    check_cache_salt,
    check_length,
    check_prompt_ids,
    check_request_id,
    check_room,
    check_streamable,
    check_tenant,
    default_sampling,
    describe_defaults,
    resolve_sampling,
    resolve_stop,
    truncate_prompt,
)
from twinplane.shared.model_files import ModelCard, ModelFileError

LIMITS = ModelLimits(max_model_len=100, vocab_size=512)


def sampling(**asked: Any) -> SamplingParams:
    return resolve_sampling(SamplingInput(**asked), SamplingParams(), LIMITS)


def refusal(work: Callable[[], object], kind: type[EngineError] = InvalidRequestError) -> EngineError:
    with pytest.raises(kind) as caught:
        work()
    assert caught.value.field is not None
    return caught.value


def test_nothing_asked_gives_the_defaults() -> None:
    assert sampling() == SamplingParams()
    stop = resolve_stop(StopInput(), LIMITS)
    assert (stop.max_tokens, stop.min_tokens, stop.stop_strings, stop.stop_token_ids) == (None, 0, (), ())


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 0.00199])
def test_B03_very_small_temperatures_are_greedy(temperature: float) -> None:
    assert sampling(temperature=temperature).temperature == 0.0
    assert sampling(temperature=0.01).temperature == 0.01


def test_B04_edges_of_top_k_and_top_p() -> None:
    for off in (-1, 0, 512, 513, 10**7):
        assert sampling(top_k=off).top_k == 0
    assert sampling(top_k=1).top_k == 1
    assert sampling(top_k=511).top_k == 511
    assert refusal(lambda: sampling(top_k=-2)).field == "sampling.top_k"
    only_the_best = sampling(top_p=0)
    assert (only_the_best.top_k, only_the_best.top_p) == (1, 1.0)
    assert sampling(top_p=1e-4).top_p == 1e-4
    for bad in (1.0000001, 2, -0.1):
        assert refusal(lambda bad=bad: sampling(top_p=bad)).field == "sampling.top_p"
    assert (sampling(min_p=0).min_p, sampling(min_p=1).min_p) == (0, 1)


@pytest.mark.parametrize("name", RANGES)
def test_B06_every_float_has_a_range_and_its_ends_are_allowed(name: str) -> None:
    allowed = RANGES[name]
    for value in (allowed.low, allowed.high, (allowed.low + allowed.high) / 2):
        sampling(**{name: value})
    for value in (allowed.low - 0.1, allowed.high + 0.1, math.nan, math.inf, -math.inf, 1e9, -1e9):
        error = refusal(lambda value=value: sampling(**{name: value}))
        assert error.field == f"sampling.{name}"
        assert f"{value:g}" in error.message
        assert f"from {allowed.low:g} to {allowed.high:g}" in error.message


@pytest.mark.parametrize("name", ["n", "best_of", "beam_width"])
def test_B18_the_number_of_sequences_has_a_range(name: str) -> None:
    for value in (1, 2, 16):
        assert getattr(sampling(**{name: value}), name) == value
    for bad in (0, 17, 10**6):
        error = refusal(lambda bad=bad: sampling(**{name: bad}))
        assert error.field == f"sampling.{name}"
        assert f"{bad}; it must be from 1" in error.message
        assert "to 16" in error.message


def test_best_of_is_n_unless_it_is_more() -> None:
    assert (sampling(n=3).best_of, sampling(n=3, best_of=3).best_of, sampling(n=3, best_of=5).num_sequences) == (3, 3, 5)
    assert refusal(lambda: sampling(n=3, best_of=2)).message == "sampling.best_of is 2; it must be from 3 (sampling.n) to 16"
    assert refusal(lambda: check_streamable(sampling(n=3, best_of=4))).field == "sampling.best_of"
    check_streamable(sampling(n=3, best_of=3))
    check_streamable(sampling(beam_width=4))


def test_a_beam_search_takes_no_defaults_of_sampling_and_returns_all_hypotheses_or_n() -> None:
    defaults = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    beams = resolve_sampling(SamplingInput(beam_width=4, logit_bias={5: 1.0}, length_penalty=0.5), defaults, LIMITS)
    assert (beams.temperature, beams.top_p, beams.repetition_penalty, beams.logit_bias) == (0.0, 1.0, 1.0, {5: 1.0})
    assert (beams.n, beams.num_sequences, beams.length_penalty, beams.early_stopping) == (4, 4, 0.5, EarlyStopping.HEURISTIC)
    assert (sampling(beam_width=4, n=2).n, sampling(beam_width=4, n=2).num_sequences) == (2, 4)
    assert sampling(beam_width=4, temperature=0, top_p=1, top_k=0, repetition_penalty=1, best_of=1, seed=5).beam_width == 4
    assert "at most sampling.beam_width, which is 4" in refusal(lambda: sampling(beam_width=4, n=5)).message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.0), ("temperature", math.nan), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1), ("repetition_penalty", 1.1),
        ("presence_penalty", -1), ("frequency_penalty", 1), ("best_of", 2), ("length_penalty", 11), ("length_penalty", math.nan),
    ],
)  # fmt: skip
def test_what_contradicts_a_beam_search_is_refused_by_name(name: str, value: float) -> None:
    assert refusal(lambda: sampling(beam_width=2, **{name: value})).field == f"sampling.{name}"


@pytest.mark.parametrize("asked", [{"length_penalty": 1.0}, {"early_stopping": EarlyStopping.NEVER}])
def test_what_belongs_to_beam_search_needs_one(asked: dict[str, Any]) -> None:
    assert refusal(lambda: sampling(**asked)).field == f"sampling.{next(iter(asked))}"
    assert refusal(lambda: sampling(beam_width=1, **asked)).field == f"sampling.{next(iter(asked))}"
    sampling(beam_width=2, **asked)


def test_stop_strings_and_logprobs_are_not_for_beams() -> None:
    beams, plain = sampling(beam_width=2), sampling()
    stops, none = resolve_stop(StopInput(stop_strings=["x"]), LIMITS), resolve_stop(StopInput(), LIMITS)
    assert refusal(lambda: check_beams(beams, stops, logprobs=False)).field == "stop.stop_strings"
    assert refusal(lambda: check_beams(beams, none, logprobs=True)).field == "output.logprobs"
    check_beams(beams, none, logprobs=False)
    check_beams(plain, stops, logprobs=True)


def test_B08_logit_bias_stays_inside_the_vocabulary_and_its_range() -> None:
    assert sampling(logit_bias={511: 100.0, 0: -100.0}).logit_bias == {0: -100.0, 511: 100.0}
    for bias, words in (
        ({512: 1.0}, "vocabulary ends at 511"),
        ({2**32 - 1: 1.0}, "vocabulary"),
        ({1: 1000.0}, "from -100 to 100"),
        ({1: math.nan}, "nan"),
        (dict.fromkeys(range(1025), 0.0), "at most 1024"),
    ):
        error = refusal(lambda bias=bias: sampling(logit_bias=bias))
        assert words in error.message
        assert error.field is not None
        assert error.field.startswith("sampling.logit_bias")


def test_allowed_tokens_are_distinct_and_inside_the_vocabulary() -> None:
    assert sampling(allowed_token_ids=[5, 4, 5]).allowed_token_ids == (5, 4)
    assert refusal(lambda: sampling(allowed_token_ids=[512])).field == "sampling.allowed_token_ids"
    assert "1025" in refusal(lambda: sampling(allowed_token_ids=[1] * 1025)).message


def test_seeds_are_unsigned_64_bit() -> None:
    assert sampling(seed=2**64 - 1).seed == 2**64 - 1
    for bad in (-1, 2**64):
        assert refusal(lambda bad=bad: sampling(seed=bad)).field == "sampling.seed"


@pytest.mark.parametrize(
    ("max_tokens", "fits"), [(None, True), (0, False), (1, True), (90, True), (91, False), (10**6, False), (-1, False)]
)
def test_A21_max_tokens_from_nothing_to_a_million(max_tokens: int | None, fits: bool) -> None:
    def work() -> None:
        check_room(10, resolve_stop(StopInput(max_tokens=max_tokens), LIMITS), LIMITS)

    if fits:
        work()
    else:
        error = refusal(work)
        assert error.field == "stop.max_tokens"
        assert str(max_tokens) in error.message
        if max_tokens is not None and max_tokens > 1:
            assert "only 90 fit" in error.message
            assert "100" in error.message


@pytest.mark.parametrize(("excess", "fits"), [(-2, True), (-1, True), (0, False), (1, False), (100, False)])
def test_A22_a_prompt_must_leave_room_for_one_token(excess: int, fits: bool) -> None:
    length = LIMITS.max_model_len + excess
    if fits:
        check_length(length, LIMITS, field="text")
    else:
        error = refusal(lambda: check_length(length, LIMITS, field="text"), PromptTooLongError)
        assert error.field == "text"
        assert f"{length} tokens" in error.message
        assert error.metadata == {"prompt_tokens": str(length), "max_model_len": "100"}


def test_A23_an_empty_prompt_is_refused() -> None:
    assert refusal(lambda: check_length(0, LIMITS, field="text")).field == "text"


def test_B09_min_tokens_must_fit_max_tokens_and_the_context() -> None:
    assert resolve_stop(StopInput(min_tokens=4, max_tokens=4), LIMITS).min_tokens == 4
    assert refusal(lambda: resolve_stop(StopInput(min_tokens=5, max_tokens=4), LIMITS)).field == "stop.min_tokens"
    unbounded = resolve_stop(StopInput(min_tokens=91), LIMITS)
    assert refusal(lambda: check_room(10, unbounded, LIMITS)).field == "stop.min_tokens"


def test_B06_stop_strings_have_a_number_and_a_length() -> None:
    assert resolve_stop(StopInput(stop_strings=["a", "b", "a"]), LIMITS).stop_strings == ("a", "b")
    resolve_stop(StopInput(stop_strings=[str(index) for index in range(32)]), LIMITS)
    resolve_stop(StopInput(stop_strings=["x" * 256]), LIMITS)
    for bad, words in ((["x"] * 33, "at most 32"), (["ok", ""], "[1]"), (["x" * 257], "257")):
        assert words in refusal(lambda bad=bad: resolve_stop(StopInput(stop_strings=bad), LIMITS)).message
    assert refusal(lambda: resolve_stop(StopInput(stop_token_ids=[512]), LIMITS)).field == "stop.stop_token_ids"
    assert "at most 64" in refusal(lambda: resolve_stop(StopInput(stop_token_ids=[1] * 65), LIMITS)).message


def test_prompt_ids_outside_the_vocabulary_are_named_by_place() -> None:
    check_prompt_ids([0, 511], LIMITS)
    error = refusal(lambda: check_prompt_ids([0, 512, 600], LIMITS))
    assert (error.field, "512" in error.message) == ("tokens.ids[1]", True)


@given(st.lists(st.integers(0, 511)), st.integers(1, 30))
def test_truncation_keeps_the_last_tokens(ids: list[int], keep: int) -> None:
    kept = truncate_prompt(ids, keep)
    assert list(kept) == ids[max(0, len(ids) - keep) :]
    assert truncate_prompt(ids, None) == ids
    assert refusal(lambda: truncate_prompt(ids, 0)).field == "truncate_prompt_tokens"


@given(st.text(max_size=140))
def test_D13_ids_are_short_printable_ascii(text: str) -> None:
    good = 1 <= len(text) <= 128 and all("!" <= character <= "~" for character in text)
    if good:
        assert check_request_id(text) == text
    else:
        assert refusal(lambda: check_request_id(text)).field == "request_id"


def test_D10_control_characters_are_refused_where_a_name_is_expected() -> None:
    for bad in ("a\0b", "a\nb", "é", "a b"):
        assert refusal(lambda bad=bad: check_cache_salt(bad)).field == "cache_salt"
    assert check_cache_salt("") == ""
    assert check_cache_salt("tenant-1") == "tenant-1"
    assert "257" in refusal(lambda: check_cache_salt("x" * 257)).message
    assert check_tenant("") == "" and check_tenant("team-a") == "team-a"
    assert refusal(lambda: check_tenant("a b")).field == "x-twinplane-tenant"
    assert "65" in refusal(lambda: check_tenant("x" * 65)).message


# ------------------------------------------------------------------------------------------- defaults (E03)

FILE = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05, "eos_token_id": [1, 2], "max_length": 20, "do_sample": False}


def test_E03_request_goes_before_flag_before_file_before_built_in() -> None:
    defaults = default_sampling(FILE, {"temperature": 0.7, "top_p": None})
    assert describe_defaults(defaults) == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    asked = resolve_sampling(SamplingInput(temperature=1.5), defaults, LIMITS)
    assert (asked.temperature, asked.top_k) == (1.5, 1)
    everything = resolve_sampling(SamplingInput(temperature=1.5, top_k=0, repetition_penalty=1), defaults, LIMITS)
    assert (everything.temperature, everything.top_k, everything.repetition_penalty) == (1.5, 0, 1)
    assert default_sampling() == SamplingParams()


@pytest.mark.parametrize("value", ["hot", True, [1], 1000.0])
def test_E03_a_default_that_is_no_number_in_range_is_an_error_at_start(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        default_sampling({"temperature": value})


def test_E03_the_file_is_read_from_the_models_folder_unless_switched_off(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "max_length": 20}')
    card = ModelCard(
        path=tmp_path, format="safetensors", architecture="A", config={}, vocab_size=512, max_model_len=100, eos_token_ids=(2,),
        bos_token_id=None, hidden_size=None, num_layers=None, num_heads=None, num_kv_heads=None, head_dim=None, dtype=None,
    )  # fmt: skip
    assert read_generation_config(card) == {"temperature": 0.25, "max_length": 20}
    tokenizer = tiny_tokenizer()
    model = ServedModel.of(card, tokenizer, name="m", aliases=("n",), sampling_flags={"top_k": 5})
    assert (model.defaults.temperature, model.defaults.top_k, model.eos_token_ids, model.vocab_size) == (0.25, 5, (2,), 512)
    assert ServedModel.of(card, tokenizer, name="m", use_generation_config=False).defaults == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelFileError, match="top_p is 7"):
        ServedModel.of(card, tokenizer, name="m")

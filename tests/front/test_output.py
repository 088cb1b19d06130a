"""One sequence's output: where it ends, and that ids, text and counts agree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from front_support import EOS
from hypothesis import given
from hypothesis import strategies as st
from twinplane.control_plane.text.output import OutputOptions, Piece, SequenceOutput
from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.control_plane.types import Delta, Finish, FinishReason

LENGTH = Finish(FinishReason.LENGTH)


def deltas_of(ids: Sequence[int], cuts: Sequence[int], finish: Finish | None) -> list[Delta]:
    bounds = [0, *sorted(cuts), len(ids)]
    deltas = [
        Delta(list(ids[a:b]), logprobs=[float(-i) for i in range(a, b)], ranks=list(range(a, b))) for a, b in itertools.pairwise(bounds)
    ]
    deltas[-1].finish = finish
    return deltas


def run(tokenizer: Tokenizer, deltas: list[Delta], options: OutputOptions) -> Piece:
    """All pieces up to the finish, put together."""
    output, total = SequenceOutput(tokenizer, [10], options), Piece([])
    for delta in deltas:
        piece = output.push(delta)
        total.token_ids += piece.token_ids
        total.text += piece.text
        total.logprobs += piece.logprobs
        total.ranks += piece.ranks
        total.finish = piece.finish
        if piece.finish is not None:
            break
    assert output.num_tokens == len(total.token_ids) == len(total.logprobs) == len(total.ranks)
    return total


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [1, 2, 3, 4]])
def test_A25_a_stop_string_inside_a_delta_of_many_tokens_ends_ids_text_and_counts_alike(tokenizer: Tokenizer, cuts: list[int]) -> None:
    ids = tokenizer.encode("uvSTOPxy")
    total = run(tokenizer, deltas_of(ids, cuts, LENGTH), OutputOptions(stop_strings=("STOP",)))
    assert (total.text, total.token_ids, total.finish) == ("uv", ids[:6], Finish(FinishReason.STOP, stop_string="STOP"))
    assert total.ranks == list(range(6))


def test_A25_the_earliest_of_stop_string_eos_and_length_wins(tokenizer: Tokenizer) -> None:
    eos = Finish(FinishReason.STOP, eos_token_id=EOS)
    options = OutputOptions(stop_strings=("z", "<|im_end|>"), skip_special_tokens=False)
    assert run(tokenizer, deltas_of([*tokenizer.encode("uvz"), EOS], [], eos), options).finish == Finish(FinishReason.STOP, stop_string="z")
    ended = run(tokenizer, deltas_of([*tokenizer.encode("uv"), EOS], [], eos), options)
    assert (ended.text, ended.finish, ended.token_ids[-1]) == ("uv", eos, EOS)  # the text of EOS is no text to match
    at_limit = run(tokenizer, deltas_of(tokenizer.encode("uvz"), [], LENGTH), options)
    assert (at_limit.text, at_limit.finish) == ("uv", Finish(FinishReason.STOP, stop_string="z"))


def test_B09_stop_strings_before_min_tokens_are_text_and_after_it_they_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.b.c.d.")
    for min_tokens, text in ((0, "a"), (2, "a"), (3, "a.b"), (5, "a.b.c"), (8, "a.b.c.d"), (9, "a.b.c.d.")):
        total = run(tokenizer, deltas_of(ids, [3], LENGTH), OutputOptions(stop_strings=(".",), min_tokens=min_tokens))
        assert total.text == text, min_tokens
        assert len(total.token_ids) >= min(min_tokens, len(ids))


def test_B10_text_held_back_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    total = run(tokenizer, deltas_of(tokenizer.encode("its own f"), [4], LENGTH), OutputOptions(stop_strings=("own fox",)))
    assert (total.text, total.finish) == ("its own f", LENGTH)


def test_B13_a_stop_inside_a_character_by_length_gives_one_replacement_with_stop_strings_too(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👋")[:-2]
    for stops in ((), ("never",), ("a\ufffd",)):
        assert run(tokenizer, deltas_of(ids, [], LENGTH), OutputOptions(stop_strings=stops)).text == "a\ufffd"


@given(text=st.text(max_size=20), stop=st.text(min_size=1, max_size=3), data=st.data())
def test_B10_streams_do_not_depend_on_how_tokens_are_dealt_into_deltas(
    tokenizer: Tokenizer, text: str, stop: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text, parse_special_tokens=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    options = OutputOptions(stop_strings=(stop,))
    whole, parts = run(tokenizer, deltas_of(ids, [], LENGTH), options), run(tokenizer, deltas_of(ids, cuts, LENGTH), options)
    assert (whole.text, whole.token_ids, whole.finish) == (parts.text, parts.token_ids, parts.finish)
    assert whole.text == text.split(stop, 1)[0]
    assert (whole.finish == LENGTH) == (stop not in text)

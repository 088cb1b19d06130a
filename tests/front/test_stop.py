"""Stop strings, on text alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twinplane.control_plane.text.stop import StopMatch, StopScanner, StopStrings


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None, list[str]]:
    """Text shown, the stop string found, and what was shown after each chunk."""
    scanner, shown, steps = StopScanner(StopStrings(stops)), "", []
    for chunk in chunks:
        released = scanner.push(chunk)
        if isinstance(released, StopMatch):
            return shown + released.text, released.stop, steps
        shown += released
        steps.append(shown)
    return shown + scanner.flush(), None, steps


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the match that ends first; of those, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("abc", max_size=30)


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4), st.lists(letters, max_size=8))
def test_B10_the_result_is_the_first_match_however_the_text_is_cut(stops: list[str], chunks: list[str]) -> None:
    text, stop, steps = run(stops, chunks)
    assert (text, stop) == expected(stops, "".join(chunks))
    for index, shown in enumerate(steps):
        read = "".join(chunks[: index + 1])
        held = read[len(shown) :]
        assert read.startswith(shown)
        # Exactly the longest end of the text that begins a stop string is held back.
        beginnings = [read[len(read) - n :] for n in range(len(read) + 1) if any(s.startswith(read[len(read) - n :]) for s in stops)]
        assert held == max(beginnings, key=len)


@pytest.mark.parametrize(
    ("stops", "chunks", "text", "stop"),
    [
        (["own fox"], ["The quick br", "own f", "ox"], "The quick br", "own fox"),
        (["own fox"], ["The quick br", "own f", "ence"], "The quick brown fence", None),
        (["abc", "bcd"], ["xa", "bc", "d"], "x", "abc"),
        (["bcd", "abcde"], ["abcde"], "a", "bcd"),
        (["c", "abc"], ["zabc"], "z", "abc"),
        (["\nUser:"], ["Yes.\n", "\nUser", ": no"], "Yes.\n", "\nUser:"),
        (["日本", "👋🏽"], ["こんにち日", "曜👋", "🏽!"], "こんにち日曜", "👋🏽"),
        (["aab"], ["aa", "a", "b"], "a", "aab"),
        (["never"], ["ne"], "ne", None),
    ],
)
def test_B10_examples(stops: list[str], chunks: list[str], text: str, stop: str | None) -> None:
    assert run(stops, chunks)[:2] == (text, stop)


def test_before_min_tokens_a_stop_string_is_ordinary_text_and_one_that_ends_later_counts() -> None:
    scanner = StopScanner(StopStrings(["ab"]))
    assert scanner.push("xab", may_stop=False) + scanner.push("y", may_stop=False) == "xaby"
    assert scanner.push("a", may_stop=False) == ""
    assert scanner.push("bc") == StopMatch("", "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])

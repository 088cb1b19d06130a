"""Prompts of the equality tests: 32 token sequences of 1 to 600 tokens cut from a fixed English text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LENGTHS = (
    1,
    2,
    3,
    5,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    63,
    64,
    65,
    79,
    96,
    100,
    127,
    128,
    129,
    160,
    200,
    255,
    256,
    257,
    333,
    400,
    512,
    600,
)
NEW_TOKENS = 64


def text() -> str:
    """The licence: in every checkout, and never edited."""
    return (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


def cut(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """One prompt of each length, from different places of the text's token ids."""
    assert len(ids) > 37 * len(LENGTHS) + max(LENGTHS), len(ids)
    return [tuple(ids[37 * i : 37 * i + length]) for i, length in enumerate(LENGTHS)]

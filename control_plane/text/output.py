"""What one sequence shows: token ids from the engine become text, cut at the first stop.

The earliest of stop string, EOS or stop token, and length wins, also inside a delta of several tokens: ids,
log-probabilities and usage then end with the token that completed the stop, and the text ends before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinplane.control_plane.text.detokenizer import Detokenizer
from twinplane.control_plane.text.stop import StopMatch, StopScanner, StopStrings
from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.control_plane.types import Delta, Finish, FinishReason


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """``text``: detokenize at all. ``min_tokens``: a stop string that is complete before so many tokens is ordinary text."""

    text: bool = True
    skip_special_tokens: bool = True
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class Piece:
    """What may be shown now. ``logprobs`` and ``ranks`` are empty or as long as ``token_ids``."""

    token_ids: list[int]
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: Finish | None = None
    index: int = 0  # of the sequence in its request
    score: float | None = None  # of a beam search's hypothesis, with `finish`


class SequenceOutput:
    """Turns the deltas of one sequence into pieces. After a piece with ``finish``, nothing may be pushed."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], options: OutputOptions) -> None:
        self._options = options
        wanted = options.text or options.stop_strings
        self._detokenizer = tokenizer.detokenizer(prompt_ids, skip_special_tokens=options.skip_special_tokens) if wanted else None
        self._scanner = StopScanner(StopStrings(options.stop_strings)) if options.stop_strings else None
        self.num_tokens = 0
        self.finish: Finish | None = None

    def push(self, delta: Delta) -> Piece:
        piece = Piece(delta.token_ids, "", delta.logprobs, delta.ranks, delta.finish, delta.index, delta.score)
        if self._detokenizer is None:
            self.num_tokens += len(piece.token_ids)
        else:
            self._detokenize(piece, delta, self._detokenizer)
        self.finish = piece.finish
        return piece

    def _detokenize(self, piece: Piece, delta: Delta, detokenizer: Detokenizer) -> None:
        if self._scanner is None:
            self.num_tokens += len(piece.token_ids)
            piece.text = detokenizer.push(self._shown(delta))
        else:
            self._scan(piece, self._scanner, self._shown(delta))
        if piece.finish is not None and piece.finish.stop_string is None:
            piece.text += self._flush()
        if not self._options.text:
            piece.text = ""

    def _shown(self, delta: Delta) -> list[int]:
        """The tokens that have text: not the EOS or stop token that ended the sequence, unless asked for."""
        finish, ids = delta.finish, delta.token_ids
        if finish is None or not ids or self._options.include_stop:
            return ids
        return ids[:-1] if ids[-1] in (finish.eos_token_id, finish.stop_token_id) else ids

    def _scan(self, piece: Piece, scanner: StopScanner, shown: list[int]) -> None:
        """Token by token, so that ids can be cut exactly where a stop string is complete."""
        assert self._detokenizer is not None
        texts = []
        for index, token in enumerate(shown):
            text = self._detokenizer.push((token,))
            count = self.num_tokens + index + 1
            released = scanner.push(text, may_stop=count >= self._options.min_tokens)
            if isinstance(released, StopMatch):
                texts.append(released.text + (released.stop if self._options.include_stop else ""))
                self._cut(piece, index + 1, released.stop)
                break
            texts.append(released)
        self.num_tokens += len(piece.token_ids)
        piece.text = "".join(texts)

    @staticmethod
    def _cut(piece: Piece, length: int, stop: str) -> None:
        piece.token_ids = piece.token_ids[:length]
        piece.logprobs = piece.logprobs[:length]
        piece.ranks = piece.ranks[:length]
        piece.finish = Finish(FinishReason.STOP, stop_string=stop)

    def _flush(self) -> str:
        assert self._detokenizer is not None
        tail = self._detokenizer.flush()
        return (self._scanner.flush() + tail) if self._scanner is not None else tail

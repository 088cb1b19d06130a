"""What ``chat`` and ``generate`` share: generation options, streaming to the terminal, figures, readable errors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twinplane.cli.arguments import new_parser
from twinplane.cli.target import add_address, target_of

if TYPE_CHECKING:
    from twinplane.client import Client, GenerateResult, Prompt

_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "stop after so many tokens"),
    ("temperature", float, "0 takes the most likely token each time"),
    ("top_p", float, "draw from the most likely tokens that hold this share together"),
    ("top_k", int, "draw from so many most likely tokens"),
    ("min_p", float, "drop tokens less likely than this share of the most likely one"),
    ("repetition_penalty", float, "above 1 discourages what was there already"),
    ("presence_penalty", float, "above 0 discourages what was generated already"),
    ("frequency_penalty", float, "above 0 discourages it the more often it came"),
    ("seed", int, "the same seed gives the same answer"),
)
_EARLY_STOPPING = ("heuristic", "first", "never")  # as the client names them

# Of commands that show more than one answer.
_SEVERAL: tuple[tuple[str, type, str], ...] = (
    ("n", int, "so many answers"),
    ("best_of", int, "sample so many and show the --n likeliest"),
    ("beam_width", int, "beam search of this width: the likeliest answers, best first"),
    ("length_penalty", float, "with --beam-width: above 0 favours longer answers, below shorter ones"),
)


def generation_parser(prog: str, description: str, *, several: bool = False) -> argparse.ArgumentParser:
    """``several``: with the options that ask for more than one answer."""
    parser = new_parser(prog, description)
    add_address(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="or on standard input")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long; the server stops too")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the result as one JSON object instead of streaming text")
    output.add_argument("--stats", action="store_true", help="print figures about the answer to standard error")
    sampling = parser.add_argument_group("generation", "What is left out takes the model's default.")
    sampling.add_argument("--model", help="served model name; needed only where a server has several")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text (may be given several times)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on over the model's end-of-sequence tokens")
    for name, kind, help_text in (*_OPTIONS, *(_SEVERAL if several else ())):
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N" if kind is int else "X", help=help_text)
    if several:
        sampling.add_argument(
            "--early-stopping",
            choices=_EARLY_STOPPING,
            help="with --beam-width: when so many complete answers are enough: once the best open one, scored as it is, is no better "
            "(heuristic), at once, or once none can become better (never)",
        )
    return parser


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for the client: only what was given."""
    names = ("model", "stop", "ignore_eos", "early_stopping", *(name for name, _, _ in (*_OPTIONS, *_SEVERAL)))
    given = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def with_client(args: argparse.Namespace, use: Callable[[Client], int]) -> int:
    """Connect, use, and turn a failed call into one sentence on stderr and exit code 1."""
    target = target_of(args)
    from twinplane.client import Client, TwinplaneError

    try:
        with Client(target) as client:
            return use(client)
    except TwinplaneError as error:
        print(explain(error, target), file=sys.stderr)
        return 1


def explain(error: Any, target: str) -> str:
    """A failed call in words: what, why, and what to do about it."""
    if error.code == "UNAVAILABLE" and not error.reason:  # not the server's word but the channel's
        if "connect" in error.message.lower():
            return f"no server answers at {target}: start one with `twinplane serve MODEL`, or name another with --addr"
        return f"{target}: the connection was lost ({error.message})"
    at = f" (field {error.field})" if error.field else ""
    later = f"; try again in {error.retry_delay:g} s" if error.retry_delay else ""
    return f"{target}: {error.message}{at}{later} [{' '.join(filter(None, (error.code, error.reason)))}]"


def answer(client: Client, prompt: Prompt, args: argparse.Namespace) -> GenerateResult:
    """Ask, and show the answer as ``args`` say: text as it comes, or JSON at the end. Ctrl-C stops the answer, not the program."""
    began, first = time.perf_counter(), None
    with client.stream(prompt, timeout=args.timeout, **options_of(args)) as stream:
        try:
            for delta in stream:
                first = first or time.perf_counter()
                if not args.json:
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.cancel()
            raise
        finally:
            if not args.json:
                print(flush=True)
        result = stream.result()
    if args.json:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
    if args.stats:
        print(figures(result, (first or began) - began), file=sys.stderr)
    return result


def answers(client: Client, prompt: Prompt, args: argparse.Namespace) -> GenerateResult:
    """Ask for several answers, and show them one below the other once all are complete, each under its number and score."""
    result = client.generate(prompt, timeout=args.timeout, **options_of(args))
    if args.json:
        print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
    else:
        for sequence in result.sequences:
            score = "" if sequence.score is None else f" (score {sequence.score:.4g})"
            print(f"--- {sequence.index + 1}{score}\n{sequence.text}", flush=True)
    if args.stats:
        print(figures(result, result.timing.time_to_first_token), file=sys.stderr)
    return result


def figures(result: GenerateResult, first_token_s: float) -> str:
    """Speed, latency and cache use in one line. Tokens per second are those of decoding, after the first token."""
    usage, timing = result.usage, result.timing
    rate = (
        f"{(usage.completion_tokens - 1) / timing.decode:.1f} tokens/s" if usage.completion_tokens > 1 and timing.decode > 0 else "one step"
    )
    return (
        f"[{usage.completion_tokens} tokens, {rate}; first token after {first_token_s * 1e3:.0f} ms; "
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} of them cached; {result.finish.reason}]"
    )


def prompt_from(args: argparse.Namespace) -> str | None:
    """The prompt given, or standard input; None if that is a terminal. ``-`` reads standard input too."""
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    if args.prompt is None and sys.stdin.isatty():
        return None
    return sys.stdin.read()

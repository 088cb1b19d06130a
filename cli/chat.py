"""``twinplane chat``: one question and its answer, or a conversation on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from twinplane.cli.generation import answer, explain, generation_parser, prompt_from, with_client
from twinplane.cli.target import target_of

if TYPE_CHECKING:
    from twinplane.client import Client

Messages = list[dict[str, str]]


def parser(prog: str) -> argparse.ArgumentParser:
    description = "Talk to a running server: one question if PROMPT is given, a conversation otherwise (/reset forgets it, Ctrl-D ends it)."
    parser = generation_parser(prog, description)
    parser.add_argument("--system", metavar="TEXT", help="system message the conversation begins with")
    return parser


def run(args: argparse.Namespace) -> int:
    prompt = prompt_from(args)
    opening: Messages = [{"role": "system", "content": args.system}] if args.system else []
    if prompt is not None:
        return with_client(args, lambda client: _ask(client, [*opening, _user(prompt)], args))
    return with_client(args, lambda client: _converse(client, opening, args))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _ask(client: Client, messages: Messages, args: argparse.Namespace) -> int:
    from twinplane.client import Chat

    answer(client, Chat(messages), args)
    return 0


def _converse(client: Client, opening: Messages, args: argparse.Namespace) -> int:
    """Turn by turn until end of input. A refused or interrupted turn is forgotten, and the conversation goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    from twinplane.client import Chat, TwinplaneError

    messages = list(opening)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text == "/reset":
            messages = list(opening)
        elif text:
            turn = [*messages, _user(text)]
            try:
                result = answer(client, Chat(turn), args)
            except TwinplaneError as error:
                print(explain(error, target_of(args)), file=sys.stderr)
            except KeyboardInterrupt:
                print("[stopped; this turn is forgotten]", file=sys.stderr)
            else:
                messages = [*turn, {"role": "assistant", "content": result.text}]

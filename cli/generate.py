"""``twinplane generate``: continue a text on a running server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from twinplane.cli import EXIT_USAGE
from twinplane.cli.generation import answer, answers, generation_parser, prompt_from, with_client

if TYPE_CHECKING:
    from twinplane.client import Client


def parser(prog: str) -> argparse.ArgumentParser:
    return generation_parser(prog, "Continue a text, as it is and without a chat template, on a running server.", several=True)


def run(args: argparse.Namespace) -> int:
    prompt = prompt_from(args)
    if not prompt:
        print("twinplane generate: a PROMPT is needed, as an argument or on standard input", file=sys.stderr)
        return EXIT_USAGE
    return with_client(args, lambda client: _continue(client, prompt, args))


def _continue(client: Client, text: str, args: argparse.Namespace) -> int:
    several = any((count or 1) > 1 for count in (args.n, args.best_of, args.beam_width))
    (answers if several else answer)(client, text, args)
    return 0

"""``twinplane bench``: the quick measurements of :mod:`twinplane.benchmarks` on this machine.

A benchmark is a module there with ``run(...) -> Mapping[str, object]``: figures by name, units in the names. Its parameters that default to
a whole number or a text can be set as ``--name VALUE`` or ``name=VALUE``. If it has ``text(figures) -> str``, that is how they are printed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from twinplane.cli import EXIT_USAGE
from twinplane.cli.arguments import HelpFormatter

BENCHMARKS = {
    "ring": "a message through the shared-memory rings and back, between two processes",
    "tick": "one pass of the scheduler, by number of running sequences",
    "admit": "the pass that admits a crowd of waiting prompts",
    "prefix": "a hit in the prefix cache: exact lookup and pin",
    "kernels": "the kernels the models run on, by shape",
    "sampler": "what a step costs outside the forward pass, by kind of row",
    "quality": "what each number format costs: perplexity, agreement with float32",
    "sharing": "KV memory that beams and samples save by sharing blocks, on the demo model",
    "serving": "tokens per second of a server, beside transformers' continuous batching",
    "interference": "inter-token latency of streams while long prompts arrive",
    "warm": "time to first token behind a long system prompt, cold and cached",
    "soak": "minutes under load with cancels: what grows, what is left",
    "peers": "the same loads on other engines, if they are installed (benchmarks/peers/README.md)",
}


def parser(prog: str) -> argparse.ArgumentParser:
    epilog = "benchmarks:\n" + "\n".join(f"  {name:<13} {what}" for name, what in BENCHMARKS.items())
    parser = _Parser(
        prog=prog,
        description="Measure parts of Twinplane on this machine. Figures are only as good as the machine is idle.",
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME", help="which; see below")
    parser.add_argument("parameters", nargs="*", type=_parameter, metavar="--PARAMETER VALUE", help="parameters of the benchmark")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return parser


class _Parser(argparse.ArgumentParser):
    """Reads ``--some-name N`` as the parameter ``some_name=N``: which there are is known only once the benchmark is imported."""

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        rest = []
        while given:
            argument = given.pop(0)
            flag = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.*))?", argument)
            if flag is None or flag[1] in ("json", "help"):
                rest.append(argument)
                continue
            value = flag[2] if flag[2] is not None else given.pop(0) if given else ""
            rest.append(f"{flag[1].replace('-', '_')}={value}")
        parsed: argparse.Namespace = super().parse_intermixed_args(rest, namespace)
        return parsed


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier() and value):
        raise argparse.ArgumentTypeError(f"expected --name VALUE or name=VALUE, got {text!r}")
    return name, value


def _values(given: Sequence[tuple[str, str]], known: Mapping[str, inspect.Parameter]) -> dict[str, object]:
    """What was given, as the types of the parameters' defaults. Raises ValueError with a sentence for the user."""
    values: dict[str, object] = {}
    for name, value in given:
        if name not in known:
            raise ValueError(f"no parameter {name!r}; it has {', '.join(known)}")
        if isinstance(known[name].default, str):
            values[name] = value
        elif isinstance(known[name].default, int) and value.isdecimal():
            values[name] = int(value)
        else:
            raise ValueError(f"{name} takes a whole number, not {value!r}")
    return values


def run(args: argparse.Namespace) -> int:
    try:
        benchmark = importlib.import_module(f"twinplane.benchmarks.{args.name}")
    except ModuleNotFoundError as error:
        print(f"twinplane bench {args.name}: {error} (pip install 'twinplane[data-plane,test]' brings it)", file=sys.stderr)
        return 1
    try:
        values = _values(args.parameters, inspect.signature(benchmark.run).parameters)
        with _unwound_by_sigterm():
            figures: Mapping[str, object] = benchmark.run(**values)
    except ValueError as error:
        print(f"twinplane bench {args.name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"twinplane bench {args.name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dict(figures)) if args.json else getattr(benchmark, "text", _table)(figures))
    return 0


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception, so that the servers a benchmark started end with it."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _table(figures: Mapping[str, object]) -> str:
    """One line a figure; a list of figures is a table of its own below its name."""
    width = max(map(len, figures), default=0)
    lines = []
    for name, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{name}:", *_rows(value)]
        else:
            lines.append(f"{name:<{width}}  {_text(value)}")
    return "\n".join(lines)


def _rows(records: list[dict[str, object]]) -> list[str]:
    cells = [list(records[0]), *([_text(value) for value in record.values()] for record in records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""``twinplane bench``: the quick measurements of :mod:`twinplane.benchmarks` on this machine.

A benchmark is a module there with ``run() -> Mapping[str, object]``: figures by name, units in the names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping

from twinplane.cli.arguments import new_parser

BENCHMARKS = {
    "ring": "a message through the shared-memory rings and back, between two processes",
    "tick": "one pass of the scheduler, by number of running sequences",
    "kernels": "the kernels the models run on, by shape",
}


def parser(prog: str) -> argparse.ArgumentParser:
    epilog = "benchmarks:\n" + "\n".join(f"  {name:<8} {what}" for name, what in BENCHMARKS.items())
    parser = new_parser(prog, "Measure parts of Twinplane on this machine. Figures are only as good as the machine is idle.", epilog)
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME", help="which; see below")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    try:
        benchmark = importlib.import_module(f"twinplane.benchmarks.{args.name}")
    except ModuleNotFoundError as error:
        print(f"twinplane bench {args.name}: {error} (pip install 'twinplane[data-plane]' brings what the kernels need)", file=sys.stderr)
        return 1
    figures: Mapping[str, object] = benchmark.run()
    print(json.dumps(dict(figures)) if args.json else _table(figures))
    return 0


def _table(figures: Mapping[str, object]) -> str:
    width = max(map(len, figures), default=0)
    return "\n".join(f"{name:<{width}}  {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in figures.items())

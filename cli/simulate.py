"""``twinplane simulate``: the production scheduler on a virtual clock. See docs/simulator.md."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinplane.cli import EXIT_USAGE
from twinplane.cli.arguments import new_parser
from twinplane.control_plane.simulator import FORMATS, SYSTEMS
from twinplane.shared.config import ConfigError, ServeSettings, read
from twinplane.shared.options import Option, flag_of, options_of

if TYPE_CHECKING:
    from twinplane.control_plane.simulator.run import Result, Setup
    from twinplane.control_plane.simulator.traces import Trace

SUITES = {
    "paper": "the figures of arXiv 2309.06180 beside ours",
    "v1": "latency and throughput against a prefill-first scheduler on an H100",
}


def _settings() -> dict[str, Option]:
    """Options of `serve` that matter here: the whole group "scheduler", and a few more."""
    others = ("max_model_len", "block_size", "kv_cache_dtype", "swap_space")
    return {name: option for name, option in options_of(ServeSettings).items() if option.group == "scheduler" or name in others}


def parser(prog: str) -> argparse.ArgumentParser:
    systems = "\n".join(f"  {name:<14} {what}" for name, what in SYSTEMS.items())
    formats = "\n".join(f"  {name:<14} {what}" for name, what in FORMATS.items())
    suites = "\n".join(f"  {name:<14} {what}" for name, what in SUITES.items())
    parser = new_parser(
        prog,
        "Replay a trace against the production scheduler on a virtual clock with a model of a device, and say what users would have seen.",
        f"suites:\n{suites}\n\nsystems:\n{systems}\n\ntrace formats:\n{formats}",
    )
    parser.add_argument("suite", nargs="?", choices=sorted(SUITES), metavar="SUITE", help="a fixed set of simulations instead; see below")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests to replay, plain or .gz")
    parser.add_argument("--format", choices=sorted(FORMATS), metavar="NAME", help="of the trace (found out); see below")
    parser.add_argument("--device", metavar="NAME|FILE.json", help="model of the device; `--device list` names those that come along")
    parser.add_argument(
        "--system",
        action="append",
        choices=sorted(SYSTEMS),
        metavar="NAME",
        help="what to simulate (twinplane); may be given several times, see below",
    )
    parser.add_argument(
        "--rate", type=_positive, metavar="R", help="Poisson arrivals of so many requests a second, instead of the trace's times"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the Poisson arrivals (0)")
    parser.add_argument("--duration", type=_positive, metavar="SECONDS", help="stop the virtual clock there, whatever is unfinished")
    parser.add_argument(
        "--host-us",
        type=_host_points,
        metavar="N:US,...",
        help="time the host takes for a step, by sequences in it (measured values; 0 if the device model includes it)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, on the last line")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latencies and memory (needs the extra `plot`)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="for a suite: folder with the published traces")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of options, as for `serve`")
    group = parser.add_argument_group("scheduler", "As for `serve`. What is given nowhere is what the device model suggests.")
    for name, option in _settings().items():
        text = option.help.replace("%", "%%")
        group.add_argument(flag_of(name), dest=name, metavar=option.kind.metavar, default=argparse.SUPPRESS, help=text)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _host_points(text: str) -> list[tuple[float, float]]:
    try:
        points = [(float(n), float(us)) for n, us in (pair.split(":") for pair in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected SEQUENCES:MICROSECONDS pairs such as 0:10,256:4400, got {text!r}") from None
    if any(not (0 <= us < 1e9) for _, us in points) or any(not a < b for (a, _), (b, _) in itertools.pairwise(points)):
        raise argparse.ArgumentTypeError(f"expected rising numbers of sequences and times from 0, got {text!r}")
    return points


def run(args: argparse.Namespace) -> int:
    if args.suite is None and args.device == "list":
        return _list_devices()
    if args.suite is None and (args.trace is None or args.device is None):
        print("twinplane simulate: needs --trace FILE and --device NAME, or a suite; see twinplane simulate --help", file=sys.stderr)
        return EXIT_USAGE
    if args.suite is not None:
        return _run_suite(args)
    return _run_trace(args)


def _list_devices() -> int:
    from twinplane.control_plane.simulator import devices

    for name in devices.shipped():
        print(f"{name:<16} {devices.load(name).description}")
    return 0


def _run_trace(args: argparse.Namespace) -> int:
    from twinplane.control_plane.simulator import plot, report
    from twinplane.control_plane.simulator.devices import DeviceError
    from twinplane.control_plane.simulator.traces import TraceError, load

    try:
        setup = _setup(args)
        trace = load(args.trace, format=args.format, limit=args.limit, rate=args.rate, seed=args.seed)
        systems: Sequence[str] = args.system or ["twinplane"]
        results = [_simulate(system, trace, setup, args.duration) for system in dict.fromkeys(systems)]
        if args.plot is not None:
            plot.save(results, args.plot)
    except (DeviceError, TraceError, plot.PlotError, ValueError) as error:
        print(f"twinplane simulate: {error}", file=sys.stderr)
        return 1
    figures = {result.system: result.figures() for result in results}
    print(f"{trace.name}: {len(trace):,} requests over {trace.duration_s:,.0f} s on {setup.device.name}")
    print(report.table(figures))
    if args.json:
        print(json.dumps({"trace": trace.name, "device": setup.device.name, "systems": figures}))
    return 0


def _setup(args: argparse.Namespace) -> Setup:
    """Settings from the command line, the environment, the --config file; else the device's suggestions; else the defaults."""
    from twinplane.control_plane.simulator import devices
    from twinplane.control_plane.simulator.run import Setup

    device = devices.load(args.device)
    given: dict[str, object] = {name: getattr(args, name) for name in _settings() if hasattr(args, name)}
    loaded = read(ServeSettings, given, config=args.config, model_required=False)
    suggested, problems = {}, []
    for key, value in device.serve.items():
        name = key.replace("-", "_")
        option = _settings().get(name)
        if option is None:
            problems.append(f"{args.device}: serve.{key}: no such setting")
        elif loaded.origins[name] == "default":
            try:
                suggested[name] = option.parse(value)
            except ValueError as error:
                problems.append(f"{args.device}: serve.{key}: {error}")
    settings = dataclasses.replace(loaded.settings, **suggested)  # type: ignore[arg-type]
    if problems or (problems := settings.problems()):
        raise ConfigError(problems)
    host_us = {} if args.host_us is None else dict.fromkeys(SYSTEMS, args.host_us)
    return Setup(device, settings, host_us)


def _simulate(system: str, trace: Trace, setup: Setup, duration_s: float | None) -> Result:
    from twinplane.control_plane.simulator.run import Window, simulate

    shown = _Progress()
    samples = max(trace.duration_s, 1.0) / 1000
    try:
        return simulate(
            system,
            trace,
            setup,
            Window(stop_at_s=duration_s or 0.0, sample_interval_s=samples),
            progress=lambda done, now_s: shown.line(f"{system}: {done:,} of {len(trace):,} requests, {now_s:,.0f} s"),
        )
    finally:
        shown.clear()


class _Progress:
    """One line on standard error that is written over; nothing where nobody watches."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._width = 0

    def line(self, text: str) -> None:
        if self._is_shown:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            self.line("")
            print("\r", end="", file=sys.stderr, flush=True)


def _run_suite(args: argparse.Namespace) -> int:
    """Exit code 0 also if cells are short: that is a finding, not a failure."""
    import importlib

    from twinplane.control_plane.simulator import cells, report
    from twinplane.control_plane.simulator.traces import TraceError

    groups = importlib.import_module(f"twinplane.control_plane.simulator.{args.suite}").GROUPS
    shown = _Progress()
    started = time.monotonic()
    progress: Callable[[str], object] = lambda name: shown.line(f"{args.suite}: {name}, after {time.monotonic() - started:.0f} s")  # noqa: E731
    try:
        found = list(cells.measure(groups, cells.Data(args.data), progress))
    except TraceError as error:
        print(f"twinplane simulate: {error}", file=sys.stderr)
        return 1
    finally:
        shown.clear()
    print(report.cell_table(found))
    if args.json:
        content: dict[str, Any] = {"suite": args.suite, "cells": [cell.as_json() for cell in found]}
        print(json.dumps(content))
    return 0

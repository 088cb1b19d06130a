"""Twinplane beside other engines: the same weights, the same workloads, the same number of threads. See README.md in this folder.

``twinplane bench peers --engines twinplane,llama.cpp --workloads W1,W2 --rounds 3`` alternates the engines within each round of each
workload, because a shared machine drifts, and starts each afresh for each measurement, so that no cache is filled by an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..workloads import WORKLOADS, Figures, Workload
from .engines import Connection, Engine, Missing, Setting, choose, default_directory, usable_threads
from .processes import tail
from .report import COLUMNS, Measurement, medians, plot, table


def run(
    engines: str = "twinplane,llama.cpp,openvino,vllm",
    workloads: str = "W1,W2,W3,W4,W5",
    rounds: int = 3,
    threads: int = 0,
    directory: str = "",
    output: str = "",
) -> dict[str, object]:
    """Compare ``engines`` (names or families, by commas) on ``workloads``; ``threads`` 0 means all that this process may use.

    Engines that can not be run are skipped with the reason. ``directory`` is where they were installed. Into ``output`` go
    ``results.json``, after every measurement, ``table.md`` and ``plots.png``. Raises ValueError for names that do not exist.
    """
    setting = Setting(Path(directory or default_directory()).expanduser().absolute(), threads or usable_threads())
    chosen = [_workload(name) for name in workloads.split(",")]
    present, skipped = _prepare(choose(engines.split(",")), setting)
    target = Path(output).expanduser() if output else None
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {
        "machine": {**_machine(), "threads": setting.threads},
        "rounds": rounds,
        "engines": {engine.name: version for engine, version in present.items()},
        "skipped": skipped,
    }
    measurements: list[Measurement] = []
    for index in range(1, rounds + 1):
        for workload in chosen:
            for engine in present:
                measurements.append(_measure(engine, workload, setting, index))
                _progress(f"round {index}/{rounds} {workload.name} {engine.name}: {_in_short(measurements[-1])}")
                results |= {"medians": medians(measurements), "measurements": [one.as_json() for one in measurements]}
                if target is not None:
                    (target / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    results["table"] = table(measurements) if measurements else ""
    if target is not None:
        _write_report(target, results, measurements)
    return results


def text(results: Mapping[str, object]) -> str:
    """The results for people: the table, and who is missing from it."""
    lines = [str(results["table"])]
    skipped = results["skipped"]
    assert isinstance(skipped, dict)
    lines += [f"{name} was skipped: {reason}" for name, reason in skipped.items()]
    return "\n".join(line for line in lines if line)


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _prepare(engines: Sequence[Engine], setting: Setting) -> tuple[dict[Engine, str], dict[str, str]]:
    """Versions of the engines that are there, and why the others are not."""
    present: dict[Engine, str] = {}
    skipped: dict[str, str] = {}
    for engine in engines:
        _progress(f"preparing {engine.name}")
        try:
            present[engine] = engine.prepare(setting)
        except Missing as reason:
            skipped[engine.name] = str(reason)
            _progress(f"{engine.name} is skipped: {reason}")
    return present, skipped


def _measure(engine: Engine, workload: Workload, setting: Setting, index: int) -> Measurement:
    """Start, measure, stop. A failure is a result too, with the end of the server's log in the message."""
    measurement = Measurement(engine.name, engine.precision, workload.name, index)
    start = time.perf_counter()
    with TemporaryDirectory(prefix="twinplane-peers-") as folder:
        log = Path(folder) / "server.log"
        try:
            with engine.serve(workload.name, setting, log) as connection:
                measurement.figures = asyncio.run(_drive(connection, workload))
        except (RuntimeError, OSError, AssertionError) as error:
            measurement.error = f"{type(error).__name__}: {error}"
            if log.exists():
                print("".join(f"    {line[:400]}\n" for line in tail(log, 15).splitlines()), file=sys.stderr)
    measurement.wall_s = round(time.perf_counter() - start, 1)
    return measurement


async def _drive(connection: Connection, workload: Workload) -> Figures:
    async with connection as generate:
        return await workload.run(generate)


def _in_short(measurement: Measurement) -> str:
    """A measurement in a line of progress."""
    if measurement.error:
        return f"failed: {measurement.error.splitlines()[0]}"
    cells = [f"{column.title[3:]} {column.cell(measurement.figures)}" for column in COLUMNS if column.workload == measurement.workload]
    return f"{', '.join(cells)} ({measurement.wall_s:.0f} s)"


def _write_report(target: Path, results: Mapping[str, object], measurements: Sequence[Measurement]) -> None:
    (target / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (target / "table.md").write_text(text(results) + "\n")
    try:
        plot(measurements, target / "plots.png")
    except ImportError:
        _progress("no plots: pip install 'twinplane[plot]' brings matplotlib")
    _progress(f"written to {target}")


def _machine() -> dict[str, object]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in fields.items()}
    flags = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16"}
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "instruction_sets": sorted(flags & set(cpu.get("flags", "").split())),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _progress(line: str) -> None:
    print(f"[peers {time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)

"""``twinplane bench``: figures in, table or JSON out."""

from __future__ import annotations

import json
import signal
import sys
import types
from importlib.util import find_spec

import pytest
from twinplane.cli.bench import BENCHMARKS
from twinplane.cli.main import main


@pytest.fixture
def tick(monkeypatch):
    """A stand-in for a benchmark, so that these tests measure nothing."""
    module = types.ModuleType("twinplane.benchmarks.tick")
    module.run = lambda running=64, ticks=10: {"running": running, "p50_us": 1.23456, "ticks": ticks}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_figures_are_printed_as_a_table(tick, capsys):
    assert main(["bench", "tick"]) == 0
    assert capsys.readouterr().out.splitlines() == ["running  64", "p50_us   1.235", "ticks    10"]


def test_parameters_reach_the_benchmark_and_json_is_one_object(tick, capsys):
    assert main(["bench", "tick", "--json", "running=256", "ticks=5"]) == 0
    assert json.loads(capsys.readouterr().out) == {"running": 256, "p50_us": 1.23456, "ticks": 5}


@pytest.mark.parametrize("arguments", [["--running", "256", "--ticks=5"], ["--ticks", "5", "running=256"]])
def test_parameters_may_be_flags(tick, capsys, arguments):
    assert main(["bench", "tick", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"running": 256, "p50_us": 1.23456, "ticks": 5}


def test_an_unknown_parameter_is_answered_with_those_there_are(tick, capsys):
    assert main(["bench", "tick", "runing=1"]) == 2
    assert "it has running, ticks" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["tick", "running=many"], ["tick", "--running", "x"]])
def test_a_number_must_be_one(tick, capsys, arguments):
    assert main(["bench", *arguments]) == 2
    assert "running takes a whole number, not" in capsys.readouterr().err


def test_a_benchmark_may_take_texts_and_print_itself(tick, capsys):
    tick.run = lambda engines="all", rounds=3: {"engines": engines, "rounds": rounds}
    tick.text = lambda figures: f"{figures['rounds']} rounds of {figures['engines']}"
    assert main(["bench", "tick", "--engines", "a,b", "--rounds=2"]) == 0
    assert capsys.readouterr().out == "2 rounds of a,b\n"
    assert main(["bench", "tick", "--engines", "a,b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"engines": "a,b", "rounds": 3}


@pytest.mark.parametrize("arguments", [["nonsense"], ["tick", "running"], ["tick", "--running"]])
def test_nonsense_is_a_usage_error(arguments):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2


def test_sigterm_lets_a_benchmark_end_what_it_started(tick):
    ended, before = [], signal.getsignal(signal.SIGTERM)

    def run():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append("server")

    tick.run = run
    with pytest.raises(SystemExit, match="143"):
        main(["bench", "tick"])
    assert ended == ["server"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_benchmark_that_can_not_run_says_why(tick, capsys):
    def run():
        raise FileNotFoundError("tick_bench is missing")

    tick.run = run
    assert main(["bench", "tick"]) == 1
    assert "tick_bench is missing" in capsys.readouterr().err


def test_the_ring_is_really_measured(capsys):
    assert main(["bench", "ring", "--json", "round_trips=50", "rounds=1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["round_trips"] == 50 and figures["ring_p50_us"] > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tick", ["--running", "8", "--ticks", "50"]),
        ("admit", ["--requests", "4", "--rounds", "5"]),
        ("prefix", ["--tokens", "64", "--rounds", "5"]),
    ],
)
def test_the_scheduler_is_really_measured(capsys, name, parameters):
    assert main(["bench", name, *parameters, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["p99_us"] >= figures["p50_us"] > 0


def test_every_benchmark_offered_is_there():
    assert all(find_spec(f"twinplane.benchmarks.{name}") for name in BENCHMARKS)


def test_the_kernels_are_really_measured(capsys):
    pytest.importorskip("torch")
    assert main(["bench", "kernels", "--json", "repeats=1", "cold_bytes=1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kernels"] and all(line["achieved"] > 0 for line in figures["kernels"])


def test_the_sampler_is_really_measured(capsys):
    pytest.importorskip("torch")
    assert main(["bench", "sampler", "--json", "batch=2", "vocab=300", "repeats=2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["decode_step_greedy_us"] > 0 and all(line["us"] > 0 for line in figures["sampler"])

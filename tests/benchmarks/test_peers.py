"""Comparing engines: which are run and in which order, medians, tables, and what happens when one fails."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from twinplane.benchmarks import peers
from twinplane.benchmarks.load import Generate, Outcome, Recorder, Request
from twinplane.benchmarks.peers import engines, install, report
from twinplane.benchmarks.peers.engines import Connection, Engine, Missing, Setting
from twinplane.benchmarks.peers.processes import running
from twinplane.benchmarks.peers.report import Measurement, medians, plot, table
from twinplane.benchmarks.server import demo_model, free_port


class Fake(Engine):
    """An engine in this process; ``fault`` says what goes wrong with it."""

    family = "fake"
    precision = "fp32"

    def __init__(self, variant: str, fault: str = "", started: list[str] | None = None) -> None:
        self.variant, self._fault, self._started = variant, fault, started if started is not None else []

    def prepare(self, setting: Setting) -> str:
        if self._fault == "missing":
            raise Missing("not installed: do this")
        return "1.0"

    @contextlib.contextmanager
    def serve(self, workload: str, setting: Setting, log: Path) -> Iterator[Connection]:
        self._started.append(f"{workload} {self.variant}")
        log.write_text("last words\n")
        if self._fault == "crash":
            raise RuntimeError("it crashed")
        yield self._connect()

    @contextlib.asynccontextmanager
    async def _connect(self) -> Iterator[Generate]:
        async def generate(request: Request) -> Outcome:
            recorder = Recorder()
            for _ in range(request.max_tokens if self._fault != "short" else 1):
                recorder.message(request.samples)
            return recorder.end()

        yield generate


@pytest.fixture
def registered(monkeypatch):
    """Make ``peers`` know these engines, and no others."""

    def register(*fakes: Fake) -> None:
        monkeypatch.setattr(engines, "registry", lambda: {fake.name: fake for fake in fakes})

    return register


def test_engines_alternate_within_each_workload_of_each_round(registered, tmp_path):
    started: list[str] = []
    registered(Fake("a", started=started), Fake("b", started=started))
    results = peers.run("fake", "W1,W5", rounds=2, directory=str(tmp_path))
    assert started == ["W1 a", "W1 b", "W5 a", "W5 b"] * 2
    assert [(m["engine"], m["workload"], m["round"]) for m in results["measurements"]][:3] == [
        ("fake-a", "W1", 1),
        ("fake-b", "W1", 1),
        ("fake-a", "W5", 1),
    ]
    assert results["medians"]["fake-b"]["W5"]["output_tokens_per_s"] > 0
    assert results["engines"] == {"fake-a": "1.0", "fake-b": "1.0"}
    json.dumps(results)


def test_a_missing_engine_is_skipped_with_the_reason(registered, tmp_path):
    registered(Fake("a"), Fake("b", "missing"))
    results = peers.run("fake-a,fake-b", "W5", rounds=1, directory=str(tmp_path))
    assert results["skipped"] == {"fake-b": "not installed: do this"}
    assert "fake-b was skipped: not installed: do this" in peers.text(results)


def test_without_any_engine_there_is_no_table(registered, tmp_path):
    registered(Fake("a", "missing"))
    results = peers.run("fake", "W1", directory=str(tmp_path), output=str(tmp_path / "out"))
    assert peers.text(results) == "fake-a was skipped: not installed: do this"


@pytest.mark.parametrize(("fault", "message"), [("crash", "it crashed"), ("short", "1 tokens instead of 128")])
def test_a_failure_is_a_result_and_the_others_go_on(registered, tmp_path, capsys, fault, message):
    registered(Fake("bad", fault), Fake("good"))
    results = peers.run("fake", "W1", rounds=1, directory=str(tmp_path))
    bad, good = results["measurements"]
    assert message in bad["error"] and bad["figures"] == {}
    assert good["error"] == "" and good["figures"]
    assert "| fake-bad | failed | failed |" in results["table"]
    assert "last words" in capsys.readouterr().err


def test_results_are_written_after_every_measurement(registered, tmp_path):
    registered(Fake("a"))
    peers.run("fake-a", "W5", rounds=2, directory=str(tmp_path), output=str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(written["measurements"]) == 2 and written["machine"]["threads"] == engines.usable_threads()
    assert (tmp_path / "out" / "table.md").read_text().startswith("|  | W5 tok/s |")


def test_names_that_do_not_exist_are_answered_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match=r"no engine 'lama'; there are twinplane, llama\.cpp"):
        peers.run("lama", directory=str(tmp_path))
    with pytest.raises(ValueError, match="no workload 'W9'; there are W1, W2"):
        peers.run("twinplane", "W9", directory=str(tmp_path))


def test_a_family_stands_for_all_of_its_engines():
    assert [engine.name for engine in engines.choose(["twinplane", "llama.cpp-f32"])] == [
        "twinplane-fp32",
        "twinplane-8bit",
        "twinplane-4bit",
        "twinplane-4bit-exact",
        "llama.cpp-f32",
    ]


def test_every_engine_has_a_precision_that_the_table_knows():
    assert all(engine.precision in report._PRECISIONS for engine in engines.registry().values())


@pytest.mark.parametrize("family", ["llama.cpp", "openvino", "vllm"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path, family):
    assert family in install.INSTALLERS
    for engine in engines.choose([family]):
        with pytest.raises(Missing, match=f"twinplane.benchmarks.peers.install {family} --directory {tmp_path}"):
            engine.prepare(Setting(tmp_path, 2))


def measurement(engine: str, number: int, value: float | None, precision: str = "8-bit") -> Measurement:
    figures = {} if value is None else {"output_tokens_per_s": value}
    return Measurement(engine, precision, "W5", number, figures, error="" if figures else "it crashed")


def test_medians_leave_failed_rounds_out():
    found = [measurement("a", 1, 10.0), measurement("a", 2, None), measurement("a", 3, 30.0), measurement("b", 1, None)]
    assert medians(found) == {"a": {"W5": {"output_tokens_per_s": 20.0}}, "b": {}}


def test_the_table_groups_engines_by_precision():
    found = [measurement("four", 1, 1234.5, "4-bit"), measurement("eight", 1, 10.0), measurement("broken", 1, None, "fp32")]
    assert table(found).splitlines() == [
        "|  | W5 tok/s |",
        "| --- | ---: |",
        "| broken | failed |",
        "| eight | 10.0 |",
        "| four | 1,234.5 |",
    ]


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'twinplane[plot]'")
    plot([measurement("a", 1, 10.0), measurement("a", 2, 12.0), measurement("b", 1, None, "fp32")], tmp_path / "plots.png")
    assert (tmp_path / "plots.png").stat().st_size > 1000


def test_a_server_is_waited_for_and_ended(tmp_path):
    port = free_port()
    code = f"import http.server as h; h.HTTPServer(('127.0.0.1', {port}), h.SimpleHTTPRequestHandler).serve_forever()"

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with running([sys.executable, "-c", code], log=tmp_path / "log", ready=listens) as pid:
        assert Path(f"/proc/{pid}").exists() and listens()
    assert not Path(f"/proc/{pid}").exists() and not listens()


def test_a_server_that_ends_at_once_shows_its_log(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"exited with 3\nno such model"),
        running([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], log=tmp_path / "log", ready=lambda: False),
    ):
        pass


def test_a_server_that_ends_under_load_spoils_the_measurement(tmp_path):
    with (
        pytest.raises(RuntimeError, match="exited with -9 under load"),
        running([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log", ready=lambda: True) as pid,
    ):
        import psutil

        process = psutil.Process(pid)
        process.kill()
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            pass


def test_the_amx_repair_keeps_the_tile_description_and_leaves_other_sources_alone(tmp_path):
    source = tmp_path / "mmq.cpp"
    source.write_text("    tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n")
    install.repair_amx(source)
    repaired = source.read_text()
    assert repaired.splitlines()[1].strip().startswith("__asm__ volatile") and repaired.endswith("_tile_loadconfig(&tc);\n")
    source.write_text("static const tile_config tc;\n")
    install.repair_amx(source)
    assert source.read_text() == "static const tile_config tc;\n"
    install.repair_amx(tmp_path / "absent.cpp")


@pytest.mark.model
def test_the_demo_model_is_written_in_other_number_formats_and_read_back(tmp_path):
    import gguf
    import numpy as np
    from twinplane.benchmarks.peers.weights import weights

    try:
        source = demo_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    original = gguf.GGUFReader(source)
    path = weights("q8_0.gguf", tmp_path)
    assert weights("q8_0.gguf", tmp_path) == path and [p.name for p in path.parent.iterdir()] == [path.name]
    copy = gguf.GGUFReader(path)
    for key in ("tokenizer.ggml.tokens", "llama.rope.freq_base", "tokenizer.chat_template"):
        assert copy.fields[key].contents() == original.fields[key].contents()
    assert [tensor.name for tensor in copy.tensors] == [tensor.name for tensor in original.tensors]
    for before, after in list(zip(original.tensors, copy.tensors, strict=True))[:12]:
        exact = gguf.quants.dequantize(before.data, before.tensor_type)
        rounded = gguf.quants.dequantize(after.data, after.tensor_type)
        assert after.tensor_type == (gguf.GGMLQuantizationType.Q8_0 if exact.ndim > 1 else gguf.GGMLQuantizationType.F32)
        assert np.abs(exact - rounded).max() <= np.abs(exact).max() / 254 + 1e-7

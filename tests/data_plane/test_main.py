"""The process over real sockets and shared memory: handshake, load, serve, reattach, drain, and every way to fail."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import tiny_models
from control_stub import PATIENCE_S, ControlStub
from planner import StepBuilder
from tiny_models import NATIVE, prompts, reference_tokens
from twinplane.data_plane.config import DataPlaneConfig
from twinplane.data_plane.main import EXIT_FAILED, EXIT_OK, run
from twinplane.shared import log, messages, wire
from twinplane.shared.model_files import fingerprint, read_model_card
from twinplane.shared.wire import NO_TOKEN, RowFlag, StepStatus

GREEDY = int(RowFlag.GREEDY)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_path) -> DataPlaneConfig:
    return DataPlaneConfig(model=str(model_path), instance=f"test-{uuid.uuid4().hex[:12]}", threads=1, kv_cache_bytes=1 << 20)


class Running:
    """A data plane in a thread."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.stop = threading.Event()
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self._thread.start()

    def _run(self, config: DataPlaneConfig) -> None:
        self.code = run(config, self.stop)

    def join(self) -> int | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the data plane did not end"
        return self.code


@contextmanager
def running(config: DataPlaneConfig) -> Iterator[Running]:
    plane = Running(config)
    try:
        yield plane
    finally:
        plane.stop.set()
        plane.join()


def answer(control: ControlStub, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens of one prompt, prefilled in one step, decoded by relay."""
    step = StepBuilder(0, writes=[(0, i, 30 + i) for i in range(4)])
    step.open(0, flags=GREEDY)
    step.sequence(0, 0, prompt, samples=True)
    tokens = [int(control.step(step).entries[0]["token"])]
    for i in range(1, new):
        step = StepBuilder(i)
        step.sequence(0, len(prompt) + i - 1, [NO_TOKEN], samples=True)
        tokens.append(int(control.step(step).entries[0]["token"]))
    return tokens


def test_a_session_from_hello_to_drain(config, model_path):
    with ControlStub(config.instance) as control, running(config) as plane:
        hello = control.accept()
        assert (hello.layout_hash, hello.loaded, hello.block_size) == (f"{wire.LAYOUT_HASH:x}", False, 16)
        assert (hello.max_model_len, hello.vocab_size, hello.num_layers) == (256, 256, 3)
        assert hello.kv_bytes_per_block == 16 * 2 * 3 * 2 * 16 * 4
        assert hello.num_blocks == (1 << 20) // hello.kv_bytes_per_block
        assert hello.fingerprint == fingerprint(read_model_card(model_path))
        control.welcome()
        seen = control.until_ready()
        progress = [m for m in seen if isinstance(m, messages.Progress) and m.phase == "weights"]
        assert progress[-1].done == progress[-1].total > 0
        assert seen[-1].swap_block_ns == 0, "there is no swap pool"
        assert set(seen[-1].phases) == {"weights", "kv_cache", "warm_up"}
        assert control.peer["heartbeat_ns"] > 0
        text = prompts((21,))[0]
        assert answer(control, text, 8) == _reference(model_path, text, 8)
        control.send(messages.Drain())
        assert plane.join() == EXIT_OK


def _reference(model_path, text: list[int], new: int) -> list[int]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    return reference_tokens(model, [text], new)[0]


def test_the_cost_of_swapping_is_measured_once_and_told_every_control_plane(config):
    config = dataclasses.replace(config, swap_space=1 << 18)
    with running(config):
        told = []
        for epoch in (1, 2):
            with ControlStub(config.instance, epoch) as control:
                control.accept()
                control.welcome()
                told.append(control.until_ready()[-1].swap_block_ns)
    assert told[0] == told[1] > 0


def test_a_dead_control_plane_leaves_the_weights_loaded_and_its_successor_is_served(config):
    text = prompts((21,))[0]
    with running(config) as plane:
        answers = []
        for epoch in (1, 2):
            with ControlStub(config.instance, epoch) as control:
                hello = control.accept()
                assert hello.loaded == (epoch == 2)
                control.welcome()
                seen = control.until_ready()
                assert (len(seen) == 1) == (epoch == 2)  # nothing to load the second time
                answers.append(answer(control, text, 6))
        assert answers[0] == answers[1]
        assert plane.code is None  # it waits for the next one


def test_a_failed_step_is_published_told_and_ends_the_process(config):
    with ControlStub(config.instance) as control, running(config) as plane:
        control.accept()
        control.welcome()
        control.until_ready()
        step = StepBuilder(0)
        step.sequence(0, 0, [NO_TOKEN], samples=True)  # a relay of a row that never sampled
        assert int(control.step(step).header["status"]) == StepStatus.FAILED
        fatal = control.receive()
        assert isinstance(fatal, messages.Fatal)
        assert "step 0 failed: StepError: row 0 has input token -1" in fatal.error and "Traceback" in fatal.detail
        assert control.receive() is None  # EOF
        assert plane.join() == EXIT_FAILED


def test_a_refused_data_plane_ends_with_the_reason(config, capsys):
    log.configure("info", "json")
    with ControlStub(config.instance) as control, running(config) as plane:
        control.accept()
        control.send(messages.Refuse(reason="MODEL_MISMATCH", message="another model is served here"))
        assert plane.join() == EXIT_FAILED
    assert "another model is served here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/nowhere/model"}, "/nowhere/model does not exist"),
        ({"dtype": "float16"}, "float16 is not computed on CPUs"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype 'float16' is not supported on CPUs: use float32, bfloat16, fp8_e4m3 or auto"),
        ({"kv_cache_dtype": "fp8_e4m3", "kernels": "reference"}, "kv_cache_dtype fp8_e4m3 needs the native kernels"),
        ({"cpu_activations": "int8"}, "cpu_activations int8 is for weights of 4 to 8 bits"),
        ({"kv_cache_bytes": 100}, "Raise --kv-cache-bytes (now 100)"),
        ({"max_model_len": 257}, "max_model_len is 257, but the model has positions for 256 tokens"),
        ({"device": "cuda"}, "device 'cuda' is not available: use cpu"),
    ],
)
def test_F03_a_start_that_can_not_work_ends_at_once_with_one_sentence(change, message, config, capsys):
    import dataclasses

    log.configure("info", "json")
    assert run(dataclasses.replace(config, **change)) == EXIT_FAILED
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last and '"level": "critical"' in last


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_E10_a_length_beyond_the_position_table_is_refused_at_start(family, config, tmp_path, capsys):
    import dataclasses

    log.configure("info", "json")
    path = tiny_models.save(tiny_models.make(tiny_models.FALLBACK[family]()), tmp_path)
    assert run(dataclasses.replace(config, model=str(path), max_model_len=257)) == EXIT_FAILED
    assert "max_model_len is 257, but the model has positions for 256 tokens" in capsys.readouterr().err


def test_E05_damaged_weights_are_found_before_anything_is_attached(config, tmp_path, capsys):
    import dataclasses

    log.configure("info", "json")
    path = tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert run(dataclasses.replace(config, model=str(path))) == EXIT_FAILED  # no control plane exists
    assert "model.safetensors is truncated" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- as a process

PROGRAM = """
import sys
from twinplane.data_plane.config import DataPlaneConfig
from twinplane.data_plane.main import run
sys.exit(run(DataPlaneConfig(model=sys.argv[1], instance=sys.argv[2], threads=1, kv_cache_bytes=1 << 20)))
"""


@pytest.fixture
def process(config) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, config.model, config.instance], stderr=subprocess.DEVNULL)
    yield child
    if child.poll() is None:
        child.kill()
    child.wait()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def test_sigterm_ends_an_idle_process_with_exit_code_zero(config, process):
    with ControlStub(config.instance) as control:
        control.accept()
        control.welcome()
        control.until_ready()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_OK


def test_a_killed_process_is_seen_by_eof_and_its_successor_answers_the_same(config, process):
    text = prompts((21,))[0]
    with ControlStub(config.instance) as control:
        control.accept()
        control.welcome()
        control.until_ready()
        first = answer(control, text, 4)
        os.kill(process.pid, signal.SIGKILL)
        assert control.receive() is None
        with running(config):
            assert control.accept().loaded is False
            control.welcome()
            control.until_ready()
            assert answer(control, text, 4) == first

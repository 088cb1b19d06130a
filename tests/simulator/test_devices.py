"""Device models: those that ship, and files of one's own."""

from __future__ import annotations

import json

import pytest
from twinplane.control_plane.simulator import devices
from twinplane.control_plane.simulator.devices import DeviceError, load, shipped


def test_the_shipped_models_are_as_documented():
    assert shipped() == ["a100-opt-13b", "a100-opt-175b", "a100-opt-66b", "h100-llama-70b", "h100-llama-8b"]
    for name in shipped():
        model = load(name)
        assert model.name == name and model.source and model.description


@pytest.mark.parametrize(("budget", "us"), [(256, 11_739), (512, 17_846), (1024, 29_835)])
def test_h100_steps_are_the_sum_of_the_measured_parts(budget, us):
    # matrix products + elementwise + LM head of the profile; a token's context is read for well under a microsecond
    assert load("h100-llama-8b").step_us(budget) == pytest.approx(us, abs=2)


def test_a100_slots_are_the_papers():
    assert [load(f"a100-opt-{n}").kv.capacity_tokens for n in ("13b", "66b", "175b")] == [15_737, 9_700, 60_100]


def test_fp8_halves_what_a_token_takes():
    model = load("h100-llama-8b")
    fp8 = model.with_kv_dtype("fp8_e4m3")
    assert fp8.kv.capacity_tokens >= 1.93 * model.kv.capacity_tokens
    assert fp8.kv.read_us_per_token == pytest.approx(0.516 * model.kv.read_us_per_token)
    assert model.with_kv_dtype("auto") is model and model.with_kv_dtype("bfloat16") is model


def test_swapping_small_blocks_costs_many_copies():
    swap = load("a100-opt-13b").swap
    assert swap is not None
    one, sixteen = swap.time_us(256, 1), swap.time_us(256, 16)
    assert one > 4 * sixteen
    assert swap.time_us(17, 16) == swap.time_us(32, 16)  # whole blocks


@pytest.mark.parametrize("block_size", [None, 1, 64])
def test_steps_that_swap_take_as_long_as_the_swap_does(block_size):
    model, size = load("a100-opt-13b"), block_size or 16
    device = model.native(block_size)
    swap_us = model.swap.time_us(256, size)
    assert device.time_ns(tokens=0, swapped_blocks=256 // size) == pytest.approx(swap_us * 1e3)
    assert device.time_ns(tokens=8, swapped_blocks=256 // size) == pytest.approx(device.time_ns(tokens=8) + swap_us * 1e3)


def model(**changes):
    content = {
        "name": "mine",
        "description": "d",
        "source": "s",
        "max_model_len": 2048,
        "kv": {"capacity_tokens": 1000, "block_size": 16, "dtype": "float16", "read_us_per_token": 0.5},
        "step": {"by_tokens_us": [[1, 10], [100, 20]]},
        "serve": {},
    }
    for key, value in changes.items():
        inner = content
        *path, last = key.split("__")
        for part in path:
            inner = inner[part]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return content


def write(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_model_of_ones_own(tmp_path):
    found = load(write(tmp_path, model()))
    assert found.name == "mine" and found.step_us(1) == 10.0 and found.swap is None and not found.includes_host_time


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "the file is .*expected an object"),
        (model(name=None), "name is missing"),
        (model(name=3), "name is 3, expected text"),
        (model(color="red"), "unknown key color"),
        (model(kv__capacity_tokens=0), "kv.capacity_tokens is 0"),
        (model(kv__capacity_tokens=True), "kv.capacity_tokens is True"),
        (model(kv__block_size=1.5), "kv.block_size is 1.5"),
        (model(kv__dtype="int3"), "kv.dtype is 'int3', expected one of"),
        (model(kv__read_us_per_token=-1), "kv.read_us_per_token is -1"),
        (model(kv__size=1), r"unknown key kv\.size"),
        (model(step__by_tokens_us=[]), "step.by_tokens_us"),
        (model(step__by_tokens_us=[[1]]), "a point of step.by_tokens_us"),
        (model(step__by_tokens_us=[[1, "a"]]), "a point of step.by_tokens_us"),
        (model(step__by_tokens_us=[[2, 1], [1, 1]]), "mine.json: by_tokens_ns: point 1"),
        (model(step__fixed_us="x"), "step.fixed_us is 'x'"),
        (model(serve=[]), "serve is"),
        (model(swap={"bytes_per_token": 1}), "swap.bytes_per_us is missing"),
        (model(swap={"bytes_per_token": 1, "bytes_per_us": 0, "us_per_copy": 1, "copies_per_block": 1}), "swap.bytes_per_us is 0"),
    ],
)
def test_a_bad_model_is_refused_by_file_and_key(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(DeviceError, match=message) as caught:
        load(path)
    assert path in str(caught.value)


def test_unknown_and_missing_models(tmp_path):
    with pytest.raises(DeviceError, match="known are a100-opt-13b"):
        load("b200")
    with pytest.raises(DeviceError, match="can not be read"):
        load(str(tmp_path / "none.json"))
    assert set(devices.KV_BYTES) == {"float32", "bfloat16", "float16", "fp8_e4m3"}

"""The memory plan: what fits, what is said when it does not, and which option each message names."""

from __future__ import annotations

import pytest
import torch
from twinplane.data_plane import host
from twinplane.data_plane.config import DataPlaneConfig
from twinplane.data_plane.host import HostMemory
from twinplane.data_plane.kv_cache import KV_DTYPES, KVCache, KVSpec, LayerKV, choose_block_size, kv_dtype_name
from twinplane.data_plane.memory import DEFAULT_KV_BYTES, MemoryPlanError, Needs, make_plan
from twinplane.kernels import registry

GIB = 1 << 30
SPEC = KVSpec((LayerKV(3, 64, 64),) * 30, torch.float32, 16)  # 46,080 bytes per token
HOST = HostMemory(total=16 * GIB, available=12 * GIB, own=GIB // 2)


def plan(host_memory: HostMemory = HOST, *, max_model_len: int = 8192, given: bool = False, weights: int = GIB, **options):
    needs = Needs(
        weights=weights, workspace=GIB // 4, max_model_len=max_model_len, max_model_len_given=given, useful_tokens=64 * max_model_len
    )
    return make_plan(host_memory, DataPlaneConfig(model="m", **options), SPEC, needs)


def test_bytes_per_token_count_keys_and_values_of_every_layer():
    assert SPEC.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert KVSpec(SPEC.layers, torch.bfloat16, 16).bytes_per_token * 2 == SPEC.bytes_per_token


def test_fp8_takes_about_half_of_bfloat16_powers_included():
    fp8, bf16 = (KVSpec(SPEC.layers, dtype, 16).bytes_per_token for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    assert fp8 == 2 * 30 * 3 * (64 + 1) and fp8 <= 0.516 * bf16


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_allocated_cache_is_as_large_as_planned(dtype):
    spec = KVSpec((LayerKV(3, 64, 48),) * 2, KV_DTYPES[dtype], 32)
    cache = KVCache(spec, 5, registry.select("cpu"), "cpu")
    assert sum(tensor.nbytes for tensor in (*cache.k, *cache.v)) == 5 * spec.bytes_per_block
    assert kv_dtype_name(spec.dtype) == dtype


@pytest.mark.parametrize(("head_dim", "size"), [(16, 16), (64, 16), (80, 32), (128, 32), (256, 64)])
def test_block_size_grows_with_the_head_and_as_numbers_get_smaller(head_dim, size):
    assert choose_block_size(head_dim, torch.float32) == size
    assert choose_block_size(head_dim, torch.bfloat16) == max(32, size)
    assert choose_block_size(head_dim, torch.float8_e4m3fn) == min(64, 2 * size)


def test_a_size_in_bytes_is_kept_to_the_block():
    got = plan(kv_cache_bytes=GIB)
    assert got.num_blocks == GIB // SPEC.bytes_per_block and got.kv_bytes <= GIB


def test_F02_the_fraction_is_of_the_total_and_covers_everything_this_process_holds():
    got = plan(memory_fraction=0.25)
    assert got.host.own + got.weights + got.workspace + got.kv_bytes <= 4 * GIB
    assert got.host.own + got.weights + got.workspace + got.kv_bytes > 4 * GIB - SPEC.bytes_per_block


def test_F02_the_fraction_does_not_depend_on_who_started_first():
    busy = HostMemory(total=16 * GIB, available=6 * GIB, own=GIB // 2)
    assert plan(busy, memory_fraction=0.25).num_blocks == plan(memory_fraction=0.25).num_blocks


def test_without_options_the_cache_is_bounded_by_default_size_free_memory_and_use():
    assert plan().kv_bytes <= DEFAULT_KV_BYTES
    small = HostMemory(total=4 * GIB, available=2 * GIB, own=GIB // 2)
    assert plan(small).kv_bytes < GIB // 2
    assert plan(max_model_len=64).kv_tokens == 64 * 64


def test_a_pool_smaller_than_the_model_length_lowers_it_unless_it_was_asked_for():
    got = plan(kv_cache_bytes=1000 * SPEC.bytes_per_token)
    assert got.max_model_len == got.kv_tokens == 992
    with pytest.raises(MemoryPlanError, match=r"max_model_len is 8192 tokens, but the KV cache holds only 992.*Raise --kv-cache-bytes"):
        plan(kv_cache_bytes=1000 * SPEC.bytes_per_token, given=True)


def test_swap_space_is_planned_with_in_whole_blocks_and_counted():
    without, got = plan(memory_fraction=0.5), plan(memory_fraction=0.5, swap_space=GIB)
    assert got.num_host_blocks == GIB // SPEC.bytes_per_block and without.num_host_blocks == 0
    assert 0 <= without.num_blocks - got.num_blocks - got.num_host_blocks <= 1
    assert f"swap space {got.swap_bytes / 2**30:.2f} GiB = {got.num_host_blocks} blocks" in got.describe()
    with pytest.raises(MemoryPlanError, match=r"still needed"):
        plan(kv_cache_bytes=GIB, swap_space=11 * GIB)


def test_a_swap_space_below_one_block_is_refused():
    with pytest.raises(MemoryPlanError, match=rf"1000 bytes does not hold one block of {SPEC.bytes_per_block}: raise --swap-space"):
        plan(swap_space=1000)


@pytest.mark.parametrize(
    ("options", "weights", "advice"),
    [
        ({"memory_fraction": 0.1}, 2 * GIB, r"Raise --memory-fraction \(now 0\.1"),
        ({"kv_cache_bytes": 1000}, GIB, r"Raise --kv-cache-bytes \(now 1000\)"),
        ({}, 12 * GIB, r"Give this machine or cgroup more memory"),
    ],
)
def test_F01_no_room_for_a_block_is_explained_with_all_numbers_and_the_option(options, weights, advice):
    with pytest.raises(MemoryPlanError, match=advice) as caught:
        plan(weights=weights, **options)
    for part in ("total 16.00 GiB", "used by others 3.50 GiB", "weights", "workspace", "KV cache", "46080 bytes per token", "0 tokens fit"):
        assert part in str(caught.value)


def test_F01_memory_that_others_use_is_not_promised():
    busy = HostMemory(total=16 * GIB, available=3 * GIB, own=GIB // 2)
    with pytest.raises(MemoryPlanError, match=r"5\.\d\d GiB are still needed, 3\.00 GiB are available.*lower --kv-cache-bytes"):
        plan(busy, kv_cache_bytes=4 * GIB)


def test_a_cgroup_limit_below_the_machine_is_the_total(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 4}\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    got = host.host_memory()
    assert got.total == GIB
    assert got.available <= GIB - GIB // 4  # page cache that can be dropped does not count as used


def test_an_unlimited_cgroup_leaves_the_machine_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert host.host_memory().total == host._meminfo()["MemTotal"]


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("10000000 100000", 8)])
def test_the_cpu_quota_limits_the_threads(quota, cpus, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert host.cpus_granted() == cpus

"""What only native code can show: no allocation in a tick, and the core under the sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest
from twinplane.benchmarks import admit, tick

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pool_percent", [100, 40])
def test_INV_11_a_tick_allocates_nothing_and_makes_no_system_call(depth: int, pool_percent: int) -> None:
    measured = tick.run(64, ticks=4000, prompt=200, output=60, depth=depth, pool_percent=pool_percent)
    assert measured["allocations_per_tick"] == 0
    assert not measured["syscalls_per_tick"]
    # ... while all of this went on:
    assert measured["finishes_per_tick"] > 0.1 and measured["admissions_per_tick"] > 0.1 and measured["table_writes_per_tick"] > 1
    assert pool_percent == 100 or measured["preemptions_per_tick"] > 0


def test_repeats_of_the_tick_benchmark_show_what_ticks_take_undisturbed() -> None:
    measured = tick.run(64, ticks=500, prompt=200, output=60, repeats=3)
    assert 0 < measured["undisturbed_p50_us"] <= measured["p50_us"] and 0 < measured["undisturbed_p99_us"] <= measured["p99_us"]


def test_INV_11_nor_do_the_ticks_and_results_of_steps_of_several_substeps() -> None:
    measured = tick.run(64, ticks=4000, prompt=200, output=60, max_substeps=8)
    assert measured["allocations_per_tick"] == 0
    assert not measured["syscalls_per_tick"]
    assert measured["results_per_step"] > 1.5 and measured["admissions_per_tick"] > 0.1


def test_the_tick_that_admits_a_crowd_is_measured() -> None:
    measured = admit.run(8, 100, rounds=20)
    assert 0 < measured["p50_us"] <= measured["p99_us"] <= measured["max_us"]


def sanitized(sanitizer: str, program: str, *arguments: str) -> None:
    subprocess.run([ROOT / "scripts/native", "control_plane", f"-DTWINPLANE_SANITIZE={sanitizer}"], check=True, capture_output=True)
    path = ROOT / f"build/native-control_plane-{sanitizer}/control_plane" / program
    environment = os.environ | {"TSAN_OPTIONS": f"suppressions={ROOT / 'tests/core/native/tsan.supp'}"}
    result = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_histories_of_the_scheduler_under_address_and_undefined_behaviour_sanitizer() -> None:
    sanitized("address", "random_scheduler", "1", "100")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hash_bits", ["0", "3", "64"])
def test_A12_the_prefix_tree_against_a_map_whatever_the_hash(hash_bits: str) -> None:
    sanitized("address", "prefix_tree_fuzz", "1", "20", hash_bits, "0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slots", ["8", "16", "32"])
def test_the_prefix_tree_short_of_memory_for_runs_keeps_less_and_splits_all_the_same(slots: str) -> None:
    sanitized("address", "prefix_tree_fuzz", "1", "20", "64", slots)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_heap_for_requests_never_gives_a_piece_twice_and_uses_it_again() -> None:
    sanitized("address", "request_heap_fuzz", "1", "20")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_engine_thread_under_fire_under_sanitizer(sanitizer: str) -> None:
    sanitized(sanitizer, "engine_stress", "5")

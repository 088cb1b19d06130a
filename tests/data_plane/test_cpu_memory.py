"""When memory comes behind the KV cache."""

from __future__ import annotations

import pytest
import torch
from twinplane.data_plane import cpu
from twinplane.data_plane.kv_cache import KVSpec, LayerKV
from twinplane.kernels import _cpu


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The address and bytes of each piece as it is made ready."""
    pieces: list[tuple[int, int]] = []

    def note(piece: torch.Tensor) -> bool:
        pieces.append((piece.data_ptr(), piece.nbytes))
        return True

    monkeypatch.setattr(_cpu, "populate", note)
    return pieces


def device_of(layers: int, blocks: int) -> cpu.CpuDevice:
    device = cpu.CpuDevice(threads=1)
    device.allocate_kv(KVSpec((LayerKV(num_kv_heads=2, head_dim=64, v_head_dim=64),) * layers, torch.float32, 16), blocks)
    return device


def test_the_first_blocks_of_all_layers_come_first(populated: list[tuple[int, int]]) -> None:
    device = device_of(layers=3, blocks=512)  # 4 MiB of keys and 4 of values each: two pieces
    while device.settle():
        pass
    starts = [start for start, _ in populated[:6]]
    assert [start + cpu._PIECE_BYTES for start in starts] == [start for start, _ in populated[6:12]]
    assert len(populated) == 12 and sum(size for _, size in populated) == 3 * 2 * (4 << 20)


def test_a_busy_device_stays_ahead_of_its_steps(populated: list[tuple[int, int]]) -> None:
    device = device_of(layers=3, blocks=512)
    tokens = 0
    while tokens < 512 * 16:
        device._stay_ahead(100)
        tokens += 100
        ready = sum(size for _, size in populated)
        assert ready + cpu._PIECE_BYTES > min(tokens * 3 * 2 * 2 * 64 * 4, 3 * 2 * (4 << 20))
    device._stay_ahead(100)  # and nothing happens when all is there
    assert len(populated) == 12


def test_steps_do_not_wait_for_memory_that_idleness_has_brought(populated: list[tuple[int, int]]) -> None:
    device = device_of(layers=3, blocks=512)
    for _ in range(6):
        device.settle()
    device._stay_ahead(100)
    assert len(populated) == 6
    while len(populated) == 6:
        device._stay_ahead(100)
        assert device._needed_bytes < 7 * cpu._PIECE_BYTES + cpu._LEAD * 100 * device._bytes_per_token

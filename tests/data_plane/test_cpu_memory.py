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
    device = device_of(layers=3, blocks=1024)  # 8 MiB of keys and 8 of values each: two pieces
    while device.settle():
        pass
    starts = [start for start, _ in populated[:6]]
    assert [start + cpu._PIECE_BYTES for start in starts] == [start for start, _ in populated[6:12]]
    assert len(populated) == 12 and sum(size for _, size in populated) == 3 * 2 * (8 << 20)


def test_a_busy_device_stays_ahead_of_its_steps(populated: list[tuple[int, int]]) -> None:
    device = device_of(layers=3, blocks=1024)
    tokens = 0
    while tokens < 1024 * 16:
        device._stay_ahead(100)
        tokens += 100
        ready = sum(size for _, size in populated)
        assert ready + cpu._PIECE_BYTES > min(tokens * 3 * 2 * 2 * 64 * 4, 3 * 2 * (8 << 20))
    device._stay_ahead(100)  # and nothing happens when all is there
    assert len(populated) == 12

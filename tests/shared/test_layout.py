"""The bytes: one schema, two languages, the same offsets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twinplane.shared import _shm, generate, schema, wire

CSRC = Path(generate.__file__).parent / "csrc"
LAYOUTS: tuple[Any, ...] = (wire.StepSlotLayout, wire.ResultSlotLayout, wire.SegmentLayout)
CAPACITIES = st.builds(
    wire.Capacities,
    ring_depth=st.integers(1, 16),
    max_rows=st.integers(1, 5000),
    max_step_tokens=st.integers(1, 100_000),
    max_table_writes=st.integers(1, 5000),
    max_copies=st.integers(0, 5000),
    max_extra_words=st.integers(0, 100_000),
    max_results=st.integers(1, 5000),
    max_swaps=st.integers(0, 5000),
    max_candidates=st.integers(0, 5000),
)


def test_generated_files_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def test_native_module_was_built_from_this_schema() -> None:
    assert _shm.LAYOUT_HASH == wire.LAYOUT_HASH == generate.layout_hash()


@given(CAPACITIES)
def test_compiler_and_python_agree_on_every_region(capacities: wire.Capacities) -> None:
    native = _shm.region_offsets(capacities)
    for layout in LAYOUTS:
        python = layout(capacities)
        assert {name: getattr(python, name) for name in layout.__slots__} == native[layout.__name__]
    assert _shm.segment_bytes(capacities) == wire.SegmentLayout(capacities).bytes


@given(CAPACITIES)
def test_regions_are_aligned_and_do_not_overlap(capacities: wire.Capacities) -> None:
    for layout, regions in zip(LAYOUTS, (schema.STEP_REGIONS, schema.RESULT_REGIONS, schema.SEGMENT_REGIONS), strict=True):
        offsets = layout(capacities)
        end = 0
        for region in regions:
            start = getattr(offsets, region.name)
            assert start >= end and start % region.align == 0
            end = start + _bytes_of(region, capacities)
        assert offsets.bytes >= end and offsets.bytes % schema.PAGE == 0


def _bytes_of(region: schema.Region, capacities: wire.Capacities) -> int:
    count = int(region.count) if region.count.isdigit() else getattr(capacities, region.count)
    slots: dict[str, Any] = {"StepSlot": wire.StepSlotLayout, "ResultSlot": wire.ResultSlotLayout}
    if region.type in slots:
        return int(count * slots[region.type](capacities).bytes)
    dtype = np.dtype({"u32": "<u4", "i32": "<i4"}.get(region.type) or getattr(wire, generate.snake(region.type).upper()))
    return int(count * dtype.itemsize)


def test_numpy_sees_every_field_where_the_compiler_has_asserted_it() -> None:
    """wire.hpp compiled, so its static_asserts hold; numpy must have the same numbers."""
    text = (CSRC / "wire.hpp").read_text()
    offsets = re.findall(r"static_assert\(offsetof\((\w+), (\w+)\) == (\d+)\)", text)
    sizes = re.findall(r"static_assert\(sizeof\((\w+)\) == (\d+) && alignof", text)
    assert len(sizes) == len(schema.STRUCTS) and len(offsets) == sum(len(s.fields) for s in schema.STRUCTS)
    for struct, size in sizes:
        assert getattr(wire, generate.snake(struct).upper()).itemsize == int(size)
    for struct, field, offset in offsets:
        fields = getattr(wire, generate.snake(struct).upper()).fields
        assert fields is not None and fields[field][1] == int(offset), (struct, field)


def test_a_field_that_would_need_padding_is_refused() -> None:
    crooked = schema.Struct("Crooked", "", (schema.Field("a", "u32", ""), schema.Field("b", "u64", "")))
    with pytest.raises(ValueError, match="8-byte alignment"):
        generate.struct_layout(crooked)


def test_each_counter_has_a_cache_line_of_its_own() -> None:
    fields = wire.PLANE_STATE.fields
    assert fields is not None
    lines = [fields[name][1] // schema.CACHE_LINE for name in ("published", "consumed", "heartbeat_ns")]
    assert lines == [0, 1, 2]
    bell = wire.BELL.fields
    assert bell is not None and bell["rings"][1] // schema.CACHE_LINE != bell["sleeping"][1] // schema.CACHE_LINE


def test_golden_bytes_of_a_step() -> None:
    """Capacities chosen so that every region starts right behind the last; offsets spelled out by hand."""
    capacities = wire.Capacities(
        ring_depth=2,
        max_rows=2,
        max_step_tokens=16,
        max_table_writes=4,
        max_copies=2,
        max_extra_words=4,
        max_results=2,
        max_swaps=1,
        max_candidates=2,
    )
    slot = np.zeros(wire.StepSlotLayout(capacities).bytes, np.uint8)
    layout = wire.StepSlotLayout(capacities)

    def region(offset: int, dtype: np.dtype | str, count: int) -> np.ndarray:
        return slot[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    region(layout.header, wire.STEP_HEADER, 1)[0] = (7, 0x1122334455667788, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 4, 8)
    region(layout.seqs, wire.SEQ_ENTRY, 1)[0] = (1, 10, 3, 0, wire.SeqFlag.SAMPLES | wire.SeqFlag.CHUNK, 0)
    region(layout.token_ids, "<i4", 3)[:] = (5, 6, wire.NO_TOKEN)
    region(layout.closes, "<u4", 1)[0] = 9
    region(layout.opens, wire.ROW_OPEN, 1)[0] = (1, wire.RowFlag.LOGPROBS, 42, 2, 0.5, 0.25, 0, 3, 1, 0, 0, 8, 99)
    region(layout.forks, wire.ROW_FORK, 1)[0] = (1, 0, 2)
    region(layout.table_writes, wire.TABLE_WRITE, 1)[0] = (1, 2, 0x33)
    region(layout.swap_outs, wire.BLOCK_SWAP, 1)[0] = (0x66, 0x77)
    region(layout.swap_ins, wire.BLOCK_SWAP, 1)[0] = (0x88, 0x99)
    region(layout.copies, wire.BLOCK_COPY, 1)[0] = (0x44, 0x55)
    region(layout.extras, "<u4", 4)[:] = (1, wire.ExtraKind.ALLOWED_TOKENS, 1, 77)

    expected = {
        0: "07000000 00000000  88776655 44332211  01000000 01000000 03000000 01000000 01000000 01000000 01000000 01000000"
        " 01000000 01000000 04000000 08000000",
        64: "01000000 0a000000 03000000 00000000 03000000 00000000",  # seqs: 2 * 24 bytes, padded to 64
        128: "05000000 06000000 ffffffff",  # token_ids: 16 * 4
        192: "09000000",  # closes: 2 * 4, padded
        256: "01000000 02000000 2a000000 00000000 02000000 0000003f 0000803e 00000000 03000000 0000803f 00000000 00000000"
        " 08000000 63000000",
        384: "01000000 02000000 33000000",  # table_writes: behind opens, 2 * 56 padded to 128
        448: "01000000 00000000 02000000",  # forks
        512: "66000000 77000000",  # swap_outs
        576: "88000000 99000000",  # swap_ins
        640: "44000000 55000000",  # copies
        704: "01000000 04000000 01000000 4d000000",  # extras
    }
    golden = np.zeros(4096, np.uint8)
    for offset, text in expected.items():
        content = bytes.fromhex(text)
        golden[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
    assert slot.tobytes() == golden.tobytes()


def test_golden_bytes_of_a_result() -> None:
    slot = np.zeros(4096, np.uint8)
    layout = wire.ResultSlotLayout(wire.Capacities(2, 2, 16, 4, 2, 4, 2, 1, 2))
    slot[:56].view(wire.RESULT_HEADER)[0] = (7, 1, 2, 3, 4, 5, wire.StepStatus.FAILED, 2, 1, 1, 3)
    slot[64 : 64 + 40].view(wire.RESULT_ENTRY)[:] = [(1, 500, -0.5, 2, 0), (0, wire.NO_TOKEN, 0.0, 0, wire.ResultFlag.NOT_FINITE)]
    assert (layout.entries, layout.candidates) == (64, 128)
    slot[128 : 128 + 8].view(wire.CANDIDATE)[:] = [(500, -0.5)]
    header = "07000000 00000000 01000000 00000000 02000000 00000000 03000000 04000000 05000000 01000000 02000000 01000000 01000000 03000000"
    entries = "01000000 f4010000 000000bf 02000000 00000000   00000000 ffffffff 00000000 00000000 01000000"
    expected = bytes.fromhex(header) + bytes(8) + bytes.fromhex(entries) + bytes(24) + bytes.fromhex("f4010000 000000bf")
    assert slot.tobytes() == expected + bytes(4096 - len(expected))

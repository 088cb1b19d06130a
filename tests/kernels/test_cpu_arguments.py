"""Every wrong argument of the native CPU kernels is a ValueError that names it; nothing is read or written before."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
import torch
from twinplane.kernels import _cpu
from twinplane.kernels.cpu import ops


def refused(match: str, function: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(ValueError, match=match):
        function(*arguments, **named)


@pytest.fixture
def packed() -> _cpu.PackedLinear:
    return _cpu.PackedLinear(torch.eye(8, 4))


def test_linear_names_the_argument_of_wrong_shape_dtype_or_stride(packed: _cpu.PackedLinear) -> None:
    x, out = torch.zeros(3, 4), torch.zeros(3, 8)
    refused(r"^x must be \[T, K\] = \[any, 4\], got \[3, 5\]", packed, torch.zeros(3, 5), out)
    refused(r"^out must be \[T, N\] = \[3, 8\], got \[2, 8\]", packed, x, torch.zeros(2, 8))
    refused(r"^x must be float32, got int64 \[3, 4\]", packed, torch.zeros(3, 4, dtype=torch.long), out)
    refused("^x must be float32, got bfloat16", packed, x.bfloat16(), out)
    refused("^x must be contiguous in its last 1", packed, torch.zeros(4, 3).T, out)
    refused("^residual must be", packed, x, out, torch.zeros(3, 7))
    refused("^activation must be none, relu", packed, x, out, None, "softplus")
    refused("^x must be a CPU torch tensor or a numpy array, not list", packed, [[0.0] * 4], out)


def test_linear_refuses_to_write_over_its_input(packed: _cpu.PackedLinear) -> None:
    memory = torch.zeros(3, 20)
    refused("^out overlaps x", packed, memory[:, :4], memory[:, 2:10])
    refused("^residual overlaps out without being", packed, torch.zeros(3, 4), memory[:, 2:10], memory[:, 3:11])


def test_read_only_outputs_are_refused(packed: _cpu.PackedLinear) -> None:
    out = np.zeros((3, 8), np.float32)
    out.flags.writeable = False
    refused("^out is read-only", packed, torch.zeros(3, 4), out)


def test_tensors_elsewhere_than_in_memory_are_refused(packed: _cpu.PackedLinear) -> None:
    with pytest.raises((ValueError, BufferError, RuntimeError)):
        packed(torch.zeros(3, 4, device="meta"), torch.zeros(3, 8))


def test_packing_names_what_is_wrong() -> None:
    refused("^weight must be", _cpu.PackedLinear, torch.zeros(3))
    refused("^weight must be float32 or bfloat16", _cpu.PackedLinear, torch.zeros(3, 3, dtype=torch.float64))
    refused(r"^bias must be \[N\] = \[3\], got \[4\]", _cpu.PackedLinear, torch.zeros(3, 3), torch.zeros(4))
    refused("^dtype must be float32 or bfloat16, got float16", _cpu.PackedLinear, torch.zeros(3, 3), None, "float16")
    refused("^kind must be one of Q8_0, Q4_0, Q4_1, got Q5_K", _cpu.PackedLinear.quantize, torch.zeros(3, 32), "Q5_K")
    refused("^weight has 33 columns; Q4_0 needs a multiple of 32", _cpu.PackedLinear.quantize, torch.zeros(3, 33), "Q4_0")
    refused("^activations must be float or int8, got int4", _cpu.PackedLinear.quantize, torch.zeros(3, 32), "Q8_0", None, "int4")
    refused("^there are no linears to concatenate", _cpu.PackedLinear.concat, [])
    narrow, wide = _cpu.PackedLinear(torch.zeros(3, 3)), _cpu.PackedLinear(torch.zeros(3, 4))
    refused("^linears of 3 and 4 input features can not be concatenated", _cpu.PackedLinear.concat, [narrow, wide])
    refused("^blocks has lines of 35 bytes, .* 34", _cpu.PackedLinear.from_gguf, np.zeros((2, 35), np.uint8), "Q8_0")


def test_gather_names_the_id_out_of_range(packed: _cpu.PackedLinear) -> None:
    refused(r"^ids\[1\] is 8; the weight has rows 0 to 7", packed.gather, torch.tensor([0, 8]), torch.zeros(2, 4))
    refused(r"^ids\[0\] is -1", packed.gather, torch.tensor([-1, 8], dtype=torch.int32), torch.zeros(2, 4))


def test_gated_linear_needs_an_even_number_of_features() -> None:
    refused("^gate_up has 3 output features", _cpu.linear_gated, torch.zeros(1, 4), _cpu.PackedLinear(torch.zeros(3, 4)), torch.zeros(1, 1))


def attention_arguments() -> dict[str, Any]:
    k_cache, v_cache = ops.allocate_kv(4, 2, 16, 8, 8, torch.float32, "cpu")
    return {
        "query": torch.zeros(3, 4, 8),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "context_lens": torch.tensor([20, 5], dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
        "out": torch.zeros(3, 4, 8),
        "scale": 1.0,
    }


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"query": torch.zeros(3, 3, 8)}, "^query has 3 heads, which is no multiple of the 2 heads of k_cache"),
        ({"query": torch.zeros(3, 4, 9)}, "^query must be"),
        ({"out": torch.zeros(3, 4, 9)}, "^out must be"),
        ({"k_cache": torch.zeros(4, 2, 16, 8)}, "^k_cache must be"),
        ({"v_cache": torch.zeros(4, 2, 32, 8)}, "^v_cache must be"),
        ({"v_cache": torch.zeros(4, 2, 16, 8).bfloat16()}, "^v_cache must be float32"),
        ({"context_lens": torch.tensor([20, 5])}, "^context_lens must be int32, got int64"),
        ({"context_lens": torch.tensor([20, 1], dtype=torch.int32)}, r"^context_lens\[1\] is 1, less than the sequence's 2 query tokens"),
        ({"context_lens": torch.tensor([49, 5], dtype=torch.int32)}, "^block_tables has 3 columns; sequence 0 of 49 tokens needs 4"),
        ({"query_start": torch.tensor([0, 1, 4], dtype=torch.int32)}, "^query_start must begin with 0 and end with at most the 3 tokens"),
        ({"query_start": torch.tensor([0, 2, 1], dtype=torch.int32)}, "^query_start decreases at sequence 1"),
        (
            {"block_tables": torch.tensor([[0, 4, 0], [0, 0, 0]], dtype=torch.int32)},
            "^block_tables names block 4 for tokens 16 ff. of sequence 0; the cache has 4",
        ),
        ({"rows": torch.tensor([0, 2], dtype=torch.int32)}, r"^rows\[1\] is 2; block_tables has 2 lines"),
        ({"sinks": torch.zeros(3)}, "^sinks must be"),
        ({"scale": -1.0}, "^scale is -1.000000, not positive"),
        ({"scale": float("nan")}, "^scale is "),
    ],
)
def test_attention_names_the_argument_at_fault(changed: dict[str, Any], match: str) -> None:
    refused(match, _cpu.paged_attention, **(attention_arguments() | changed))


def test_cache_writes_refuse_slots_out_of_range_before_writing_any() -> None:
    k_cache, v_cache = ops.allocate_kv(4, 2, 16, 8, 8, torch.float32, "cpu")
    key = torch.ones(2, 2, 8)
    refused(r"^slots\[1\] is 64; 4 blocks of 16 tokens have slots 0 to 63", ops.write_kv, key, key, k_cache, v_cache, torch.tensor([0, 64]))
    assert not k_cache.any()
    rotation = torch.zeros(2, 4), torch.zeros(2, 4)
    qkv = torch.zeros(2, 8 * 8)
    refused(r"^slots\[0\] is -1", ops.rope_write_kv, qkv, 4, 2, *rotation, k_cache, v_cache, torch.tensor([-1, 3]))
    refused(r"^qkv must be \[T, \(H \+ 2 G\) D\]", ops.rope_write_kv, qkv[:, :-8], 4, 2, *rotation, k_cache, v_cache, torch.tensor([1, 3]))
    refused("^cos rotates 10 dims of heads that have 8", ops.rope, key, torch.zeros(2, 5), torch.zeros(2, 5))


def test_block_copies_refuse_blocks_out_of_range_before_copying_any() -> None:
    cache = torch.arange(8.0).view(4, 2)
    refused("^targets names block 4; a cache has 4", ops.copy_blocks, [cache], torch.tensor([0, 1]), torch.tensor([1, 4]))
    assert torch.equal(cache, torch.arange(8.0).view(4, 2))


def test_a_block_size_or_dtype_the_kernels_lack_is_refused_at_allocation() -> None:
    refused("block_size is 24; the CPU kernels need a multiple of 16", ops.allocate_kv, 1, 1, 24, 8, 8, torch.float32, "cpu")
    refused("dtype is torch.float16", ops.allocate_kv, 1, 1, 16, 8, 8, torch.float16, "cpu")


def test_elementwise_kernels_name_the_argument() -> None:
    x = torch.zeros(2, 6)
    refused(r"^weight must be \[dim\] = \[6\], got \[5\]", _cpu.rms_norm, x, torch.zeros(5), 1e-5, x)
    refused("^residual must be", _cpu.add_rms_norm, x, torch.zeros(2, 5), torch.zeros(6), 1e-5, x)
    refused("^bias must be", _cpu.layer_norm, x, torch.zeros(6), torch.zeros(5), 1e-5, x)
    refused("^gate_up has an odd number of columns: 5", _cpu.gated, torch.zeros(2, 5), x)
    refused("^out must be int32", _cpu.argmax, x, torch.zeros(2, dtype=torch.long))
    refused("^logits has no columns", _cpu.argmax, torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("size", [0, 1, 5, (3 << 20) + 7])
def test_populate_keeps_what_an_array_holds(size: int) -> None:
    array = torch.arange(size + 2, dtype=torch.int32)
    assert _cpu.populate(array[1 : size + 1])
    assert torch.equal(array, torch.arange(size + 2, dtype=torch.int32))


def test_populate_takes_whole_arrays_only() -> None:
    refused("^array must be contiguous", _cpu.populate, torch.zeros(4, 4).T[:, :2])


def test_a_cache_is_zero_and_has_memory_only_when_it_is_populated() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    before = resident()
    k, v = ops.allocate_kv(256, 8, 16, 512, 512, torch.float32, "cpu")
    nbytes = k.nbytes + v.nbytes
    assert nbytes == 128 << 20 and resident() - before < nbytes / 4
    k[3] = 7
    assert _cpu.populate(k) and _cpu.populate(v)
    assert resident() - before > nbytes * 3 / 4
    assert (k[3] == 7).all() and not k[4:].any() and not k[:3].any() and not v.any()

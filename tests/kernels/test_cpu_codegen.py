"""The compiler kept the accumulators of the micro-kernels in registers: no innermost loop stores a vector to the stack, or hardly any.

GCC has put such arrays on the stack before, at half the speed, without a word. This looks at the loops themselves.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from twinplane.kernels import _cpu

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*?)>:\n(.*?)(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(.*)$", re.MULTILINE)
_JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")


def innermost_loop(body: str) -> list[str]:
    """The shortest backward jump's instructions that multiply and add, floats or integers."""
    instructions = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(body)]
    loops = []
    for address, text in instructions:
        jump = _JUMP.match(text)
        if jump and int(jump[1], 16) < address:
            loop = [each for at, each in instructions if int(jump[1], 16) <= at <= address]
            if any(re.match(r"vfmadd|vpdpbusd|vpmaddubsw|vdpbf16ps", each) for each in loop):
                loops.append(loop)
    return min(loops, key=len, default=[])


@pytest.fixture(scope="module")
def strips() -> list[tuple[str, list[str]]]:
    """(name, innermost loop) of every micro-kernel in the module."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", "-C", str(_cpu.__file__)], capture_output=True, text=True, check=True)
    found = [(name, innermost_loop(body)) for name, body in _FUNCTION.findall(listing.stdout) if "_strip<" in name]
    if not found:
        pytest.skip("the module was stripped of its symbols")
    return found


def _of(strips: list[tuple[str, list[str]]], isa: str) -> Iterator[tuple[str, list[str]]]:
    return ((name, loop) for name, loop in strips if f"::{isa}::" in name)


@pytest.mark.parametrize(("isa", "register"), [("avx512_bf16", "%zmm"), ("avx512", "%zmm"), ("avx2", "%ymm")])
def test_no_vector_leaves_its_register_inside_a_micro_kernel(strips: list[tuple[str, list[str]]], isa: str, register: str) -> None:
    checked = 0
    for name, loop in _of(strips, isa):
        assert loop, f"{name} has no loop of multiply-adds"
        spilled = [text for text in loop if re.search(rf"{register}\d+,[-0-9a-fx]*\(%r[sb]p", text)]  # stores; reloading a constant is fine
        # The loops over quantized numbers hold scales, masks and unpacked numbers beside the sums: there a few stores hide behind the
        # products.
        allowed = len(loop) // 8 if re.search(r"integer_strip<|quantized_strip<|Fp8, 6,", name) else 0
        assert len(spilled) <= allowed, f"{name}: {spilled}"
        checked += 1
    if isa in _cpu.supported_isas():
        assert checked > (20 if isa == "avx512_bf16" else 50)  # that one has attention only


def test_the_widest_strip_is_nearly_all_multiply_adds(strips: list[tuple[str, list[str]]]) -> None:
    loops = [loop for name, loop in _of(strips, "avx512") if re.search(r"dense_strip<12, 64l?, float>", name)]
    if not loops:
        pytest.skip("not an x86 build")
    fused = sum("vfmadd" in text for text in loops[0])
    assert fused >= 24 and len(loops[0]) <= 2 * fused

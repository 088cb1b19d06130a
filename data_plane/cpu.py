"""The CPU device: hidden states in float32; weights as float32, bfloat16 or GGUF blocks; KV as float32, bfloat16 or FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.config import DataPlaneError
from twinplane.data_plane.device import Device
from twinplane.data_plane.host import HostMemory, cpus_granted, host_memory
from twinplane.data_plane.kv_cache import KV_DTYPES, KVCache, KVSpec
from twinplane.data_plane.models.base import QUANTIZATIONS, BuildContext, Model, WeightFormat
from twinplane.kernels import reference, registry
from twinplane.shared.model_files import ModelCard

_EXACT = "arithmetic is float32"
_NO_HALF = "float16 is not computed on CPUs: use float32 (exact for float16 weights), or bfloat16 (half the memory, coarser values)"


_PIECE_BYTES = 2 << 20  # made ready at a time: a huge page. A step that comes meanwhile waits
_LEAD = 1.25  # as many bytes are made ready as new blocks can need at most, and a quarter more


class CpuDevice(Device):
    """`threads` None = as many as affinity mask and cgroup quota grant. `kernels` forces one implementation."""

    name = "cpu"

    def __init__(self, threads: int | None = None, kernels: str | None = None) -> None:
        self.threads = threads or cpus_granted()
        self.ops = registry.select(self.name, kernels)
        self._native = self.ops.sources["linear"] != reference.__name__
        self._model: Model
        self._cache: KVCache
        self._swapped: KVCache  # the host's pool
        self._unsettled: Iterator[bool] = iter(())
        torch.set_num_threads(self.threads)
        if self._native:
            from twinplane.kernels import _cpu

            _cpu.set_threads(self.threads)

    def describe(self) -> str:
        return f"{self.threads} threads; {self.ops.describe()}"

    def memory(self) -> HostMemory:
        return host_memory()

    def choose_format(
        self, requested: str, card: ModelCard, *, native: bool, quantization: str = "none", activations: str = "float"
    ) -> WeightFormat:
        chosen = self._plain_format(requested, card, native=native)
        if quantization != "none":
            chosen = self._quantized(quantization, requested, card, native=native)
        if activations == "int8":
            if not (self._native and (chosen.keep_blocks or chosen.quantization)):
                raise DataPlaneError(
                    f"cpu_activations int8 is for weights of 4 to 8 bits and the native kernels; these are kept as {chosen.name}: "
                    "use a GGUF file with dtype auto, or --quantization q8 or q4, or --cpu-activations float"
                )
            return replace(chosen, activations="int8", reason=chosen.reason.replace(_EXACT, "activations are rounded to 8 bits"))
        return chosen

    def _quantized(self, quantization: str, requested: str, card: ModelCard, *, native: bool) -> WeightFormat:
        if requested != "auto":
            raise DataPlaneError(f"dtype {requested} and quantization {quantization} both say how weights are held: give one of them")
        if card.format == "gguf":
            raise DataPlaneError(f"quantization {quantization} is for safetensors: {card.path} keeps the numbers it has")
        if not native:
            raise DataPlaneError(
                f"quantization {quantization} is for models that run on the native kernels; {card.architecture} runs through transformers: "
                "use dtype float32 or bfloat16"
            )
        layers, vocabulary = QUANTIZATIONS[quantization]
        reason = f"as asked: layers are rounded to {layers}, embedding and head to {vocabulary}; {_EXACT}"
        return WeightFormat(torch.float32, False, reason, quantization)

    def _plain_format(self, requested: str, card: ModelCard, *, native: bool) -> WeightFormat:
        if requested == "auto":
            return self._stored_format(card, native=native)
        if requested == "float32":
            return WeightFormat(torch.float32, False, "as asked")
        if requested == "float16":
            raise DataPlaneError(f"dtype float16 was asked for: {_NO_HALF}")
        if requested != "bfloat16":
            raise DataPlaneError(f"dtype {requested!r} is unknown: use auto, float32 or bfloat16")
        if native:
            reason = "as asked: storage only, arithmetic is float32"
        elif torch.cpu._is_avx512_bf16_supported():
            reason = "as asked; this processor computes bfloat16 (AVX512-BF16 or AMX)"
        else:
            reason = "as asked, but this processor lacks AVX512-BF16 and AMX: expect several times float32's time per token"
        return WeightFormat(torch.bfloat16, False, reason)

    def _stored_format(self, card: ModelCard, *, native: bool) -> WeightFormat:
        """What the files hold, kept exactly, as narrow as the kernels can read it."""
        if native and self._native and card.format == "gguf":
            return WeightFormat(torch.float32, True, f"auto: blocks of 4 to 8 bits stay as the file has them, exactly; {_EXACT}")
        if native and self._native and card.dtype == "bfloat16":
            return WeightFormat(torch.bfloat16, False, "auto: the files hold bfloat16, which is kept as it is; arithmetic is float32")
        reason = f"auto: the files hold {card.dtype or 'an unnamed dtype'}, and this device computes in float32"
        return WeightFormat(torch.float32, False, reason)

    def choose_kv_dtype(self, requested: str, activations: str = "float") -> torch.dtype:
        if requested == "auto":  # beside activations of 8 bits, no rounding to bfloat16 is seen in the answers
            return torch.bfloat16 if activations == "int8" else torch.float32
        if requested not in KV_DTYPES:
            raise DataPlaneError(f"kv_cache_dtype {requested!r} is not supported on CPUs: use {', '.join(KV_DTYPES)} or auto")
        if requested == "fp8_e4m3" and self.ops.sources["allocate_kv"] == reference.__name__:
            raise DataPlaneError("kv_cache_dtype fp8_e4m3 needs the native kernels, which are not in use: use float32 or bfloat16")
        return KV_DTYPES[requested]

    def load(self, model: type[Model], context: BuildContext) -> Model:
        with torch.inference_mode():
            self._model = model.build(context)
        if self._native and model.computes_with_kernels:
            torch.set_num_threads(1)  # the kernels have a pool of their own; two pools would fight for the same cores
        return self._model

    def allocate_kv(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> None:
        with torch.inference_mode():
            self._cache = KVCache(spec, num_blocks, self.ops, self.name)
            self._swapped = KVCache(spec, num_host_blocks, self.ops, self.name)
        if self._native:
            self._unsettled = self._populate()
            self._bytes_per_token, self._ready_bytes, self._needed_bytes = spec.bytes_per_token, 0, 0.0

    def settle(self) -> bool:
        return next(self._unsettled, False)

    def _populate(self) -> Iterator[bool]:
        """Have memory behind the pools, piece by piece: clearing gigabytes takes the system seconds. The blocks that are given out first
        come first, of all layers."""
        from twinplane.kernels import _cpu

        for pool in (self._cache, self._swapped):
            arrays = [torch.split(array.view(-1), _PIECE_BYTES // array.itemsize) for array in (*pool.k, *pool.v)]
            for pieces in zip_longest(*arrays):
                for piece in pieces:
                    if piece is None or piece.nbytes == 0:
                        continue
                    if not _cpu.populate(piece):
                        return
                    self._ready_bytes += piece.nbytes
                    yield True

    def _stay_ahead(self, tokens: int) -> None:
        """Where there is always something to compute, `settle` is hardly called. Then memory comes with the steps, as fast as they can
        use it up: else a step that is the first to write to new memory waits for all layers' pages at once."""
        self._needed_bytes += _LEAD * tokens * self._bytes_per_token
        while self._ready_bytes + _PIECE_BYTES <= self._needed_bytes and self.settle():
            pass

    def forward(self, batch: Batch) -> Tensor:
        if self._native:
            self._stay_ahead(batch.num_tokens)
        return self._model.forward(batch, self._cache)

    def swap_out(self, swaps: NDArray[Any]) -> None:
        with torch.inference_mode():
            self._cache.copy_to(self._swapped, _ids(swaps, "device"), _ids(swaps, "host"))

    def swap_in(self, swaps: NDArray[Any]) -> None:
        with torch.inference_mode():
            self._swapped.copy_to(self._cache, _ids(swaps, "host"), _ids(swaps, "device"))

    def copy_blocks(self, copies: NDArray[Any]) -> None:
        with torch.inference_mode():
            self._cache.copy_blocks(_ids(copies, "source"), _ids(copies, "target"))


def _ids(moves: NDArray[Any], end: str) -> Tensor:
    """One end of copies or swaps, as the kernels index with."""
    return torch.from_numpy(moves[end].astype(np.int64))

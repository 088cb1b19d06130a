"""One step as the models see it: all scheduled sequences flattened, no padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, R of which sample. Tensors lie on the device.

    Sequence i owns tokens query_start[i] : query_start[i+1]; they are the last of its context of
    context_lens[i] tokens. ``sample_tokens`` are the flat indices of the tokens whose logits are wanted, each once, in ascending order.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset, where the token's KV goes
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, M] int32
    sample_tokens: Tensor  # [R] int64

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_samples(self) -> int:
        return self.sample_tokens.shape[0]

"""From settings to the scheduler's configuration; the server and the simulator have it from here."""

from __future__ import annotations

from twinplane.shared.config import ControlPlaneSettings

from . import _core


def core_config(settings: ControlPlaneSettings, *, max_model_len: int) -> _core.CoreConfig:
    """Raises ValueError naming the option, its value and what to change."""
    return _core.CoreConfig(
        max_rows=settings.max_num_seqs,
        max_step_tokens=settings.max_num_batched_tokens,
        max_chunk_tokens=settings.max_chunk_tokens,
        depth=settings.overlap_depth,
        max_substeps=settings.max_substeps,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_model_len=max_model_len,
        itl_target_us=round(settings.itl_target_ms * 1e3),
        policy=settings.policy,
        tenant_weights=settings.weights(),
        max_overtaken=settings.most_overtaken(),
    )

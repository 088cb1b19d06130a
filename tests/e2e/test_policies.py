"""Fair share and the latency target on a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from twinplane.benchmarks import interference
from twinplane.benchmarks.server import Server
from twinplane.client import AsyncClient

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def test_C5_a_tenant_that_floods_the_server_does_not_hold_up_another(model: Path, tmp_path: Path) -> None:
    options = ["--policy", "fair", "--max-num-seqs", "2", "--kv-cache-bytes", "64MiB"]
    finished: list[str] = []
    with Server(model, *options, log=tmp_path / "server.log") as server:

        async def ask(client: AsyncClient, tenant: str, salt: int) -> None:
            prompt = [100 + salt, *range(200, 220)]
            result = await client.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True)
            assert len(result.token_ids) == 30
            finished.append(tenant)

        async with AsyncClient(server.address, tenant="flood") as flood, AsyncClient(server.address, tenant="polite") as polite:
            crowd = [asyncio.create_task(ask(flood, "flood", i)) for i in range(12)]
            while (await flood.load()).running_requests < 2:
                await asyncio.sleep(0.02)
            await ask(polite, "polite", 99)
            await asyncio.gather(*crowd)
    assert finished.index("polite") <= 4, "behind those that were running, and whoever came in beside it"


def test_C6_long_prompts_beside_streams_are_measured_against_the_target() -> None:
    """Figures of a busy machine prove nothing, so none is judged here; `twinplane bench interference` is for a quiet one."""
    figures = interference.run(itl_target_ms=2000, streams=2, stream_tokens=24, prompt_tokens=300, period_ms=500)
    assert figures["errors"] == 0 and figures["itl_target_ms"] == 2000
    assert isinstance(figures["step_margin"], float) and figures["step_margin"] > 1
    assert isinstance(figures["long_prompts_arrived"], int) and figures["long_prompts_arrived"] >= 1
    assert isinstance(figures["over_itl_target"], float) and 0 <= figures["over_itl_target"] <= 1

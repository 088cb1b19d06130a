"""Sessions with data planes: handshake, segment, watch, end (PROTOCOL.md, sections 2 and 6).

The :class:`SessionManager` owns the instance's lock and lifeline. For each data plane in turn it creates a
segment, attaches the core to it, and watches until the data plane is gone; then the core takes everything
that ran back, to be recomputed by the next one. Clients notice a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Protocol

from twinplane.shared import log, messages
from twinplane.shared.lifeline import DataPlaneLink, LifelineServer
from twinplane.shared.liveness import Liveness, PeerWatch
from twinplane.shared.segment import InstanceLock, SegmentError, create_segment
from twinplane.shared.wire import Phase

from . import _core
from .types import EngineInfo, EngineState

_WATCH_PERIOD_S = 0.02  # PeerWatch then sees a death within 100 ms
_REPORT_AFTER_S = 5.0  # in one phase: worth a word in the log
_REPORT_PERIOD_S = 1.0
_DRAIN_WAIT_S = 2.0  # for the data plane to finish its step and hang up

logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a data plane must agree with before its tokens may answer for our tokenizer's."""

    fingerprint: str
    vocab_size: int | None
    max_model_len: int  # the model's limit, or the operator's if lower


class StateListener(Protocol):
    """Who wants to know how the session goes: the engine."""

    def session_changed(self, state: EngineState, info: EngineInfo | None = None) -> None: ...


class SessionManager:
    """Runs sessions one after the other until :meth:`close`.

    Args:
        core: attached, activated and detached here.
        config: what the core was built with.
        listener: told of every change of state.
        model: a data plane that serves something else is refused.
        instance: name that pairs the planes.
        timeout: seconds a data plane may stand still before it is ended.
    """

    def __init__(
        self,
        core: _core.EngineCore,
        config: _core.CoreConfig,
        listener: StateListener,
        *,
        model: ModelIdentity,
        instance: str,
        max_step_tokens: int,
        max_chunk_tokens: int,
        timeout: float,
    ) -> None:
        self._core = core
        self._config = config
        self._listener = listener
        self._model = model
        self._instance = instance
        self._max_step_tokens = max_step_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._timeout = timeout
        self._lock = InstanceLock(instance)
        self._server = LifelineServer(self._lock.names.socket)
        self._link: DataPlaneLink | None = None
        self._closing = False
        self._ended = asyncio.Event()  # no session is on
        self._ended.set()
        self._state = EngineState.WAITING  # of the session, leaving stalls aside
        self._reports = log.Limiter(_REPORT_PERIOD_S)
        # Epochs of all owners of the instance differ: they grow within one, and start from the clock.
        self._epoch = time.time_ns()

    def open(self) -> None:
        """Take the instance over and listen for data planes.

        Raises InstanceInUseError, SegmentError.
        """
        self._lock.acquire()
        self._server.start()

    async def run(self) -> None:
        """Serve sessions until :meth:`close`. Raises SegmentError when a segment can not be had."""
        async for link in self._server:
            self._link = link
            self._ended.clear()
            try:
                await self._session(link)
            finally:
                link.close()
                self._link = None
                self._ended.set()

    async def close(self) -> None:
        """Ask the data plane to exit, stop listening and give the instance up. Idempotent. The core must still run."""
        self._closing = True
        if self._link is not None:
            self._link.send(messages.Drain())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _DRAIN_WAIT_S)
        self._server.close()
        await self._ended.wait()
        self._lock.release()

    # -------------------------------------------------------------------------------- a session

    async def _session(self, link: DataPlaneLink) -> None:
        hello = link.hello
        objection = self._objection(hello)
        if objection is not None:
            logger.error("data_plane_refused", pid=hello.pid, reason=objection.reason, error=objection.message)
            link.refuse(objection.reason, objection.message)
            return
        await self._attach(link)
        info = self._info(hello)
        logger.info("data_plane_attached", pid=hello.pid, epoch=self._epoch, device=hello.device, dtype=hello.dtype)
        logger.info(
            "kv_cache",
            blocks=hello.num_blocks,
            block_size=hello.block_size,
            dtype=hello.kv_dtype,
            swap_blocks=hello.num_host_blocks,
            max_model_len=info.max_model_len,
        )
        self._enter(EngineState.LOADING, info)
        watch = asyncio.ensure_future(self._watch(link))
        try:
            async for message in link:
                if isinstance(message, messages.Ready):
                    self._core.activate(swap_block_ns=message.swap_block_ns)
                    self._enter(EngineState.READY)
                    logger.info("ready", phases=message.phases, summary=message.summary, swap_block_us=message.swap_block_ns / 1e3)
                elif isinstance(message, messages.Fatal):
                    logger.error("data_plane_failed", error=message.error, detail=message.detail)
        finally:
            watch.cancel()
            await self._detach()

    def _objection(self, hello: messages.Hello) -> messages.Refuse | None:
        """Why this data plane can not serve our model; None if it can."""
        if hello.fingerprint != self._model.fingerprint:
            return messages.Refuse(
                reason="MODEL_MISMATCH",
                message=f"it serves {hello.model} (fingerprint {hello.fingerprint}), the control plane was started for a model "
                f"with fingerprint {self._model.fingerprint}: give both planes the same model",
            )
        if hello.block_size < 1 or hello.num_blocks < 1:
            return messages.Refuse(
                reason=messages.BAD_HELLO, message=f"{hello.num_blocks} blocks of {hello.block_size} tokens is no KV cache"
            )
        return None

    async def _attach(self, link: DataPlaneLink) -> None:
        """Create the session's segment, attach the core, and welcome the data plane."""
        hello = link.hello
        pool = _core.Pool(num_blocks=hello.num_blocks, block_size=hello.block_size, num_host_blocks=hello.num_host_blocks)
        self._epoch += 1
        segment = await asyncio.to_thread(create_segment, self._instance, _core.capacities_for(self._config, pool), self._epoch)
        try:
            await asyncio.to_thread(self._core.attach, segment.fd, segment.capacities, segment.epoch, pool)
        finally:
            segment.close()
        link.send(
            messages.Welcome(
                epoch=segment.epoch,
                segment=segment.name,
                segment_bytes=segment.bytes,
                capacities=tuple(segment.capacities),
                max_step_tokens=self._max_step_tokens,
                max_chunk_tokens=self._max_chunk_tokens,
            )
        )

    async def _detach(self) -> None:
        """Take back what ran. However the data plane ended, a step that was in flight then counts as failed: a segmentation
        fault has no time to say goodbye. A request is only quarantined if it was in two such steps with none completed between."""
        self._enter(EngineState.WAITING)
        await asyncio.to_thread(lambda: self._core.detach(step_failed=True))
        stats = self._core.stats()
        (logger.info if self._closing else logger.warning)(
            "data_plane_gone", to_recompute=stats.waiting, quarantined=stats.finished[_core.FINISH_QUARANTINED]
        )

    def _enter(self, state: EngineState, info: EngineInfo | None = None) -> None:
        self._state = state
        self._listener.session_changed(state, info)

    def _info(self, hello: messages.Hello) -> EngineInfo:
        return EngineInfo(
            device=hello.device,
            dtype=hello.dtype,
            kv_dtype=hello.kv_dtype,
            block_size=hello.block_size,
            num_blocks=hello.num_blocks,
            max_model_len=min(hello.max_model_len, self._model.max_model_len, hello.num_blocks * hello.block_size),
            vocab_size=hello.vocab_size,
            fingerprint=hello.fingerprint,
        )

    # ------------------------------------------------------------------------------------ watch

    async def _watch(self, link: DataPlaneLink) -> None:
        """Judge the data plane by its heartbeat and its phase; end the session of one that stands still too long."""
        watch = PeerWatch("data plane", link.peer_pid, self._pages)
        stalled_since: float | None = None
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            fault = self._core.peer()["fault"]
            if fault:
                logger.error("data_plane_fault", fault=fault)
                _kill(link.peer_pid)
                break
            liveness, now, stuck_s = watch.check(), time.monotonic(), self._seconds_in_step()
            if liveness is Liveness.DEAD:
                logger.error("data_plane_died", pid=link.hello.pid, seen_by="heartbeat")
                break
            if liveness is Liveness.STALLED:
                if stalled_since is None:
                    stalled_since = now
                    self._listener.session_changed(EngineState.STALLED)
                stuck_s = max(stuck_s, now - stalled_since)
            elif stalled_since is not None:
                logger.info("data_plane_recovered", after_s=round(now - stalled_since, 3))
                stalled_since = None
                self._listener.session_changed(self._state)
            if stalled_since is not None or stuck_s > _REPORT_AFTER_S:
                self._reports.log(logger.warning, "stall", report=watch.report())
            if stuck_s > self._timeout:
                logger.error("data_plane_timeout", timeout_s=self._timeout, report=watch.report())
                _kill(link.peer_pid)
                break
        link.close()

    def _pages(self) -> tuple[dict[str, int], dict[str, int]]:
        pages: dict[str, dict[str, int]] = self._core.peer()
        return pages["data"], pages["control"]

    def _seconds_in_step(self) -> float:
        """How long the data plane has been in one phase of a step; 0 while it starts or waits for us."""
        data, _ = self._pages()
        if data["phase"] in (Phase.STARTING, Phase.IDLE, Phase.STOPPED):
            return 0.0
        return (time.monotonic_ns() - data["phase_since_ns"]) / 1e9


def _kill(pid: int) -> None:
    """kill -9 a data plane that does not answer, or answers nonsense. Its pid is from SO_PEERCRED; 0: in another PID namespace."""
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


__all__ = ["ModelIdentity", "SegmentError", "SessionManager", "StateListener"]

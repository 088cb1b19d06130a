"""The control-plane process: model facts, gRPC server, engine, sessions; and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import uvloop
from twinplane.shared import log, supervision
from twinplane.shared.config import ConfigError, ControlPlaneSettings
from twinplane.shared.model_files import ModelCard, ModelFileError, fingerprint, read_model_card, resolve_model
from twinplane.shared.segment import InstanceInUseError, SegmentError

from . import _core
from .core_config import core_config
from .engine import Engine
from .grpc_server.server import BindError, GrpcServer
from .sessions import ModelIdentity, SessionManager
from .text.model import ServedModel
from .text.tokenizer import TokenizerError, load_tokenizer
from .types import EngineState

logger = log.get_logger(__name__)


def run(settings: ControlPlaneSettings) -> int:
    """Serve until a signal; returns the process's exit code. Raises ConfigError for what the operator must change."""
    try:
        code: int = uvloop.run(ControlPlane(settings).serve())
        return code
    except (ModelFileError, TokenizerError, BindError, InstanceInUseError, SegmentError) as error:
        raise ConfigError([str(error)]) from error


def address_of(settings: ControlPlaneSettings) -> str:
    """The address to listen on, as gRPC writes it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    return f"[{settings.host}]:{settings.port}" if ":" in settings.host else f"{settings.host}:{settings.port}"


def model_limit(card: ModelCard, asked: int | None) -> int:
    """Longest sequence in tokens: the model's limit, or what the operator asked for. Raises ConfigError."""
    if card.max_model_len is None and asked is None:
        raise ConfigError(["max-model-len: the model's files do not say how long a sequence may be: give --max-model-len"])
    if card.max_model_len is not None and asked is not None and asked > card.max_model_len:
        raise ConfigError([f"max-model-len is {asked}, but the model goes up to {card.max_model_len}: lower it"])
    limit = asked if asked is not None else card.max_model_len
    assert limit is not None
    return limit


class ControlPlane:
    """Everything in the process, built in order and taken down in reverse."""

    def __init__(self, settings: ControlPlaneSettings) -> None:
        self._settings = settings
        self._signals = 0
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()

    async def serve(self) -> int:
        """Run until SIGTERM or SIGINT (then drain), a second one (then stop at once), or a fatal error."""
        settings = self._settings
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        card = read_model_card(resolve_model(settings.model))
        for warning in card.warnings:
            logger.warning("model_files", warning=warning)
        limit = model_limit(card, settings.max_model_len)
        model = await asyncio.to_thread(self._load_model, card)
        config = core_config(settings, max_model_len=limit)
        core = _core.EngineCore(config)
        engine = Engine(core, eos_token_ids=card.eos_token_ids, max_model_len=limit, seed=settings.seed, policy=settings.policy)
        sessions = SessionManager(
            core,
            config,
            engine,
            model=ModelIdentity(fingerprint(card), card.vocab_size, limit),
            instance=settings.instance,
            max_step_tokens=settings.max_num_batched_tokens,
            max_chunk_tokens=settings.max_chunk_tokens,
            timeout=settings.data_plane_timeout,
        )
        server = GrpcServer(engine, model, instance_id=settings.instance)
        async with contextlib.AsyncExitStack() as stack:
            engine.start()
            stack.push_async_callback(engine.stop)
            sessions.open()  # before anything can be seen: a second control plane must leave the first alone
            stack.push_async_callback(sessions.close)
            await server.start(address_of(settings))
            stack.push_async_callback(server.stop)
            await self._until_stopped(engine, sessions, server)
        logger.info("stopped")
        return 0

    def _load_model(self, card: ModelCard) -> ServedModel:
        settings = self._settings
        tokenizer = load_tokenizer(settings.tokenizer or card.path, chat_template=settings.chat_template)
        name = settings.served_model_name or Path(settings.model).name.removesuffix(".gguf")
        return ServedModel.of(card, tokenizer, name=name)

    async def _until_stopped(self, engine: Engine, sessions: SessionManager, server: GrpcServer) -> None:
        """Serve; return once everything may be taken down. Raises what ended the sessions."""
        announcing = asyncio.create_task(_announce_ready(engine))
        serving = asyncio.create_task(sessions.run())
        try:
            await _either(serving, asyncio.create_task(self._first_signal.wait()))
            if serving.done():
                serving.result()
            logger.info("draining", delay_s=self._settings.drain_delay, grace_s=self._settings.drain_grace)
            await _either(asyncio.create_task(self._drain(server)), asyncio.create_task(self._second_signal.wait()))
        finally:
            announcing.cancel()

    async def _drain(self, server: GrpcServer) -> None:
        server.withdraw()
        await asyncio.sleep(self._settings.drain_delay)
        unfinished = await server.drain(self._settings.drain_grace)
        if unfinished:
            logger.warning("drain_cut_short", unfinished_requests=unfinished)

    def _on_signal(self) -> None:
        self._signals += 1
        (self._first_signal if self._signals == 1 else self._second_signal).set()


async def _announce_ready(engine: Engine) -> None:
    async for state in engine.watch_state():
        if state is EngineState.READY:
            supervision.notify_ready()


async def _either(work: asyncio.Task[None], stop: asyncio.Task[Any]) -> None:
    """Wait until one of the two is done."""
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()

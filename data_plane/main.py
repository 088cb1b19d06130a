"""The data plane's process: plan memory, attach, load, serve; attach again when the control plane went away.

`run` returns an exit code. Weights and KV cache outlive a session: only rows belong to one (shared/PROTOCOL.md, section 6).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.config import DataPlaneConfig, DataPlaneError
from twinplane.data_plane.cpu import CpuDevice
from twinplane.data_plane.device import Device
from twinplane.data_plane.kv_cache import KVSpec, choose_block_size, kv_dtype_name
from twinplane.data_plane.loader import WeightSource, open_weights
from twinplane.data_plane.memory import MemoryPlan, Needs, make_plan
from twinplane.data_plane.models.base import BuildContext, Model, ModelShape, WeightFormat
from twinplane.data_plane.models.registry import model_class, text_config
from twinplane.data_plane.moves import measure_swap_ns
from twinplane.data_plane.worker import StepFailedError, Worker
from twinplane.shared import messages, supervision, wire
from twinplane.shared._shm import DataEnd, ProtocolError
from twinplane.shared.lifeline import LifelineClient, LifelineError, RefusedError
from twinplane.shared.liveness import process_start_time
from twinplane.shared.log import get_logger
from twinplane.shared.model_files import ModelCard, ModelFileError, fingerprint, read_model_card, resolve_model
from twinplane.shared.segment import SegmentError, instance_names, open_segment

log = get_logger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
_PROGRESS_INTERVAL_S = 0.25
_WARM_UP_TOKENS = (1, 16, 64)  # step sizes run once before `ready`, so that no request pays for first-time work


def run(config: DataPlaneConfig, stop: threading.Event | None = None) -> int:
    """Serve until drained or told to stop (`stop`, SIGTERM, SIGINT). Every failure leaves one sentence in the log."""
    stop = stop or threading.Event()
    try:
        with _stop_on_signals(stop):
            return DataPlane(config, stop).serve()
    except (DataPlaneError, ModelFileError, SegmentError, LifelineError, ProtocolError) as error:
        log.critical("failed", error=str(error))
    except StepFailedError as error:
        log.critical("step_failed", error=str(error), exc_info=True)
    return EXIT_FAILED


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of the model before its weights are read."""

    card: ModelCard
    config: Any
    cls: type[Model]
    shape: ModelShape
    format: WeightFormat
    fingerprint: str


class DataPlane:
    """Device, weights and KV cache of this process, and the sessions they serve one after the other."""

    def __init__(self, config: DataPlaneConfig, stop: threading.Event) -> None:
        self._config = config
        self._stop = stop
        self._names = instance_names(config.instance)
        self._device = _make_device(config)
        log.info("device", device=self._device.name, details=self._device.describe())
        self._model = self._inspect()
        self._source: WeightSource | None = open_weights(self._model.card)  # damaged files are found before anything is attached
        self._plan = self._make_plan(self._source)
        self._loaded = False
        self._swap_block_ns = 0  # measured once loaded

    # ------------------------------------------------------------------------------------------- plan

    def _inspect(self) -> _Model:
        card = read_model_card(resolve_model(self._config.model))
        for warning in card.warnings:
            log.warning("model_files", warning=warning)
        cls = model_class(card)
        config = text_config(card)
        shape = cls.shape(config)
        chosen = self._device.choose_format(
            self._config.dtype,
            card,
            native=cls.computes_with_kernels,
            quantization=self._config.quantization,
            activations=self._config.cpu_activations,
        )
        log.info("model", path=str(card.path), architecture=card.architecture, implementation=cls.__name__)
        log.info("dtype", weights=chosen.name, reason=chosen.reason)
        log.info("end_of_sequence", token_ids=card.eos_token_ids)
        return _Model(card, config, cls, shape, chosen, fingerprint(card))

    def _make_plan(self, source: WeightSource) -> MemoryPlan:
        model, config = self._model, self._config
        kv_dtype = self._device.choose_kv_dtype(config.kv_cache_dtype, model.format.activations)
        block_size = config.block_size or choose_block_size(max(layer.head_dim for layer in model.shape.layers), kv_dtype)
        max_model_len = self._max_model_len()
        activations = config.max_num_batched_tokens * model.shape.activation_elements_per_token
        logits = 3 * config.max_num_seqs * model.shape.vocab_size  # the head's output, and a row's working copies
        needs = Needs(
            weights=model.format.bytes_held(model.shape, source),
            workspace=4 * (activations + logits),
            max_model_len=max_model_len,
            max_model_len_given=config.max_model_len is not None,
            useful_tokens=config.max_num_seqs * max_model_len,
        )
        plan = make_plan(self._device.memory(), config, KVSpec(model.shape.layers, kv_dtype, block_size), needs)
        log.info("memory_plan", plan=plan.describe(), weight_files_bytes=source.total_bytes)
        if plan.max_model_len < max_model_len:
            log.warning("max_model_len_reduced", trained_for=max_model_len, kv_cache_holds=plan.max_model_len)
        return plan

    def _max_model_len(self) -> int:
        """The model's own limit, or what the operator asks for within it."""
        limits = [limit for limit in (self._model.card.max_model_len, self._model.shape.max_positions) if limit]
        asked, limit = self._config.max_model_len, min(limits, default=None)
        if limit is None:
            if asked is None:
                raise DataPlaneError(f"{self._model.card.path} does not say how long sequences may be: give --max-model-len")
            return asked
        if asked is not None and asked > limit:
            raise DataPlaneError(
                f"max_model_len is {asked}, but the model has positions for {limit} tokens: lower --max-model-len, "
                "or use a checkpoint whose config scales its rotary positions (rope_parameters)"
            )
        return asked or limit

    # --------------------------------------------------------------------------------------- sessions

    def serve(self) -> int:
        """Session after session. Returns the exit code; raises what `run` turns into one."""
        while not self._stop.is_set():
            try:
                lifeline = LifelineClient.connect(self._names.socket, stop=self._stop, on_wait=self._log_waiting)
            except LifelineError:
                if self._stop.is_set():
                    break
                raise
            try:
                self._session(lifeline)
            except RefusedError:
                raise
            except LifelineError as error:
                log.warning("attach_failed", error=str(error))  # it died meanwhile: wait for its successor
                self._stop.wait(0.1)
            finally:
                lifeline.close()
            if lifeline.draining.is_set():
                log.info("drained")
                return EXIT_OK
        return EXIT_OK

    def _session(self, lifeline: LifelineClient) -> None:
        welcome = lifeline.handshake(self._hello())
        end = _open_rings(welcome)
        try:
            end.set_phase(wire.Phase.STARTING, 0)
            end.start_heartbeat()
            lifeline.watch(end.wake)

            def stopped() -> bool:
                return lifeline.lost.is_set() or lifeline.draining.is_set() or self._stop.is_set()

            self._become_ready(lifeline)
            self._serve_session(lifeline, end, stopped)
        finally:
            end.close()
        if lifeline.lost.is_set() and not lifeline.draining.is_set():
            log.warning("control_plane_gone", epoch=welcome.epoch)

    def _serve_session(self, lifeline: LifelineClient, end: DataEnd, stopped: Callable[[], bool]) -> None:
        worker = Worker(
            self._device,
            end,
            block_size=self._plan.spec.block_size,
            num_blocks=self._plan.num_blocks,
            num_host_blocks=self._plan.num_host_blocks,
            max_model_len=self._plan.max_model_len,
            vocab_size=self._model.shape.vocab_size,
        )
        try:
            worker.run(stopped)
        except StepFailedError as error:
            lifeline.send(messages.Fatal(error=str(error), detail=traceback.format_exc()))
            raise

    def _become_ready(self, lifeline: LifelineClient) -> None:
        """Load if this is the first session; then say so."""
        phases: dict[str, float] = {}
        if not self._loaded:
            try:
                phases = self._load(lifeline)
            except Exception as error:
                lifeline.send(messages.Fatal(error=_sentence(error), detail=traceback.format_exc()))
                raise
            self._loaded = True
        summary = f"{self._model.card.architecture}, {self._model.format.name}, {self._plan.kv_tokens} KV tokens"
        lifeline.send(messages.Ready(phases=phases, summary=summary, swap_block_ns=self._swap_block_ns))
        supervision.notify_ready()
        log.info("ready", phases=phases, summary=summary, swap_block_us=self._swap_block_ns / 1e3)

    def _hello(self) -> messages.Hello:
        plan, pid = self._plan, os.getpid()
        return messages.Hello(
            layout_hash=f"{wire.LAYOUT_HASH:x}",
            pid=pid,
            start_time=process_start_time(pid),
            device=self._device.name,
            model=self._config.model,
            fingerprint=self._model.fingerprint,
            block_size=plan.spec.block_size,
            num_blocks=plan.num_blocks,
            num_host_blocks=plan.num_host_blocks,
            kv_dtype=kv_dtype_name(plan.spec.dtype),
            dtype=self._model.format.name,
            kv_bytes_per_block=plan.spec.bytes_per_block,
            max_model_len=plan.max_model_len,
            vocab_size=self._model.shape.vocab_size,
            num_layers=len(self._model.shape.layers),
            loaded=self._loaded,
        )

    # ------------------------------------------------------------------------------------------- load

    def _load(self, lifeline: LifelineClient) -> dict[str, float]:
        """Weights, KV cache, warm-up. Returns the seconds each phase took."""
        phases: dict[str, float] = {}
        with _timed(phases, "weights"):
            self._load_weights(lifeline)
        with _timed(phases, "kv_cache"):
            lifeline.send(messages.Progress(phase="kv_cache", done=0, total=self._plan.kv_bytes + self._plan.swap_bytes, unit="bytes"))
            self._device.allocate_kv(self._plan.spec, self._plan.num_blocks, self._plan.num_host_blocks)
        with _timed(phases, "warm_up"), torch.inference_mode():
            lifeline.send(messages.Progress(phase="warm_up", done=0, total=len(_WARM_UP_TOKENS), unit="steps"))
            for num_tokens in _WARM_UP_TOKENS:
                if num_tokens <= min(self._plan.kv_tokens, self._plan.max_model_len):
                    self._device.forward(_warm_up_batch(num_tokens, self._plan.spec.block_size))
            self._swap_block_ns = measure_swap_ns(
                self._device, num_blocks=self._plan.num_blocks, num_host_blocks=self._plan.num_host_blocks
            )
        return phases

    def _load_weights(self, lifeline: LifelineClient) -> None:
        model, source = self._model, self._source
        assert source is not None
        context = BuildContext(model.card.path, model.config, source, self._device.ops, model.format, self._plan.max_model_len)
        with _progress(lifeline, "weights", source.total_bytes) as source.on_progress:
            built = self._device.load(model.cls, context)
        if held := built.memory():
            log.info("weights_held", **held)
        for topic, warning in built.warnings().items():
            log.warning("weights", topic=topic, warning=warning)
        if source.unused():
            log.warning("unused_tensors", count=len(source.unused()), tensors=source.unused()[:10])
        self._source = None  # let go of the mapped files

    def _log_waiting(self) -> None:
        log.info("waiting_for_control_plane", socket=str(self._names.socket))


def _make_device(config: DataPlaneConfig) -> Device:
    """Raises DataPlaneError for a device this build has not."""
    if config.device in ("auto", "cpu"):
        return CpuDevice(config.threads, config.kernels)
    raise DataPlaneError(f"device {config.device!r} is not available: use cpu")


def _open_rings(welcome: messages.Welcome) -> DataEnd:
    fd = open_segment(welcome.segment)
    try:
        return DataEnd(fd, welcome.epoch)
    finally:
        os.close(fd)


def _warm_up_batch(num_tokens: int, block_size: int) -> Batch:
    """One sequence of token 0 in the first blocks, whose contents nobody owns yet."""
    positions = torch.arange(num_tokens)
    return Batch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions,
        slots=positions,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.from_numpy(np.arange(-(-num_tokens // block_size), dtype=np.int32)[None]),
        sample_tokens=torch.tensor([num_tokens - 1]),
    )


@contextmanager
def _progress(lifeline: LifelineClient, phase: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Reports how many bytes are done: to the control plane, and on a terminal as a bar."""
    last_sent = 0.0
    with tqdm(total=total, desc=phase, unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def report(done: int, total: int) -> None:
            nonlocal last_sent
            bar.update(done - bar.n)
            now = time.monotonic()
            if now - last_sent >= _PROGRESS_INTERVAL_S or done == total:
                last_sent = now
                lifeline.send(messages.Progress(phase=phase, done=done, total=total, unit="bytes"))

        yield report


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases[name] = round(time.monotonic() - started, 3)


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`: the step in hand is finished, then the loop ends. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _sentence(error: Exception) -> str:
    """Errors meant for people as they are; others with their type."""
    return str(error) if isinstance(error, DataPlaneError) else f"{type(error).__name__}: {error}"

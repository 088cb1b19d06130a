"""OpenVINO GenAI's continuous batching behind a loopback port: ``openvino_worker.py MODEL PORT THREADS PROPERTIES``.

The engine is a library, so this is its server, as thin as can be: one JSON object per connection asks, JSON lines answer with token ids as
each step yields them, and no text is made of them. Closing the connection cancels. Runs with the Python of the environment that OpenVINO is
installed in, and so imports nothing of Twinplane.

    {"prompt": [1, 2], "max_tokens": 8, "samples": 1, "top_k": 40}    ->    {"tokens": [5]} {"tokens": [9, 3]} ... {"done": true}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

_CACHE_GIB = 4
_STEP_TOKENS = 256  # of a step: the library's default, and Twinplane's


@dataclass
class Running:
    """A request on its way: lists of token ids go to ``answers``, None at the end; ``gone`` is set when nobody waits any more."""

    question: dict[str, Any]
    answers: asyncio.Queue[list[int] | None]
    gone: threading.Event
    handle: Any = None

    @property
    def samples(self) -> int:
        return int(self.question["samples"])

    def read(self) -> tuple[list[int], bool]:
        """Tokens since the last call, and whether the request has ended. Several samples are told of at the end only."""
        ended = self.handle.get_status() != genai.GenerationStatus.RUNNING
        tokens: list[int] = []
        if self.samples > 1:
            if ended:
                tokens = [token for output in self.handle.read_all() for token in output.generated_ids]
            return tokens, ended
        while self.handle.can_read():
            for output in self.handle.read().values():
                tokens += output.generated_ids
        return tokens, ended


class Engine:
    """The pipeline and the one thread that may touch it."""

    def __init__(self, model: str, threads: int, properties: dict[str, object]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, **properties})
        self._new: SimpleQueue[Running] = SimpleQueue()
        self._ids = itertools.count()
        threading.Thread(target=self._loop, args=(asyncio.get_running_loop(),), daemon=True).start()

    def submit(self, request: Running) -> None:
        self._new.put(request)

    def _loop(self, loop: asyncio.AbstractEventLoop) -> None:
        running: list[Running] = []
        while True:
            running += self._arrived(wait=not running)
            for request in running:
                if request.gone.is_set():
                    request.handle.cancel()
            self._pipeline.step()
            for request in list(running):
                tokens, ended = request.read()
                if tokens:
                    loop.call_soon_threadsafe(request.answers.put_nowait, tokens)
                if ended:
                    loop.call_soon_threadsafe(request.answers.put_nowait, None)
                    running.remove(request)

    def _arrived(self, *, wait: bool) -> list[Running]:
        """The requests that have come in since; with ``wait`` at least one."""
        arrived: list[Running] = []
        while True:
            try:
                request = self._new.get(block=wait and not arrived)
            except Empty:
                return arrived
            request.handle = self._start(request.question)
            arrived.append(request)

    def _start(self, question: dict[str, Any]) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = question["max_tokens"]
        config.ignore_eos = True
        if question["samples"] > 1:
            config.do_sample = True
            config.temperature = 1.0
            config.top_k = question["top_k"]
            config.num_return_sequences = question["samples"]
        prompt = openvino.Tensor(np.array([question["prompt"]], dtype=np.int64))
        return self._pipeline.add_request(next(self._ids), prompt, config)


async def _serve(model: str, port: int, threads: int, properties: dict[str, object]) -> None:
    engine = Engine(model, threads, properties)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:
            return writer.close()  # somebody looked whether the port is open
        request = Running(json.loads(line), asyncio.Queue(), threading.Event())
        engine.submit(request)
        left = asyncio.ensure_future(reader.read())  # ends when the client closes
        left.add_done_callback(lambda _: request.gone.set())
        while (tokens := await request.answers.get()) is not None:
            writer.write(json.dumps({"tokens": tokens}).encode() + b"\n")
        writer.write(b'{"done": true}\n')
        left.cancel()
        writer.close()
        return None

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 24)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))

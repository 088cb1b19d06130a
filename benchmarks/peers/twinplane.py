"""Twinplane itself, as ``twinplane serve`` with its defaults and the options of a variant; clients get text and token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..load import connect
from ..server import Server
from .engines import Connection, Engine, Missing, Setting
from .weights import weights

_ITL_TARGET_MS = 150  # of W3: the option is what Twinplane offers for that situation


@dataclass(frozen=True)
class Twinplane(Engine):
    variant: str
    precision: str
    weights: str
    options: tuple[str, ...] = ()
    family: str = "twinplane"

    def prepare(self, setting: Setting) -> str:
        try:
            weights(self.weights, setting.directory)
        except FileNotFoundError as error:
            raise Missing(str(error)) from error
        return version("twinplane")

    @contextlib.contextmanager
    def serve(self, workload: str, setting: Setting, log: Path) -> Iterator[Connection]:
        options = ["--threads", str(setting.threads), *self.options]
        if workload == "W3":
            options += ["--itl-target-ms", str(_ITL_TARGET_MS)]
        with Server(weights(self.weights, setting.directory), *options, log=log) as server:
            yield connect(server.address, text=True)


ENGINES = (
    Twinplane("fp32", "fp32", "source", ("--dtype", "float32")),
    Twinplane("8bit", "8-bit", "q8_0.gguf", ("--cpu-activations", "int8")),
    Twinplane("4bit", "4-bit", "source", ("--cpu-activations", "int8")),
    Twinplane("4bit-exact", "4-bit", "source"),
)

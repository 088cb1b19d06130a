"""Python client of Twinplane. Needs only grpcio, protobuf and googleapis-common-protos::

with Client("localhost:50051") as client:
    print(client.chat([{"role": "user", "content": "Hello"}], max_tokens=50).text)
    with client.stream("Once upon a time", max_tokens=50) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
"""

from twinplane.client.aio import AsyncClient, AsyncStream
from twinplane.client.errors import TwinplaneError
from twinplane.client.retry import RetryPolicy
from twinplane.client.sync import Client, Stream
from twinplane.client.types import (
    Chat,
    Delta,
    EarlyStopping,
    Finish,
    GenerateResult,
    Load,
    ModelInfo,
    Options,
    Prompt,
    SequenceResult,
    ServerInfo,
    Timing,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chat",
    "Client",
    "Delta",
    "EarlyStopping",
    "Finish",
    "GenerateResult",
    "Load",
    "ModelInfo",
    "Options",
    "Prompt",
    "RetryPolicy",
    "SequenceResult",
    "ServerInfo",
    "Stream",
    "Timing",
    "TwinplaneError",
    "Usage",
]

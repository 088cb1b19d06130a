"""The public contract and the code generated from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from twinplane.control_plane.grpc_server.engine_service import EngineService
from twinplane.control_plane.grpc_server.server import CONTRACTS
from twinplane.control_plane.grpc_server.service import GenerationService
from twinplane.control_plane.grpc_server.tokenizer_service import TokenizerService
from twinplane.v1 import engine_pb2, generation_pb2, tokenizer_pb2

ROOT = Path(__file__).parent.parent.parent
SERVED = {
    "twinplane.v1.GenerationService": GenerationService,
    "twinplane.v1.TokenizerService": TokenizerService,
    "twinplane.v1.EngineService": EngineService,
}


def services() -> list[ServiceDescriptor]:
    files: list[Any] = [generation_pb2, tokenizer_pb2, engine_pb2]
    return [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]


def test_every_method_of_the_contract_is_served() -> None:
    assert {service.full_name for service in services()} == set(CONTRACTS) == set(SERVED)
    for service in services():
        for method in service.methods:
            assert method.name in vars(SERVED[service.full_name]), f"{service.full_name}.{method.name}"


@pytest.mark.parametrize("name", ["generation", "tokenizer", "engine"])
def test_D11_generated_code_runs_on_the_oldest_runtime_the_metadata_allows(name: str) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (protobuf,) = (re.fullmatch(r"protobuf>=([\d.]+),.*", line) for line in dependencies if line.startswith("protobuf"))
    (grpcio,) = (re.fullmatch(r"grpcio>=([\d.]+),.*", line) for line in dependencies if re.match("grpcio[>=]", line))
    assert protobuf is not None
    assert grpcio is not None
    messages = (ROOT / f"proto/twinplane/v1/{name}_pb2.py").read_text()
    stubs = (ROOT / f"proto/twinplane/v1/{name}_pb2_grpc.py").read_text()
    generator = re.search(r"Protobuf Python Version: ([\d.]+)", messages)
    tools = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs)
    assert generator is not None
    assert tools is not None
    assert generator[1] == protobuf[1]
    assert tools[1] == f"{grpcio[1]}.0"


def test_numbers_of_what_is_planned_are_reserved() -> None:
    source = (ROOT / "proto/twinplane/v1/generation.proto").read_text()
    for planned in ("constraint", "top_logprobs", "prompt_logprobs", "coalesce", "draft_tokens"):
        assert re.search(rf"reserved [^;]*; // .*\b{planned}\b", source), planned

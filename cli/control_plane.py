"""``twinplane control-plane``: the process that decides."""

from __future__ import annotations

import argparse

from twinplane.cli.listen import require_free
from twinplane.cli.plane import plane_parser, run_plane
from twinplane.shared.config import ControlPlaneSettings


def parser(prog: str) -> argparse.ArgumentParser:
    return plane_parser(prog, "Run the control plane: gRPC server, scheduler, tokenizer.", ControlPlaneSettings)


def run(args: argparse.Namespace) -> int:
    return run_plane(args, ControlPlaneSettings, _start)


def _start(settings: ControlPlaneSettings) -> int:
    require_free(settings)
    from twinplane.control_plane.main import run as run_control_plane  # grpc, tokenizers: only once all else is right

    return run_control_plane(settings)

"""``twinplane data-plane``: the process that computes."""

from __future__ import annotations

import argparse
from dataclasses import fields

from twinplane.cli.plane import plane_parser, run_plane
from twinplane.shared.config import DataPlaneSettings


def parser(prog: str) -> argparse.ArgumentParser:
    return plane_parser(prog, "Run the data plane: device, model weights, KV cache.", DataPlaneSettings)


def run(args: argparse.Namespace) -> int:
    return run_plane(args, DataPlaneSettings, _start)


def _start(settings: DataPlaneSettings) -> int:
    from twinplane.data_plane.config import DataPlaneConfig
    from twinplane.data_plane.main import run as run_data_plane  # torch: only once all else is right

    return run_data_plane(DataPlaneConfig(**{field.name: getattr(settings, field.name) for field in fields(DataPlaneConfig)}))

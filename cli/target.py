"""Which server a client command talks to."""

from __future__ import annotations

import argparse

from twinplane.cli.listen import address_of
from twinplane.shared.config import ControlPlaneSettings, read


def add_address(parser: argparse.ArgumentParser) -> None:
    where = "127.0.0.1:50051, or where this environment's TWINPLANE_HOST, _PORT or _UDS have it listen"
    parser.add_argument("--addr", metavar="TARGET", help=f"HOST:PORT or unix:PATH of the server ({where})")


def target_of(args: argparse.Namespace) -> str:
    """``--addr``, else where a server configured by this environment would listen. Raises ConfigError."""
    if args.addr is not None:
        return str(args.addr)
    address = address_of(read(ControlPlaneSettings, {}, model_required=False).settings)
    for everywhere, here in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        if address.startswith(everywhere):
            return here + address.removeprefix(everywhere)
    return address

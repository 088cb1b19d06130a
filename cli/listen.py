"""Is the address free? Asked before the model loads, because the answer after minutes of loading helps nobody."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from twinplane.shared.config import ConfigError, ControlPlaneSettings


def address_of(settings: ControlPlaneSettings) -> str:
    """The gRPC target clients use."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{host}:{settings.port}"


def require_free(settings: ControlPlaneSettings) -> None:
    """Raise ConfigError, naming the address and the way out, if the server could not listen there."""
    if settings.uds is not None:
        _require_free_socket(settings.uds)
    elif settings.port != 0:
        _require_free_port(settings.host, settings.port)


def _require_free_port(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError([f"host: {host!r} is no address of this machine: {error.strerror}"]) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Not stopped by connections in TIME_WAIT; a listener still conflicts, and so does one with SO_REUSEPORT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError([_explain(host, port, error)]) from None


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {port} on {host} is in use: choose another with --port, or see who has it with: ss -ltnp 'sport = :{port}'"
    if error.errno == errno.EACCES:
        return f"port: {port} needs a privilege this process does not have: choose one above 1023"
    return f"can not listen on {host}:{port}: {error.strerror}"


def _require_free_socket(path: str) -> None:
    """A socket file that nobody listens on is what a killed server left behind, and may be replaced."""
    parent = Path(path).resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError([f"uds: can not create {path}: {parent} is not a directory this user may write to"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise ConfigError([f"uds: {path}: {error.strerror}"]) from None
    raise ConfigError([f"uds: another server listens on {path}: stop it or choose another path"])

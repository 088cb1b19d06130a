"""What ``control-plane`` and ``data-plane`` have in common: logging, the supervisor's pipe, and a last sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from twinplane.cli.arguments import add_check, load_settings, settings_parser
from twinplane.shared.config import CommonSettings, ConfigError, Loaded

S = TypeVar("S", bound=CommonSettings)


def plane_parser(prog: str, description: str, settings: type[CommonSettings]) -> argparse.ArgumentParser:
    parser = add_check(settings_parser(prog, description, settings))
    parser.add_argument("--supervisor-fd", type=int, help=argparse.SUPPRESS)  # set by `twinplane serve`
    return parser


def run_plane(args: argparse.Namespace, settings: type[S], start: Callable[[S], int]) -> int:
    """Load the settings, then run the plane by ``start``; every way to fail leaves one sentence with the cause."""
    loaded = load_settings(args, settings)
    if args.check:
        print(loaded.effective())
        return 0

    from twinplane.shared import log, supervision

    supervision.attach(args.supervisor_fd)
    log.configure(loaded.settings.log_level, loaded.settings.log_format)
    logger = log.get_logger("twinplane.cli")
    logger.info("configuration", **_chosen(loaded))
    try:
        code = start(loaded.settings)
    except ConfigError as error:
        supervision.notify_failed("; ".join(error.problems))
        raise
    except Exception as error:
        logger.critical("failed", error=f"{type(error).__name__}: {error}", exc_info=True)
        supervision.notify_failed(f"{type(error).__name__}: {error}")
        return 1
    if code != 0:
        supervision.notify_failed(log.last_error() or f"exit code {code}")
    return code


def _chosen(loaded: Loaded[S]) -> dict[str, Any]:
    """The settings somebody chose; the rest are defaults, and ``twinplane config`` prints those."""
    return {name: getattr(loaded.settings, name) for name, origin in loaded.origins.items() if origin != "default"}

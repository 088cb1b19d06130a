"""``twinplane serve``: both planes on this machine, started together and kept running."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from twinplane.cli.arguments import add_check, load_settings, settings_parser
from twinplane.cli.listen import address_of, require_free
from twinplane.cli.supervisor import Plane, Reporter, Supervisor
from twinplane.shared.config import CommonSettings, ControlPlaneSettings, DataPlaneSettings, Loaded, ServeSettings
from twinplane.shared.options import flag_of, options_of


def parser(prog: str) -> argparse.ArgumentParser:
    description = "Run both planes on this machine, supervised: a plane that dies is restarted, and requests go on."
    return add_check(settings_parser(prog, description, ServeSettings))


def run(args: argparse.Namespace) -> int:
    loaded = load_settings(args, ServeSettings)
    settings = loaded.settings
    if args.check:
        print(loaded.effective())
        return 0
    require_free(settings)
    return Supervisor(
        Plane("control plane", plane_argv("control-plane", ControlPlaneSettings, loaded)),
        Plane("data plane", plane_argv("data-plane", DataPlaneSettings, loaded)),
        max_restarts=settings.max_restarts,
        drain_s=settings.drain_delay + settings.drain_grace,
        report=_reporter(settings),
        ready_sentence=lambda: f"{settings.served_model_name or Path(settings.model).name} on {address_of(settings)}",
    ).run()


def plane_argv(command: str, plane: type[CommonSettings], loaded: Loaded[ServeSettings]) -> list[str]:
    """The command line of one plane: every value somebody chose, wherever, becomes a flag, so that both planes agree."""
    flags = [
        f"{flag_of(name)}={option.plain(getattr(loaded.settings, name))}"
        for name, option in options_of(plane).items()
        if loaded.origins[name] != "default"
    ]
    return [sys.executable, "-m", "twinplane.cli.main", command, *flags]


def _reporter(settings: ServeSettings) -> Reporter:
    """People's sentences on a terminal, JSON lines of the planes' form elsewhere."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())

    def tell(event: str, sentence: str, *, level: str = "info") -> None:
        if console:
            line = f"twinplane: {sentence}"
        else:
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            line = json.dumps({"timestamp": now, "level": level, "event": event, "logger": "supervisor", "message": sentence})
        print(line, file=sys.stderr, flush=True)

    return tell

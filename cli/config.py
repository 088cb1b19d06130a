"""``twinplane config``: the effective configuration of ``twinplane serve``, value by value with its origin."""

from __future__ import annotations

import argparse

from twinplane.cli.arguments import load_settings, settings_parser
from twinplane.shared.config import ServeSettings


def parser(prog: str) -> argparse.ArgumentParser:
    description = "Print the effective configuration as YAML that --config accepts, with the origin of each value."
    return settings_parser(prog, description, ServeSettings)


def run(args: argparse.Namespace) -> int:
    print(load_settings(args, ServeSettings, model_required=False).effective())
    return 0

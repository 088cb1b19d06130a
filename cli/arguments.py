"""argparse parsers made from settings dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TypeVar

from twinplane.shared.config import CommonSettings, Loaded, read
from twinplane.shared.options import flag_of, options_of

S = TypeVar("S", bound=CommonSettings)

_SOURCES = (
    "Each option can also be given as an environment variable (--max-num-seqs is TWINPLANE_MAX_NUM_SEQS) or as a line of the --config file."
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wide enough that most options keep to one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)


def new_parser(prog: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=HelpFormatter, allow_abbrev=False)


def settings_parser(prog: str, description: str, settings: type[CommonSettings]) -> argparse.ArgumentParser:
    """A parser with one flag per option of ``settings``, grouped; only what was given lands in the namespace."""
    parser = new_parser(prog, description, _SOURCES)
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the model: the same as --model")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of options, long names as keys")
    groups: dict[str, argparse._ArgumentGroup] = {}
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name, option in options_of(settings).items():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        default = f"auto: {option.auto}" if defaults[name] is None else option.plain(defaults[name])
        group.add_argument(
            flag_of(name),
            dest=name,
            metavar=option.kind.metavar,
            default=argparse.SUPPRESS,
            help=f"{option.help} ({default})".replace(" ()", "").replace("%", "%%"),
        )
    return parser


def add_check(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--check", action="store_true", help="check the configuration, print it with its origins, and exit")
    return parser


def given(args: argparse.Namespace, settings: type[CommonSettings]) -> dict[str, object]:
    """What the command line sets, by field name."""
    found: dict[str, object] = {name: getattr(args, name) for name in options_of(settings) if hasattr(args, name)}
    if args.model_argument is not None:
        if "model" in found:
            raise SystemExit(f"the model is given twice: {args.model_argument!r} and --model {found['model']!r}")
        found["model"] = args.model_argument
    return found


def load_settings(args: argparse.Namespace, settings: type[S], *, model_required: bool = True) -> Loaded[S]:
    """The settings a parsed command line asks for. Raises ConfigError."""
    return read(settings, given(args, settings), config=args.config, model_required=model_required)

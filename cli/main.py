"""Entry point of the ``twinplane`` command: finds the subcommand and hands over.

Only the chosen subcommand's module is imported, and no module here imports grpc, torch or transformers before its
arguments are known to be right, so ``--help``, ``--version`` and mistakes answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import NamedTuple

from twinplane.cli import EXIT_CONFIG, EXIT_USAGE


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS: dict[str, dict[str, Command]] = {
    "Serving": {
        "serve": Command("serve", "run both planes on this machine, supervised"),
        "control-plane": Command("control_plane", "run the control plane alone: gRPC, scheduler"),
        "data-plane": Command("data_plane", "run the data plane alone: model, KV cache"),
    },
    "Using": {
        "chat": Command("chat", "talk to a running server"),
        "generate": Command("generate", "continue a prompt on a running server"),
        "health": Command("health", "ask whether a server or a data plane is well"),
    },
    "Tools": {
        "config": Command("config", "print the effective configuration and where each value comes from"),
        "bench": Command("bench", "measure the ring, the scheduler's tick or the kernels on this machine"),
        "simulate": Command("simulate", "replay a trace against the scheduler on a virtual clock with a model of a device"),
    },
}


def _help() -> str:
    width = max(len(name) for group in COMMANDS.values() for name in group)
    lines = ["usage: twinplane COMMAND [options]", "", "An LLM serving engine in two planes.", ""]
    for group, commands in COMMANDS.items():
        lines += [f"{group}:", *(f"  {name:<{width}}  {command.summary}" for name, command in commands.items()), ""]
    return "\n".join([*lines, "`twinplane COMMAND --help` lists a command's options; `twinplane --version` says which version this is."])


def version() -> str:
    from importlib.metadata import version as installed

    return installed("twinplane")


def _find(name: str) -> Command | None:
    return next((commands[name] for commands in COMMANDS.values() if name in commands), None)


def _run(command: str, module: str, arguments: list[str]) -> int:
    implementation = importlib.import_module(f"twinplane.cli.{module}")
    from twinplane.shared.options import ConfigError

    parser = implementation.parser(f"twinplane {command}")
    try:
        return int(implementation.run(parser.parse_intermixed_args(arguments)))
    except ConfigError as error:
        print(f"twinplane {command}: can not start:", *error.problems, sep="\n  ", file=sys.stderr)
        return EXIT_CONFIG


def main(argv: list[str] | None = None) -> int:
    """Run ``twinplane``; returns the exit code (0, 1 failure, 2 usage, 78 configuration, 130 interrupted)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version", "version"):
        print(f"twinplane {version()}")
        return 0
    command = _find(arguments[0])
    if command is None:
        names = [name for commands in COMMANDS.values() for name in commands]
        near = difflib.get_close_matches(arguments[0], names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see twinplane --help"
        print(f"twinplane: unknown command {arguments[0]!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    try:
        code = _run(arguments[0], command.module, arguments[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `twinplane ... | head`: whoever read us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    raise SystemExit(main())

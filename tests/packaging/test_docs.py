"""What the documents name exists: files, commands, flags, variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from twinplane.cli import chat, config, control_plane, data_plane, generate, health, serve, simulate
from twinplane.cli.main import COMMANDS
from twinplane.shared.config import ALL_NAMES
from twinplane.shared.options import CONFIG_VARIABLE, _from_file, variable_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
SCRIPTS = {"TWINPLANE_TORCH", "TWINPLANE_PYTHON"}
OTHERS_FLAGS = {"--build-arg", "--target", "--shm-size", "--build", "--wait", "--index-url", "--serve", "--extra-index-url"}


def known_flags() -> set[str]:
    parsers = [module.parser("x") for module in (serve, control_plane, data_plane, config, health, chat, generate, simulate)]
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings} | {"--help", "--version"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_flags_and_variables_exist(document):
    text = document.read_text()
    commands = {name for group in COMMANDS.values() for name in group}
    for command in re.findall(r"(?:^|[`$] ?|, )twinplane ([a-z][a-z-]+)\b", text, flags=re.M):
        assert command in commands, command
    if document.name not in ("api.md", "performance.md"):
        unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known_flags() - OTHERS_FLAGS
        assert not unknown
    variables = set(re.findall(r"TWINPLANE_[A-Z_]*[A-Z]", text))
    assert variables <= {variable_of(name) for name in ALL_NAMES} | {CONFIG_VARIABLE} | SCRIPTS


def test_paths_named_in_the_documents_exist():
    for document in DOCUMENTS:
        for path in re.findall(
            r"`((?:shared|control_plane|data_plane|kernels|client|cli|docs|scripts|deploy|examples|tests)/[\w./-]+)`", document.read_text()
        ):
            assert (ROOT / path).exists(), f"{document.name}: {path}"


def test_the_example_configuration_is_made_of_known_keys():
    problems: list[str] = []
    found = _from_file(ROOT / "examples" / "config.yaml", ALL_NAMES, problems)
    assert problems == [] and "model" in found

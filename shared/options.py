"""How a setting is read: kinds of values, the four sources, and errors that name where a value came from.

:mod:`twinplane.shared.config` declares the settings; this module is the machinery under it. An option may be
given, in falling precedence, on the command line, in the environment, in a YAML file, or not at all:

=============  =====================================  =========================
source         spelling                               example
=============  =====================================  =========================
command line   ``--`` + name with dashes              ``--max-num-seqs 128``
environment    ``TWINPLANE_`` + name in capitals      ``TWINPLANE_MAX_NUM_SEQS``
YAML file      name with dashes (or underscores)      ``max-num-seqs: 128``
default        the dataclass
=============  =====================================  =========================
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

ENV_PREFIX = "TWINPLANE_"
CONFIG_VARIABLE = "TWINPLANE_CONFIG"

# Variables with our prefix that belong to the scripts, not to a plane.
_FOREIGN_VARIABLES = frozenset({"TWINPLANE_TORCH", "TWINPLANE_PYTHON"})

# Kubernetes gives every pod TWINPLANE_PORT=tcp://... and friends once a Service is called "twinplane".
_SERVICE_LINK = re.compile(r"TWINPLANE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class ConfigError(Exception):
    """The configuration is wrong. ``problems`` holds one sentence per fault, each naming its source and key."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Kind(Protocol):
    """What values an option takes."""

    @property
    def metavar(self) -> str: ...
    def parse(self, raw: object) -> object:
        """The typed value of ``raw`` (text, or a YAML scalar). Raises ValueError saying what is expected."""

    def show(self, value: Any) -> str:
        """The value as ``parse`` would read it again."""


def _reject(expected: str, raw: object) -> ValueError:
    return ValueError(f"expected {expected}, got {raw!r}")


def _range(noun: str, minimum: float, maximum: float | None) -> str:
    return f"{noun} of at least {minimum}" if maximum is None else f"{noun} from {minimum} to {maximum}"


@dataclass(frozen=True)
class Integer:
    minimum: int = 0
    maximum: int | None = None
    metavar: str = "N"

    def parse(self, raw: object) -> int:
        expected = _range("an integer", self.minimum, self.maximum)
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise _reject(expected, raw)
        try:
            value = int(raw)
        except ValueError:
            raise _reject(expected, raw) from None
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise _reject(expected, raw)
        return value

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True)
class Number:
    minimum: float = 0.0
    maximum: float | None = None
    metavar: str = "X"

    def parse(self, raw: object) -> float:
        expected = _range("a number", self.minimum, self.maximum)
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise _reject(expected, raw)
        try:
            value = float(raw)
        except ValueError:
            raise _reject(expected, raw) from None
        if not self.minimum <= value <= (float("inf") if self.maximum is None else self.maximum):  # also refuses NaN
            raise _reject(expected, raw)
        return value

    def show(self, value: float) -> str:
        return f"{value:g}"


_SIZE_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _SIZE_UNITS |= {f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}


@dataclass(frozen=True)
class Size:
    """A number of bytes: ``2GiB``, ``500MB``, ``1073741824``."""

    minimum: int = 1
    metavar: str = "BYTES"

    def parse(self, raw: object) -> int:
        expected = "a size such as 2GiB, 500MB or 1073741824"
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(raw).strip())
        if isinstance(raw, bool) or match is None:
            raise _reject(expected, raw)
        factor = _SIZE_UNITS.get(match[2].lower())
        if factor is None:
            raise _reject(expected, raw)
        value = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
        if value < self.minimum:
            raise _reject(f"at least {self.show(self.minimum)}", raw)
        return value

    def show(self, value: int) -> str:
        for prefix, shift in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
            if value and value % (1 << shift) == 0:
                return f"{value >> shift}{prefix}iB"
        return str(value)


@dataclass(frozen=True)
class Seconds:
    """A duration in seconds: ``5``, ``0.5``, ``500ms``, ``30s``, ``2m``."""

    minimum: float = 0.0
    metavar: str = "SECONDS"

    def parse(self, raw: object) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)", str(raw).strip())
        if isinstance(raw, bool) or match is None:
            raise _reject("a duration such as 5, 500ms, 30s or 2m", raw)
        value = float(match[1]) * {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}[match[2]]
        if value < self.minimum:
            raise _reject(f"at least {self.minimum:g} seconds", raw)
        return value

    def show(self, value: float) -> str:
        return f"{value:g}"


@dataclass(frozen=True)
class Choice:
    values: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.values) + "}"

    def parse(self, raw: object) -> str:
        if raw in self.values:
            return str(raw)
        near = difflib.get_close_matches(str(raw), self.values, n=1)
        raise ValueError(f"expected one of {', '.join(self.values)}, got {raw!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class Text:
    """Any text that fully matches ``pattern``; ``rule`` says so in words."""

    metavar: str = "TEXT"
    pattern: str = r"[^\x00]+"
    rule: str = "text that is not empty"

    def parse(self, raw: object) -> str:
        if isinstance(raw, bool | dict | list) or re.fullmatch(self.pattern, str(raw)) is None:
            raise _reject(self.rule, raw)
        return str(raw)

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class Option:
    """Metadata of a settings field."""

    kind: Kind
    group: str
    help: str
    auto: str | None = None  # the value may be None ("auto"), and this is what None means

    def parse(self, raw: object) -> object:
        if self.auto is not None and raw in (None, "auto"):
            return None
        return self.kind.parse(raw)

    def plain(self, value: object) -> str:
        """The value as text that ``parse`` reads again."""
        return "auto" if value is None else self.kind.show(value)

    def yaml(self, value: object) -> str:
        """The value as a YAML scalar. Text is quoted: YAML would read a bare ``no`` or ``1.10`` as something else."""
        text = self.plain(value)
        return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and isinstance(self.kind, Text) else text


def option(default: Any, kind: Kind, group: str, help: str, *, auto: str | None = None) -> Any:
    """A dataclass field that is an option. ``auto``: None is allowed, spelled "auto", and means this."""
    return dataclasses.field(default=default, metadata={"option": Option(kind, group, help, auto)})


def options_of(settings: type) -> dict[str, Option]:
    """The options of a settings dataclass, by field name, in declaration order."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(settings)}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _yaml_line(name: str, option: Option, value: object) -> str:
    key = name.replace("_", "-")
    return f"# {key}: not set" if value == "" else f"{key}: {option.yaml(value)}"


S = TypeVar("S")


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """Validated settings, and for each field the source it came from."""

    settings: S
    origins: Mapping[str, str]

    def effective(self) -> str:
        """The settings as YAML that ``--config`` accepts, each line with its origin as a comment."""
        options = options_of(type(self.settings))
        lines = {name: _yaml_line(name, option, getattr(self.settings, name)) for name, option in options.items()}
        width = max(map(len, lines.values()))
        text = []
        for group in dict.fromkeys(option.group for option in options.values()):
            text += ["", f"# {group}"]
            text += [f"{lines[name]:<{width}}  # {self.origins[name]}" for name, option in options.items() if option.group == group]
        return "\n".join(text[1:])


def _suggest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_service_link(name: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(name) is not None or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value) is not None)


def _from_environment(environ: Mapping[str, str], known: Iterable[str], problems: list[str]) -> dict[str, tuple[object, str]]:
    names = {variable_of(name): name for name in known}
    found: dict[str, tuple[object, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in _FOREIGN_VARIABLES or variable == CONFIG_VARIABLE:
            continue
        if _is_service_link(variable, value):
            continue
        if variable in names:
            found[names[variable]] = (value, variable)
        else:
            problems.append(f"environment: unknown variable {variable}{_suggest(variable, names)}")
    return found


def _from_file(path: Path, known: Iterable[str], problems: list[str]) -> dict[str, tuple[object, str]]:
    import yaml  # only when a file is given: it costs 40 ms

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: can not be read: {getattr(error, 'strerror', None) or error}")
        return {}
    except yaml.YAMLError as error:
        problems.append(f"{path}: not valid YAML: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path}: expected 'name: value' lines, got a {type(content).__name__}")
        return {}
    names = set(known)
    found: dict[str, tuple[object, str]] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in names:
            problems.append(f"{path}: unknown key {str(key)!r}{_suggest(str(key), (n.replace('_', '-') for n in names))}")
        elif name in found:
            problems.append(f"{path}: {name.replace('_', '-')} is given twice")
        else:
            found[name] = (value, f"{path}: {key}")
    return found


def load(
    settings: type[S],
    *,
    cli: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    known: Iterable[str] | None = None,
    required: Iterable[str] = (),
) -> Loaded[S]:
    """Read, merge and validate ``settings`` from all sources.

    ``known``: names that other commands take; they are not errors in the environment and in the file, so that
    one file can configure both planes. A ``settings.problems()`` method, if any, checks fields against each other.
    Raises ConfigError with every problem found, not only the first.
    """
    options = options_of(settings)
    names = set(options) | set(known or ())
    problems: list[str] = []
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    raw = _from_file(file, names, problems) if file is not None else {}
    raw |= _from_environment(environ, names, problems)
    raw |= {name: (value, flag_of(name)) for name, value in cli.items()}

    values: dict[str, Any] = {}
    for name in options:
        if name not in raw:
            continue
        value, origin = raw[name]
        try:
            values[name] = options[name].parse(value)
        except ValueError as error:
            problems.append(f"{origin}: {error}")
    missing = [name for name in required if name not in raw]
    problems += [f"{name} is missing: give it on the command line, as {variable_of(name)}, or in the --config file" for name in missing]
    if problems:
        raise ConfigError(problems)
    result = settings(**values)
    check = getattr(result, "problems", None)
    if check is not None and (found := check()):
        raise ConfigError(found)
    return Loaded(result, {name: raw[name][1] if name in raw else "default" for name in options})

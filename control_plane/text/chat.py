"""Chat templates: from messages to the text of a prompt.

Templates are Jinja programs that come with the model. They run in a sandbox, and what they see follows
the conventions of Hugging Face's ``apply_chat_template``, so that the same template gives the same text.

**Control tokens in user text.** A message that contains the written form of a control token ("<|im_end|>") must not
forge a turn. Before rendering, every such form in the caller's strings is put between two marks (Unicode
noncharacters, which no exchanged text may contain); after rendering, what lies between marks is a *literal*
segment, to be tokenized as ordinary text. The template's own tokens stay what they are.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from twinplane.control_plane.types import InvalidRequestError

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# A role is often pasted into the template's own markup, so it must not carry any.
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered prompt. In a literal one, written control tokens are ordinary text."""

    text: str
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of a chat template. ``messages`` hold plain JSON values; each has at least a ``role``."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the written form of any of the tokens, the longest where several begin."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class ChatTemplate:
    """A compiled template. ``variables`` are the model's special tokens, such as ``bos_token``."""

    def __init__(self, source: str, variables: Mapping[str, str], control: re.Pattern[str] | None) -> None:
        """``control`` matches control tokens (:func:`control_pattern`). Raises jinja2.TemplateSyntaxError."""
        self.source = source
        self._template = _environment().from_string(source)
        self._variables = dict(variables)
        self._control = control

    def render(self, chat: Conversation, *, protect: bool = True) -> list[Segment]:
        """The prompt as segments, in order. Raises InvalidRequestError for what the template does not accept."""
        messages = _checked_messages(chat)
        opening, closing, tail = _unused_marks(json.dumps([messages, chat.tools, chat.arguments], ensure_ascii=False, default=str))
        if chat.continue_final_message:
            messages[-1]["content"] += tail + " "  # the space tells whether the template trims
        variables = {**(chat.arguments or {}), "messages": messages, "tools": chat.tools}
        if protect and self._control is not None:
            marked = rf"{opening}\g<0>{closing}"
            variables = _map_strings(variables, lambda text: self._control.sub(marked, text))  # type: ignore[union-attr]
        add = chat.add_generation_prompt
        variables["add_generation_prompt"] = not chat.continue_final_message if add is None else add
        text = self._render({**self._variables, **variables})
        if chat.continue_final_message:
            text = _cut_at(tail, text)
        return _segments(text, opening, closing)

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refused the messages: {error.message}", field="chat.messages") from error
        except Exception as error:  # a template is a program: it may divide by zero, index None, ...
            raise InvalidRequestError(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}", field="chat.messages"
            ) from error


def _checked_messages(chat: Conversation) -> list[dict[str, Any]]:
    if not chat.messages:
        raise InvalidRequestError("chat.messages is empty: send at least one message", field="chat.messages")
    messages = []
    for index, message in enumerate(chat.messages):
        if not _ROLE.fullmatch(message.get("role", "")):
            raise InvalidRequestError(
                f"chat.messages[{index}].role must be 1 to 64 letters, digits, '_', '.' or '-', such as user or assistant",
                field=f"chat.messages[{index}].role",
            )
        message = dict(message)
        if reasoning := message.get("reasoning_content"):
            message["thinking"] = reasoning  # the name gpt-oss templates read
        messages.append(message)
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise InvalidRequestError(
                "chat.add_generation_prompt opens a new turn and chat.continue_final_message goes on with the last one: set one of them",
                field="chat.continue_final_message",
            )
        if not messages[-1].get("content"):
            raise InvalidRequestError(
                "chat.continue_final_message is set but the last message has no content to continue", field="chat.continue_final_message"
            )
    return messages


def _unused_marks(text: str) -> list[str]:
    marks = [mark for mark in _NONCHARACTERS if mark not in text][:3]
    if len(marks) < 3:
        raise InvalidRequestError("chat contains Unicode noncharacters (U+FDD0 to U+FDEF): remove them", field="chat.messages")
    return marks


def _map_strings(value: Any, change: Any) -> Any:
    """``value`` with every string in it changed, except roles (which are checked) and the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _cut_at(tail: str, text: str) -> str:
    at = text.rfind(tail)
    if at < 0:
        raise InvalidRequestError(
            "chat.continue_final_message: the model's chat template drops the end of the last message, so it can not be continued",
            field="chat.continue_final_message",
        )
    kept = text[:at]
    return kept if text.startswith(" ", at + 1) else kept.rstrip()


def _segments(text: str, opening: str, closing: str) -> list[Segment]:
    parts = re.split(f"{opening}([^{opening}{closing}]*){closing}", text)
    # A template that cuts strings may leave half a pair behind.
    stray = str.maketrans("", "", opening + closing)
    return [Segment(part.translate(stray), literal=bool(index % 2)) for index, part in enumerate(parts) if part]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        # Jinja's own filter escapes HTML, which no prompt wants.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment

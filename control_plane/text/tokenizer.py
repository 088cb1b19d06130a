"""The model's tokenizer: text and chats to token ids, token ids to text.

Works on the `tokenizers` library alone once loaded. A GGUF file is read without `transformers`; a Hugging Face folder goes
through ``AutoTokenizer``, because the class named there may change what ``tokenizer.json`` says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from tokenizers import Tokenizer as FastTokenizer
from twinplane.control_plane.text.chat import ChatTemplate, Conversation, Segment, control_pattern
from twinplane.control_plane.text.detokenizer import Detokenizer, TokenBytes, UnsupportedTokenizerError
from twinplane.control_plane.text.gguf_tokenizer import build_tokenizer
from twinplane.control_plane.types import InvalidRequestError
from twinplane.shared.gguf_file import GGUFFile, read_gguf
from twinplane.shared.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)

# Tokenizing runs at about 1 M characters per second: up to here it is done in the event loop (some 16 ms at worst), above in a thread.
INLINE_CHARACTERS = 16 * 1024
_THREADS = 2
_ALWAYS_TOKENIZED = 256 * 1024  # bytes


class TokenizerError(Exception):
    """The tokenizer or chat template can not be loaded; the message says from where and why."""


class Tokenizer:
    """Thread-safe. ``variables`` are the special tokens by the name templates know them by (``bos_token``, ...)."""

    def __init__(
        self, backend: FastTokenizer, *, variables: Mapping[str, str], chat_template: str | None, tool_template: str | None = None
    ) -> None:
        """``tool_template`` replaces ``chat_template`` when tools are given. Raises TokenizerError, UnsupportedTokenizerError."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        # The same tokenizer, except that it reads written control tokens as ordinary text. An instance of its own,
        # since the switch is state of the tokenizer and encoding runs in several threads.
        self._literal = FastTokenizer.from_str(backend.to_str())
        self._literal.encode_special_tokens = True
        self._inner = _without_first_prefix(self._literal)
        self.bytes = TokenBytes.of(backend)
        self.bos = variables.get("bos_token")
        self._bos_id = backend.token_to_id(self.bos) if self.bos else None
        added = backend.get_added_tokens_decoder()
        self._control = {token.content: (index, token) for index, token in added.items() if token.special}
        pattern = control_pattern(self._control)
        self._split_control = re.compile(f"({pattern.pattern})").split if pattern else lambda text: [text]
        self._template = _compile(chat_template, variables, pattern)
        self._tool_template = _compile(tool_template, variables, pattern) or self._template
        self._longest_piece = max(map(len, self.bytes.pieces), default=1)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.bytes.pieces)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, equal to Hugging Face's ``tokenizer(text)``, but a BOS written by the caller is not doubled."""
        backend = self._backend if parse_special_tokens else self._literal
        ids = _encode(backend, text, add_special_tokens)
        doubled = parse_special_tokens and add_special_tokens and self.bos is not None and text.startswith(self.bos)
        if doubled and ids[:2] == [self._bos_id] * 2:
            del ids[0]
        return ids

    def encode_chat(self, chat: Conversation, *, parse_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered chat, equal to ``apply_chat_template``'s; the template alone writes BOS.

        Raises InvalidRequestError if there is no template, or it does not accept the messages.
        """
        template = self._tool_template if chat.tools else self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template: start the server with --chat-template FILE, or send `text` instead of `chat`",
                field="chat",
            )
        segments = template.render(chat, protect=not parse_special_tokens)
        if any(segment.literal for segment in segments):
            return self._encode_protected(segments)
        return _encode(self._backend, "".join(segment.text for segment in segments), add_special_tokens=False)

    def _encode_protected(self, segments: Sequence[Segment]) -> list[int]:
        """Control tokens of the template become tokens, those in literal segments are part of the text around them.

        A tokenizer works on the stretches between control tokens one by one; so does this, with stretches of our own cutting.
        """
        ids: list[int] = []
        stretch, strip_next = "", False

        def flush() -> None:
            backend = self._inner if ids else self._literal
            ids.extend(_encode(backend, stretch.lstrip() if strip_next else stretch, add_special_tokens=False))

        for segment in segments:
            parts = [segment.text] if segment.literal else self._split_control(segment.text)
            for index, part in enumerate(parts):
                if index % 2 == 0:
                    stretch += part
                    continue
                token_id, token = self._control[part]
                stretch = stretch.rstrip() if token.lstrip else stretch
                flush()
                ids.append(token_id)
                stretch, strip_next = "", token.rstrip
        flush()
        return ids

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work()``, in a thread if the input has more than INLINE_CHARACTERS, so that the event loop goes on."""
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def max_bytes(self, num_tokens: int) -> int:
        """Longer inputs need not be looked at to know that they do not fit into ``num_tokens``.

        Each token covers at most the bytes of the longest one. Small inputs are always worth an exact answer.
        """
        return max(num_tokens * self._longest_piece, _ALWAYS_TOKENIZED)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.bytes.decode(ids, skip_special=skip_special_tokens)

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one sequence that continues ``prompt_ids``."""
        return Detokenizer(self.bytes, prompt_ids, skip_special=skip_special_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def load_tokenizer(source: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
    """From a Hugging Face folder (or hub name) or a GGUF file. ``chat_template``: a Jinja file instead of the model's own.

    Raises TokenizerError naming ``source`` and the reason.
    """
    try:
        own = _from_gguf(read_gguf(source)) if str(source).endswith(".gguf") else _from_hugging_face(source)
        if chat_template is not None:
            own |= {"chat_template": Path(chat_template).read_text(encoding="utf-8"), "tool_template": None}
        tokenizer = Tokenizer(**own)
    except (UnsupportedTokenizerError, TokenizerError, OSError, ValueError, KeyError) as error:
        raise TokenizerError(f"the tokenizer of {source} can not be loaded: {error}") from error
    if not tokenizer.has_chat_template:
        log.warning("no_chat_template", tokenizer=str(source), remedy="chat is refused; give a template with --chat-template FILE")
    return tokenizer


def _from_gguf(file: GGUFFile) -> dict[str, Any]:
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    variables = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            variables[name] = tokens[index]
    return {
        "backend": build_tokenizer(metadata),
        "variables": variables,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tool_template": metadata.get("tokenizer.chat_template.tool_use"),
    }


def _from_hugging_face(source: str | Path) -> dict[str, Any]:
    from transformers import AutoTokenizer  # seconds to import, and not needed for GGUF

    slow_or_fast = AutoTokenizer.from_pretrained(str(source))
    backend = getattr(slow_or_fast, "backend_tokenizer", None)
    if not isinstance(backend, FastTokenizer):
        raise UnsupportedTokenizerError(
            f"{type(slow_or_fast).__name__} has no fast form: convert it once with transformers (save_pretrained writes tokenizer.json)"
        )
    template = slow_or_fast.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    variables = {name: token for name, token in slow_or_fast.special_tokens_map.items() if isinstance(token, str)}
    return {"backend": backend, "variables": variables, "chat_template": named.get("default"), "tool_template": named.get("tool_use")}


def _compile(source: str | None, variables: Mapping[str, str], control: re.Pattern[str] | None) -> ChatTemplate | None:
    if not source:
        return None
    try:
        return ChatTemplate(source, variables, control)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error


def _without_first_prefix(tokenizer: FastTokenizer) -> FastTokenizer:
    """``tokenizer`` for what stands inside a text: without the space SentencePiece tokenizers put before the first word only.

    (Those that put one after every control token do so here too.)
    """
    settings = json.loads(tokenizer.to_str())
    step = settings["pre_tokenizer"] or {}
    changed = False
    for part in step.get("pretokenizers", [step]):
        if part.get("type") == "Metaspace" and part["prepend_scheme"] == "first":
            part["prepend_scheme"], changed = "never", True
    if not changed:
        return tokenizer
    inner = FastTokenizer.from_str(json.dumps(settings))
    inner.encode_special_tokens = True
    return inner


def _encode(backend: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= INLINE_CHARACTERS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    # Only the batch form releases the GIL; "fast" leaves out offsets.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids

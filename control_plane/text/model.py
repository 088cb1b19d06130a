"""The model as clients see it: its names, its tokenizer, its limits and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.control_plane.types import InvalidRequestError, ModelNotFoundError, SamplingParams
from twinplane.control_plane.validation import default_sampling, describe_defaults
from twinplane.shared.log import get_logger
from twinplane.shared.model_files import ModelCard, ModelFileError

log = get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """``defaults``: what unset sampling fields mean. ``vocab_size``: rows of the model's embedding."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = ""
    aliases: tuple[str, ...] = ()
    defaults: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def of(
        cls,
        card: ModelCard,
        tokenizer: Tokenizer,
        *,
        name: str,
        aliases: tuple[str, ...] = (),
        sampling_flags: Mapping[str, Any] | None = None,
        use_generation_config: bool = True,
    ) -> ServedModel:
        """``sampling_flags``: the server's own defaults by parameter name; they go before the model's generation_config.json.

        Raises ModelFileError for a default that is out of range. Logs what is served.
        """
        generation_config = read_generation_config(card) if use_generation_config else {}
        try:
            defaults = default_sampling(generation_config, sampling_flags)
        except InvalidRequestError as error:
            raise ModelFileError(f"the default sampling parameters of {card.path} can not be used: {error.message}") from error
        log.info("model", name=name, eos_token_ids=card.eos_token_ids, default_sampling=describe_defaults(defaults))
        return cls(
            name=name,
            tokenizer=tokenizer,
            vocab_size=card.vocab_size or tokenizer.vocab_size,
            eos_token_ids=card.eos_token_ids,
            architecture=card.architecture,
            aliases=aliases,
            defaults=defaults,
        )

    def check_name(self, asked: str) -> None:
        """Empty means this one. Raises ModelNotFoundError."""
        names = (self.name, *self.aliases)
        if asked and asked not in names:
            raise ModelNotFoundError(f"the model {asked[:100]!r} is not served here; served: {', '.join(names)}", field="model")


def read_generation_config(card: ModelCard) -> dict[str, Any]:
    """The model's ``generation_config.json``; empty for GGUF files and folders without one."""
    path = card.path / "generation_config.json"
    if card.format == "gguf" or not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}

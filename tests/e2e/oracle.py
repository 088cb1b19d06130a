"""What the right tokens are: transformers' own ``generate`` in fp32 on the same (dequantized) weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import transformers

CACHE = Path(__file__).parents[2] / "build" / "oracle"


class Oracle:
    """Greedy continuations by transformers, computed once and remembered in ``build/oracle``.

    Args:
        model: an ``LlamaForCausalLM`` (or other) in fp32.
        key: names the weights, for the cache.
    """

    def __init__(self, model_factory: object, key: str) -> None:
        self._factory = model_factory
        self._model: torch.nn.Module | None = None
        self._key = f"{key}|{torch.__version__}|{transformers.__version__}"

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """``new_tokens`` greedy tokens for each prompt, EOS ignored."""
        digest = hashlib.sha256(json.dumps([self._key, prompts, new_tokens]).encode()).hexdigest()[:24]
        path = CACHE / f"greedy-{digest}.json"
        if path.exists():
            return json.loads(path.read_text())  # type: ignore[no-any-return]
        answers = [self._generate(prompt, new_tokens) for prompt in prompts]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answers))
        return answers

    @torch.inference_mode()
    def _generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        if self._model is None:
            self._model = self._factory()  # type: ignore[operator]
            self._model.generation_config.eos_token_id = None  # type: ignore[union-attr]  # go on past EOS
        ids = torch.tensor([prompt])
        out = self._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

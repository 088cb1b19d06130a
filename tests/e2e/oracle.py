"""What the right tokens are: transformers in fp32 on the same (dequantized) weights.

Tokens t0, t1, ... are greedy exactly if each one is the argmax after the prompt and the tokens before it. So one forward pass
over prompt + answer checks a whole answer: by induction it is what ``generate`` would have said. The two are held
against each other in ``test_oracle.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from twinplane.benchmarks import reference_model

_NO_TOKEN = 2**31 - 1  # padding that is no token of any vocabulary


class Oracle:
    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def model(self) -> LlamaForCausalLM:
        return reference_model.load(self._path)

    @torch.inference_mode()
    def mistakes(self, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
        """Where ``answer`` departs from greedy, in words; empty if it is right."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1)
        given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return [
            f"token {i} of the answer to a prompt of {len(prompt)}: {answer[i]} instead of {int(best.indices[i])}, "
            f"whose logit is higher by {float(best.values[i] - given[i]):.3g}"
            for i in range(len(answer))
            if answer[i] != int(best.indices[i])
        ]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """transformers' own greedy generation, going on past EOS."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def beams(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        width: int,
        length_penalty: float = 1.0,
        early_stopping: str = "heuristic",
        stop_token_ids: Sequence[int] = (),
    ) -> list[tuple[list[int], float]]:
        """transformers' own beam search: hypotheses up to and including their stop token, and scores, best first."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping={"heuristic": False, "first": True, "never": "never"}[early_stopping],
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=_NO_TOKEN,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = [[token for token in row if token != _NO_TOKEN] for row in out.sequences[:, len(prompt) :].tolist()]
        return list(zip(answers, out.sequences_scores.tolist(), strict=True))

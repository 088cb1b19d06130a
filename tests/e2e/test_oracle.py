"""The oracle agrees with transformers' own generation, and sees a wrong token."""

import pytest
from oracle import Oracle


@pytest.mark.model
def test_the_oracle_accepts_what_transformers_generates_and_nothing_else(oracle: Oracle, prompts: list[tuple[int, ...]]) -> None:
    for prompt in (prompts[0], prompts[9], prompts[17]):
        answer = oracle.generate(prompt, 12)
        assert oracle.mistakes(prompt, answer) == []
        assert len(oracle.mistakes(prompt, [*answer[:-1], answer[-1] + 1])) == 1

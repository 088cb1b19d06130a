"""The prefix cache through the API: what is found, what is kept apart, and that answers do not depend on it (INV-10)."""

from __future__ import annotations

import pytest
from twinplane.benchmarks.server import Server
from twinplane.client import Client, GenerateResult

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(300)]

BLOCK = 16  # tokens; the demo model's heads are 64 wide


def ask(client: Client, prompt: tuple[int, ...], **options: object) -> GenerateResult:
    return client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]


def test_a_prompt_is_found_again_by_its_salt_and_answers_alike(server: Server, prompts: list[tuple[int, ...]]) -> None:
    prompt = max(prompts, key=len)[:200]
    assert len(prompt) > 3 * BLOCK
    with Client(server.address) as client:
        client.reset_prefix_cache()
        cold = ask(client, prompt)
        warm = ask(client, prompt)
        assert cold.usage.cached_prompt_tokens == 0
        assert len(prompt) - BLOCK <= warm.usage.cached_prompt_tokens < len(prompt)  # the last token is always computed
        answers = [cold, warm]
        for salt in ("tenant-a", "tenant-b"):
            first, again = ask(client, prompt, cache_salt=salt), ask(client, prompt, cache_salt=salt)
            assert first.usage.cached_prompt_tokens == 0  # of somebody else's
            assert again.usage.cached_prompt_tokens == warm.usage.cached_prompt_tokens
            answers += [first, again]
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        load = client.load()
        assert load.cached_kv_blocks >= 3 * (len(prompt) // BLOCK)  # one copy a salt
        assert 0 < load.prefix_cache_hit_rate < 1


def test_who_wants_no_part_of_it_neither_reads_nor_fills_it(server: Server, prompts: list[tuple[int, ...]]) -> None:
    prompt = max(prompts, key=len)[:150]
    with Client(server.address) as client:
        client.reset_prefix_cache()
        alone = [ask(client, prompt, prefix_cache=False) for _ in range(2)]
        first = ask(client, prompt)
        assert [result.usage.cached_prompt_tokens for result in (*alone, first)] == [0, 0, 0]
        assert ask(client, prompt, prefix_cache=False).usage.cached_prompt_tokens == 0
        assert ask(client, prompt).usage.cached_prompt_tokens > 0


def test_an_answer_is_part_of_the_next_turns_prefix_and_a_reset_forgets_all(server: Server, prompts: list[tuple[int, ...]]) -> None:
    prompt = max(prompts, key=len)[:100]
    with Client(server.address) as client:
        client.reset_prefix_cache()
        answer = client.generate(prompt, max_tokens=3 * BLOCK, temperature=0, ignore_eos=True).token_ids
        turn = (*prompt, *answer, 5, 6, 7)
        assert ask(client, turn).usage.cached_prompt_tokens > len(prompt) + BLOCK
        client.reset_prefix_cache()
        assert ask(client, turn).usage.cached_prompt_tokens == 0


def test_A15_log_probabilities_and_echoed_prompts_do_not_depend_on_what_is_cached(server: Server, prompts: list[tuple[int, ...]]) -> None:
    """Log-probabilities are offered for the answer's tokens; of the prompt, its ids."""
    prompt = max(prompts, key=len)[:100]
    shorter = (*prompt[:64], 9, 8, 7)
    with Client(server.address) as client:
        client.reset_prefix_cache()
        for asked in (prompt, shorter):
            cold = ask(client, asked, prefix_cache=False, logprobs=True, echo_prompt_tokens=True)
            warm = [ask(client, asked, logprobs=True, echo_prompt_tokens=True) for _ in range(3)]
            assert warm[-1].usage.cached_prompt_tokens >= 64
            for result in (cold, *warm):
                assert tuple(result.prompt_token_ids) == asked
                assert len(result.logprobs) == len(result.token_ids) == 8
                assert (result.token_ids, result.logprobs) == (cold.token_ids, cold.logprobs)

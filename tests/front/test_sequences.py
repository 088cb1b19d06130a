"""Several sequences of one request through the service: samples, the best of them, and beams."""

from __future__ import annotations

import grpc
import pytest
from fake_engine import FakeEngine
from front_support import EOS, serving
from twinplane.client import AsyncClient, Finish, TwinplaneError
from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.v1 import generation_pb2, generation_pb2_grpc

WORDS = ("The quick brown fox", "jumps over", "the lazy dog today")


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    several = FakeEngine(eos=EOS, cached_prompt_tokens=1)
    several.answers = [tokenizer.encode(words) for words in WORDS]
    several.answers[1] = [*several.answers[1], EOS]
    return several


async def test_each_sample_has_its_own_text_end_and_index_in_unary_and_stream(client: AsyncClient, engine: FakeEngine) -> None:
    whole = await client.generate("ab", n=3, logprobs=True)
    stream = client.stream("ab", n=3, logprobs=True)
    deltas = [delta async for delta in stream]
    for result in (whole, await stream.result()):
        assert [sequence.text for sequence in result.sequences] == list(WORDS)
        assert [sequence.index for sequence in result.sequences] == [0, 1, 2]
        assert [sequence.finish for sequence in result.sequences] == [Finish("length"), Finish("stop", eos_token_id=EOS), Finish("length")]
        assert [sequence.token_ids for sequence in result.sequences] == engine.answers
        assert all(len(s.token_ids) == len(s.logprobs) == len(s.ranks) and s.score is None for s in result.sequences)
        assert (result.text, result.token_ids, result.finish) == (WORDS[0], engine.answers[0], Finish("length"))
    assert whole.usage == (await stream.result()).usage
    assert {delta.index for delta in deltas} == {0, 1, 2}
    assert sorted(delta.index for delta in deltas if delta.finish is not None) == [0, 1, 2]
    assert [delta for delta in deltas if delta.usage is not None or delta.timing is not None] == [deltas[-1]]


async def test_the_prompt_is_counted_once_and_the_answers_together(client: AsyncClient, engine: FakeEngine) -> None:
    usage = (await client.generate([10, 11, 12], n=3)).usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (3, 1)
    assert usage.completion_tokens == sum(map(len, engine.answers))


async def test_what_is_new_at_once_travels_in_one_message(engine: FakeEngine) -> None:
    engine.step_s = 0.01
    async with serving(engine) as (target, _), grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.SamplingParams(n=3))
        messages = [m async for m in stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request, continuous_usage=True))]
    received = 0
    for message in messages:
        assert len({delta.index for delta in message.deltas}) == len(message.deltas) >= 1
        received += sum(len(delta.token_ids) for delta in message.deltas)
        assert message.usage.completion_tokens == received
    assert len(messages) < received  # of three sequences
    assert [message.HasField("timing") for message in messages] == [False] * (len(messages) - 1) + [True]


async def test_a_stop_string_ends_its_sample_and_no_other(client: AsyncClient, engine: FakeEngine) -> None:
    engine.step_s = 0.002
    whole = await client.generate("x", n=3, stop=["brown", "la"])
    streamed = await client.stream("x", n=3, stop=["brown", "la"]).result()
    for result in (whole, streamed):
        assert [sequence.text for sequence in result.sequences] == ["The quick ", "jumps over", "the "]
        assert [sequence.finish.stop_string for sequence in result.sequences] == ["brown", None, "la"]
        assert result.usage.completion_tokens == sum(len(sequence.token_ids) for sequence in result.sequences)
        assert result.timing.queue == 0.25  # the engine was asked although it ended none of the two by itself
    assert engine.live == {}
    assert engine.closed == []


async def test_stop_strings_in_all_samples_end_the_request(client: AsyncClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.answers = [tokenizer.encode("abc" * 1000)] * 2
    engine.step_s = 0.001
    result = await client.generate("x", n=2, stop="bc")
    assert [sequence.text for sequence in result.sequences] == ["a", "a"]
    assert engine.live == {}


async def test_cancelling_ends_every_sample(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.answers = [[10] * 1000] * 3
    engine.step_s = 0.002
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        stream = client.stream("x", n=3, request_id="mine")
        await anext(aiter(stream))
        assert await client.cancel("mine") == ["mine"]
        result = await stream.result()
    assert [sequence.finish for sequence in result.sequences] == [Finish("cancelled")] * 3
    assert result.usage.completion_tokens == sum(len(sequence.token_ids) for sequence in result.sequences) < 3000


async def test_best_of_returns_the_likeliest_samples_best_first(client: AsyncClient, engine: FakeEngine) -> None:
    # The fake engine's log-probability of a token falls with its id.
    means = [sum(-0.5 - token / 1024 for token in answer) / len(answer) for answer in engine.answers]
    order = sorted(range(3), key=lambda index: -means[index])
    result = await client.generate("x", n=2, best_of=3)
    assert [sequence.text for sequence in result.sequences] == [WORDS[index] for index in order[:2]]
    assert [sequence.index for sequence in result.sequences] == [0, 1]
    assert [sequence.score for sequence in result.sequences] == pytest.approx([means[index] for index in order[:2]])
    assert all(sequence.logprobs == [] for sequence in result.sequences)  # not asked for
    assert result.usage.completion_tokens == sum(len(sequence.token_ids) for sequence in result.sequences)
    assert engine.requests[0].sampling.num_sequences == 3
    asked = await client.generate("x", n=1, best_of=3, logprobs=True)
    assert len(asked.logprobs) == len(asked.token_ids)
    assert len(asked.sequences) == 1


async def test_best_of_judges_a_sample_by_what_is_left_before_its_stop_string(client: AsyncClient, engine: FakeEngine) -> None:
    engine.answers = [[70, 70, 90, 260, 260], [100] * 5]  # the first is the better one up to the stop, the worse one as a whole
    stop = await client.detokenize([90])
    result = await client.generate("x", best_of=2, stop=stop, include_stop_in_output=False)
    assert result.sequences[0].token_ids == [70, 70, 90]
    assert result.finish.stop_string == stop


async def test_best_of_more_than_n_is_not_streamed(client: AsyncClient) -> None:
    with pytest.raises(TwinplaneError) as caught:
        await client.stream("x", n=2, best_of=3).result()
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "sampling.best_of")
    assert len((await client.stream("x", n=2, best_of=2).result()).sequences) == 2


async def test_beams_come_best_first_each_with_its_score_in_one_delta_at_the_end(client: AsyncClient, engine: FakeEngine) -> None:
    whole = await client.generate("x", beam_width=3)
    stream = client.stream("x", beam_width=3)
    deltas = [delta async for delta in stream]
    assert [(delta.index, delta.text, delta.score) for delta in deltas] == [(i, WORDS[i], -0.5 - i) for i in range(3)]
    for result in (whole, await stream.result()):
        assert [(s.text, s.score) for s in result.sequences] == [(WORDS[i], -0.5 - i) for i in range(3)]
        assert result.usage.completion_tokens == sum(map(len, engine.answers))
    fewer = await client.generate("x", beam_width=3, n=1)
    assert [s.text for s in fewer.sequences] == [WORDS[0]]
    assert fewer.usage.completion_tokens == len(engine.answers[0])
    assert engine.closed == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 17}, "sampling.n"), ({"n": 0}, "sampling.n"), ({"n": 2, "best_of": 1}, "sampling.best_of"),
        ({"beam_width": 17}, "sampling.beam_width"), ({"beam_width": 2, "temperature": 0.5}, "sampling.temperature"),
        ({"beam_width": 2, "stop": "x"}, "stop.stop_strings"), ({"beam_width": 2, "logprobs": True}, "output.logprobs"),
        ({"beam_width": 2, "n": 3}, "sampling.n"), ({"length_penalty": 2.0}, "sampling.length_penalty"),
        ({"early_stopping": "first"}, "sampling.early_stopping"),
    ],
)  # fmt: skip
async def test_B18_what_does_not_go_together_is_refused_by_field(client: AsyncClient, options: dict[str, object], field: str) -> None:
    for call in (client.generate("x", **options), client.stream("x", **options).result()):  # type: ignore[arg-type]
        with pytest.raises(TwinplaneError) as caught:
            await call
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", field)


async def test_an_early_stopping_of_a_newer_contract_is_refused(address: str) -> None:
    sampling = generation_pb2.SamplingParams(beam_width=2)
    sampling.MergeFromString(b"\x78\x63")  # early_stopping = 99
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(text="x", sampling=sampling))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "early_stopping is 99" in caught.value.details()


async def test_the_prefix_cache_can_be_reset(client: AsyncClient, engine: FakeEngine) -> None:
    await client.reset_prefix_cache()
    assert engine.resets == 1

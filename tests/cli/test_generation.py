"""``twinplane chat`` and ``generate`` against a scripted server: what is printed where, options, errors."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from twinplane.cli.main import main
from twinplane.v1 import generation_pb2 as pb
from twinplane.v1 import generation_pb2_grpc as rpc

WORDS = ["Because", " of", " Rayleigh", " scattering."]


class ScriptedServer(rpc.GenerationServiceServicer):
    """Streams WORDS; remembers what it was asked; ``refuse`` fails calls instead, ``break_after`` cuts streams."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.break_after: int | None = None

    def StreamGenerate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request.request)
        if self.refuse:
            context.abort(*self.refuse)
        for i, word in enumerate(WORDS):
            if i == self.break_after:
                context.abort(grpc.StatusCode.INTERNAL, "the machine is on fire")
            message = pb.StreamGenerateResponse(deltas=[pb.SequenceDelta(token_ids=[i], text=word)])
            if i == 0:
                message.request_id, message.model = "r1", "tiny"
            if i == len(WORDS) - 1:
                message.deltas[0].finish.reason = pb.FINISH_REASON_STOP
                message.usage.CopyFrom(pb.Usage(prompt_tokens=9, completion_tokens=4, cached_prompt_tokens=8))
                message.timing.decode.FromMilliseconds(100)
            yield message

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Several answers at once."""
        self.requests.append(request)
        count = request.sampling.beam_width or request.sampling.n or 1
        response = pb.GenerateResponse(request_id="r1", usage=pb.Usage(prompt_tokens=9, completion_tokens=2 * count))
        for index in range(count):
            response.sequences.add(index=index, text=f"answer {index}", token_ids=[index, 5]).finish.reason = pb.FINISH_REASON_STOP
            if request.sampling.beam_width or request.sampling.best_of:
                response.sequences[index].score = -0.25 - index
        return response


@pytest.fixture
def server(monkeypatch) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    running = grpc.server(ThreadPoolExecutor(2))
    rpc.add_GenerationServiceServicer_to_server(scripted, running)
    monkeypatch.setenv("TWINPLANE_PORT", str(running.add_insecure_port("127.0.0.1:0")))
    running.start()
    yield scripted
    running.stop(None).wait()


class Typed(io.StringIO):
    """A terminal at which ``text`` is typed."""

    def isatty(self) -> bool:
        return True


def test_generate_prints_the_continuation_and_nothing_else(server, capsys):
    assert main(["generate", "Why is the sky blue?"]) == 0
    out = capsys.readouterr()
    assert (out.out, out.err) == ("Because of Rayleigh scattering.\n", "")
    assert server.requests[0].text == "Why is the sky blue?"


def test_chat_sends_the_system_message_and_the_question(server):
    assert main(["chat", "--system", "Be brief.", "Why?"]) == 0
    messages = [(message.role, message.content) for message in server.requests[0].chat.messages]
    assert messages == [("system", "Be brief."), ("user", "Why?")]


def test_figures_go_to_standard_error(server, capsys):
    assert main(["chat", "--stats", "Why?"]) == 0
    out = capsys.readouterr()
    assert out.out == "Because of Rayleigh scattering.\n"
    assert "4 tokens, 30.0 tokens/s" in out.err and "9 prompt tokens, 8 of them cached; stop" in out.err


def test_json_is_one_object_with_everything(server, capsys):
    assert main(["generate", "--json", "Why?"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["token_ids"], result["finish"]["reason"]) == ("".join(WORDS), [0, 1, 2, 3], "stop")
    assert result["usage"] == {"prompt_tokens": 9, "completion_tokens": 4, "cached_prompt_tokens": 8}


def test_options_that_are_zero_are_sent_and_those_not_given_are_not(server):
    options = ["--temperature", "0", "--seed", "0", "--max-tokens", "5", "--stop", "a", "--stop", "b", "--ignore-eos"]
    assert main(["generate", *options, "x"]) == 0
    request = json_format.MessageToDict(server.requests[0], preserving_proto_field_name=True)
    assert request["sampling"] == {"temperature": 0.0, "seed": "0"}
    assert request["stop"] == {"max_tokens": 5, "stop_strings": ["a", "b"], "ignore_eos": True}


def test_several_answers_are_shown_one_below_the_other(server, capsys):
    assert main(["generate", "--n", "2", "--stats", "x"]) == 0
    out = capsys.readouterr()
    assert out.out == "--- 1\nanswer 0\n--- 2\nanswer 1\n"
    assert "4 tokens" in out.err
    assert main(["generate", "--beam-width", "2", "--length-penalty", "0.5", "x"]) == 0
    assert capsys.readouterr().out == "--- 1 (score -0.25)\nanswer 0\n--- 2 (score -1.25)\nanswer 1\n"
    assert main(["generate", "--best-of", "3", "--json", "x"]) == 0
    assert [s["score"] for s in json.loads(capsys.readouterr().out)["sequences"]] == [-0.25]
    asked = [json_format.MessageToDict(request, preserving_proto_field_name=True)["sampling"] for request in server.requests]
    assert asked == [{"n": 2}, {"beam_width": 2, "length_penalty": 0.5}, {"best_of": 3}]


@pytest.mark.parametrize("when", ["heuristic", "first", "never"])
def test_a_beam_search_can_be_told_when_to_stop(server, when):
    assert main(["generate", "--beam-width", "2", "--early-stopping", when, "x"]) == 0
    asked = json_format.MessageToDict(server.requests[0], preserving_proto_field_name=True)["sampling"]
    assert asked == {"beam_width": 2, "early_stopping": f"EARLY_STOPPING_{when.upper()}"}


def test_a_time_to_stop_that_there_is_not_is_a_usage_error(server, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "--beam-width", "2", "--early-stopping", "soon", "x"])
    assert end.value.code == 2 and "--early-stopping" in capsys.readouterr().err and not server.requests


def test_a_conversation_has_one_answer_a_turn(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--n", "2", "x"])
    assert "--n" in capsys.readouterr().err


def test_the_prompt_may_come_on_standard_input(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from a dash"))
    assert main(["generate", "-"]) == 0
    assert [request.text for request in server.requests] == ["from a pipe", "from a dash"]


def test_generate_without_a_prompt_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Typed(""))
    assert main(["generate"]) == 2
    assert "PROMPT" in capsys.readouterr().err


def test_a_conversation_keeps_what_was_said_until_reset(server, monkeypatch):
    monkeypatch.setattr("sys.stdin", Typed("one\n\ntwo\n/reset\nthree\n"))
    assert main(["chat", "--system", "S"]) == 0
    roles = [[message.role for message in request.chat.messages] for request in server.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_a_refused_turn_is_forgotten_and_the_conversation_goes_on(server, monkeypatch, capsys):
    server.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "the prompt has 9 tokens, the limit is 8")
    monkeypatch.setattr("sys.stdin", Typed("one\ntwo\n"))
    assert main(["chat"]) == 0
    assert [len(request.chat.messages) for request in server.requests] == [1, 1]
    assert capsys.readouterr().err.count("the prompt has 9 tokens, the limit is 8 [INVALID_ARGUMENT]") == 2


def test_a_refusal_is_one_sentence_and_exit_code_1(server, capsys):
    server.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "temperature is 200, at most 100 is allowed")
    assert main(["chat", "hi"]) == 1
    err = capsys.readouterr().err
    assert "temperature is 200, at most 100 is allowed" in err and "Traceback" not in err


def test_a_stream_that_breaks_keeps_what_came_and_says_why(server, capsys):
    server.break_after = 2
    assert main(["generate", "x"]) == 1
    out = capsys.readouterr()
    assert out.out == "Because of\n" and "the machine is on fire" in out.err


def test_an_absent_server_is_explained_with_what_to_do(capsys):
    assert main(["generate", "--addr", "127.0.0.1:1", "x"]) == 1
    err = capsys.readouterr().err
    assert "no server answers at 127.0.0.1:1" in err and "twinplane serve" in err and "--addr" in err

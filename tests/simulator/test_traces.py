"""Trace files, good and bad."""

from __future__ import annotations

import contextlib
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twinplane.control_plane.simulator import FORMATS, traces
from twinplane.control_plane.simulator.traces import READERS, TraceError, load, output_stream


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "trace.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def prompts(trace):
    native = trace.native()
    return [native.prompt(i) for i in range(len(trace))]


def common(a, b):
    """Tokens that two prompts begin with alike."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n


def test_the_command_line_names_every_format():
    assert set(FORMATS) == set(READERS)


def test_azure(write):
    trace = load(write("t_ms,in,out\n100,374,44\n1350,396,109\n"))
    assert list(trace.arrival_s) == [0.0, 1.25]  # from the first request on
    assert list(trace.prompt_tokens) == [374, 396] and list(trace.output_tokens) == [44, 109]
    assert common(*prompts(trace)) == 0


def test_azure_as_published(write):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = load(write(text))
    assert trace.arrival_s[1] == pytest.approx(4.314579, abs=1e-6)


def test_requests_come_out_in_order_of_arrival(write):
    trace = load(write("t_ms,in,out\n500,5,1\n0,6,1\n"))
    assert list(trace.prompt_tokens) == [6, 5] and list(trace.arrival_s) == [0.0, 0.5]


def test_comments_empty_lines_byte_order_marks_and_gzip(write):
    text = "\ufeff# a comment\n\nt_ms,in,out\n\n0,5,1\n"
    assert len(load(write(text))) == 1
    assert len(load(write(gzip.compress(text.encode()), "trace.csv.gz"))) == 1


def test_lengths_need_a_rate(write):
    path = write("in,out\n5,6\n0,3\n7,8\n4,0\n")
    trace = load(path)
    assert list(trace.prompt_tokens) == [5, 7]  # without those that are no requests
    with pytest.raises(TraceError, match="give a rate"):
        trace.native()
    assert load(path, rate=2.0).arrival_s is not None


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed_alone(write):
    path = write("in,out\n" + "5,6\n" * 20_000)
    first, again, other = load(path, rate=8.0), load(path, rate=8.0), load(path, rate=8.0, seed=1)
    assert np.array_equal(first.arrival_s, again.arrival_s) and not np.array_equal(first.arrival_s, other.arrival_s)
    gaps = np.diff(first.arrival_s)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03) and gaps.std() == pytest.approx(1 / 8, rel=0.03)


def test_limit_takes_the_first(write):
    path = write("t_ms,in,out\n0,5,1\n1,6,1\n2,7,1\n")
    assert list(load(path, limit=2).prompt_tokens) == [5, 6]
    assert len(load(path, limit=9)) == 3


def test_a_turn_begins_with_what_was_said_before(write):
    # Two conversations: (10 -> 5), (18 -> 4: 10 + 5 + 3 more), and (12 -> 2).
    trace = load(write("in,out\n10,5\n18,4\n12,2\n"), format="multiturn", rate=1.0)
    by_length = {int(n): i for i, n in enumerate(trace.prompt_tokens)}
    tokens = prompts(trace)
    first, second, other = (by_length[n] for n in (10, 18, 12))
    assert first < second
    assert common(tokens[first], tokens[second]) == 10
    runs = trace.runs[int(trace.run_offsets[second]) : int(trace.run_offsets[second + 1])]
    assert [tuple(map(int, run))[1:] for run in runs] == [(0, 10), (0, 5), (10, 8)] or int(runs[1][0]) == output_stream(first)
    assert int(runs[1][0]) == output_stream(first) and int(runs[1][2]) == 5
    assert common(tokens[other], tokens[second]) == 0


def test_mooncake_hash_ids_are_shared_tokens(write):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 250, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 9]},
        {"timestamp": 500, "input_length": 512, "output_length": 5, "hash_ids": [7]},
    ]
    trace = load(write("\n".join(map(json.dumps, rows)), "trace.jsonl"))
    a, b, c = prompts(trace)
    assert (len(a), len(b), len(c)) == (1100, 1030, 512)
    assert common(a, b) == 1024 and common(a, c) == 0
    assert list(trace.arrival_s) == [0.0, 0.25, 0.5]


def agentic_line(**changes):
    requests = [
        {"t": 0.0, "in": 130, "out": 5, "h": [[1, 2]], "think": 0, "api": None},
        {"t": 4.0, "sub": [{"t": 1.0, "in": 64, "out": 3, "h": [[90, 1]]}]},
        {"t": 9.0, "in": 200, "out": 7, "h": [[1, 3]]},
    ]
    return json.dumps({"id": "x", "block": 64, "tool_tokens": 1, "system_tokens": 1, "reqs": requests} | changes)


def test_agentic_conversations_share_within_and_not_between(write):
    path = write(agentic_line() + "\n" + agentic_line(), "trace.jsonl")
    trace = load(path, rate=1e-3)
    tokens = prompts(trace)
    assert len(trace) == 6
    longest = [t for t in tokens if len(t) == 200]
    shortest = [t for t in tokens if len(t) == 130]
    shared = [[common(a, b) for b in longest] for a in shortest]
    assert sorted(map(sorted, shared)) == [[0, 128], [0, 128]]  # the incomplete block is nobody else's
    # Times stay as they are within a conversation, and a sub-agent's count from its start.
    by_conversation = [trace.arrival_s[trace.prompt_tokens == n] for n in (130, 64, 200)]
    assert np.allclose(by_conversation[1] - by_conversation[0], 5.0) and np.allclose(by_conversation[2] - by_conversation[0], 9.0)
    with pytest.raises(TraceError, match="give a rate"):
        load(path)


def test_our_own_format(write):
    rows = [
        {"arrival_s": 0.5, "prompt_tokens": 30, "output_tokens": 4, "prefix": [["system", 20]]},
        {
            "arrival_s": 0.0,
            "prompt_tokens": 25,
            "output_tokens": 4,
            "prefix": [["system", 20], ["tools", 5]],
            "priority": -2,
            "tenant": "x",
        },
    ]
    trace = load(write("\n".join(map(json.dumps, rows)), "trace.jsonl"))
    assert list(trace.priority) == [-2, 0] and list(trace.arrival_s) == [0.0, 0.5]
    assert [trace.tenants[i] for i in trace.tenant] == ["x", ""]
    assert common(*prompts(trace)) == 20


HOSTILE = [
    ("trace.csv", "t_ms,in,out\n0,5,1\n1,x,1\n", r"trace\.csv:3: in is 'x', expected a number"),
    ("trace.csv", "t_ms,in,out\n0,5,0\n", r":2: out is '0', expected 1 to"),
    ("trace.csv", "t_ms,in,out\n0,-5,1\n", r":2: in is '-5'"),
    ("trace.csv", "t_ms,in,out\n0,1.5,1\n", r":2: in is '1.5', expected an integer"),
    ("trace.csv", "t_ms,in,out\n0,nan,1\n", r":2: in is 'nan'"),
    ("trace.csv", "t_ms,in,out\n0,1e300,1\n", r":2: in is '1e300'"),
    ("trace.csv", "t_ms,in,out\n-1,5,1\n", r":2: t_ms is '-1'"),
    ("trace.csv", "t_ms,in,out\n0,5\n", r":2: 2 values, the header names 3"),
    ("trace.csv", 't_ms,in,out\n0,"5,1\n', r":2: not a line of CSV"),
    ("trace.csv", "t_ms,in,out\n", "holds no requests"),
    ("trace.csv", "", "is empty"),
    ("trace.csv", "# only a comment\n", "is empty"),
    ("trace.csv", "a,b\n1,2\n", r":1: no known format has a, b"),
    ("trace.csv", b"t_ms,in,out\n0,\xff,1\n", "damaged or not text"),
    ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", r":2: TIMESTAMP is 'yesterday'"),
    ("trace.csv.gz", b"not gzip at all", r"trace\.csv\.gz: can not be read"),
    ("trace.csv.gz", gzip.compress(b"t_ms,in,out\n" + b"0,5,1\n" * 100)[:-12], "damaged"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 5, "hash_ids": [1]\n', r":1: not JSON"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', r":1: 1 hash_ids of 512"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be integers"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [-1]}', "hash_ids must be integers"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": 3}', "hash_ids is 3, expected a list"),
    ("trace.jsonl", '{"timestamp": 0, "input_length": 6, "output_length": true, "hash_ids": [1]}', "output_length is True"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "arrival_s": 0}\n[1]\n', r":2: expected an object, got \[1\]"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "arrival_s": 0}\n{"prompt_tokens": 5, "output_tokens": 1}', "only some"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "prefix": [["a", 9]]}', "the prefixes are 9 tokens long, the prompt only 5"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "prefix": [["a"]]}', r"prefix holds \['a'\]"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "prefix": [["a", -1]]}', "prefix holds"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "priority": 1e20}', "priority is 1e"),
    ("trace.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "tenant": 7}', "tenant is 7"),
    ("trace.jsonl", '{"prompt_tokens": 5}', "no known format"),
    ("trace.jsonl", agentic_line(reqs=[3]), r"reqs\[0\] is 3, expected an object"),
    ("trace.jsonl", agentic_line(reqs=[{"t": 0, "in": 5, "out": 1, "h": [[1, 2]]}]), r"128 hashed tokens do not make a prompt of 5"),
    ("trace.jsonl", agentic_line(reqs=[{"t": 0, "in": 5, "out": 1, "h": [1]}]), r"h holds 1"),
    ("trace.jsonl", agentic_line(reqs=[{"t": 0, "sub": [{"in": 5}]}]), r"sub\[0\]"),
    ("trace.jsonl", agentic_line(block=0), r":1: block is 0"),
    ("trace.jsonl", "[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_bad_files_are_refused_by_file_and_line(write, name, content, message):
    path = write(content, name)
    format = "twinplane" if isinstance(content, str) and content.startswith("[[") else None
    with pytest.raises(TraceError, match=message) as caught:
        load(path, format=format, rate=1.0)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="can not be read: No such file"):
        load(tmp_path / "nothing.csv")


@given(st.binary(max_size=200), st.sampled_from(sorted(READERS)))
@settings(max_examples=150, deadline=None)
def test_whatever_is_in_a_file_it_is_a_trace_or_a_trace_error(tmp_path_factory, content, format):
    path = tmp_path_factory.mktemp("trace") / "file"
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        load(path, format=format, rate=1.0).native()


def test_synthetic_lengths_have_the_means_asked_for():
    trace = traces.synthetic("x", 50_000, (19.31, 0.62, 4, 512), (58.9, 0.90, 2, 1024))
    assert trace.prompt_tokens.mean() == pytest.approx(19.31, rel=0.03) and trace.output_tokens.mean() == pytest.approx(58.9, rel=0.03)
    assert trace.prompt_tokens.min() >= 4 and trace.output_tokens.max() <= 1024

"""Settings: precedence, errors that name their source, and the effective dump."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from twinplane.shared.config import ALL_NAMES, ConfigError, ControlPlaneSettings, DataPlaneSettings, ServeSettings
from twinplane.shared.options import Choice, Integer, Loaded, Number, Seconds, Size, Text, load


def read(settings=ServeSettings, *, cli=None, environ=None, file: Path | None = None, required=()) -> Loaded:
    return load(settings, cli=cli or {}, environ=environ or {}, file=file, known=ALL_NAMES, required=required)


def problems(**kwargs) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(**kwargs)
    return caught.value.problems


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_command_line_beats_environment_beats_file_beats_default(config_file):
    file = config_file("max-num-seqs: 10\nport: 10\nhost: 10.0.0.1\n")
    loaded = read(cli={"max_num_seqs": "30"}, environ={"TWINPLANE_MAX_NUM_SEQS": "20", "TWINPLANE_PORT": "20"}, file=file)
    settings = loaded.settings
    assert (settings.max_num_seqs, settings.port, settings.host, settings.overlap_depth) == (30, 20, "10.0.0.1", 2)
    origins = [loaded.origins[name] for name in ("max_num_seqs", "port", "host", "overlap_depth")]
    assert origins == ["--max-num-seqs", "TWINPLANE_PORT", f"{file}: host", "default"]


def test_the_environment_may_name_the_file(config_file):
    file = config_file("port: 1234\n")
    assert read(environ={"TWINPLANE_CONFIG": str(file)}).settings.port == 1234


def test_effective_dump_is_a_file_that_gives_the_same_settings(config_file):
    cli = {"model": "org/1.10", "kv_cache_bytes": "2GiB", "instance": "no", "drain_grace": "500ms", "seed": "7", "uds": "/tmp/x.sock"}
    loaded = read(cli=cli)
    again = read(file=config_file(loaded.effective()))
    assert again.settings == loaded.settings
    assert again.effective().count("#") == loaded.effective().count("#")


def test_effective_dump_names_the_origin_of_each_value():
    dump = read(cli={"port": "1"}, environ={"TWINPLANE_THREADS": "3"}).effective().splitlines()
    lines = {line.split(":")[0]: line for line in dump if ":" in line}
    assert lines["port"].endswith("# --port")
    assert lines["threads"].endswith("# TWINPLANE_THREADS")
    assert lines["host"].endswith("# default")
    assert len(lines) == len(ALL_NAMES)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("max-num-seq", "max-num-seqs"), ("gpu_memory_fraction", "memory-fraction"), ("prot", "port")],
)
def test_unknown_file_key_is_an_error_with_a_suggestion(config_file, key, suggestion):
    (problem,) = problems(file=config_file(f"{key}: 1\n"))
    assert "config.yaml" in problem and repr(key) in problem and f"did you mean '{suggestion}'" in problem


def test_unknown_variable_is_an_error_with_a_suggestion():
    assert problems(environ={"TWINPLANE_MAX_SEQS": "1"}) == (
        "environment: unknown variable TWINPLANE_MAX_SEQS; did you mean 'TWINPLANE_MAX_NUM_SEQS'?",
    )


def test_variables_of_others_are_left_alone():
    assert read(environ={"PATH": "x", "TWINPLANE_TORCH": "torch", "TWINPLANE_PYTHON": "python3.12"}).settings == read().settings


def test_kubernetes_service_links_are_not_taken_for_settings():
    links = {
        "TWINPLANE_PORT": "tcp://10.0.0.1:50051",
        "TWINPLANE_SERVICE_HOST": "10.0.0.1",
        "TWINPLANE_SERVICE_PORT": "50051",
        "TWINPLANE_SERVICE_PORT_GRPC": "50051",
        "TWINPLANE_PORT_50051_TCP_ADDR": "10.0.0.1",
        "TWINPLANE_METRICS_PORT": "tcp://10.0.0.2:9400",
    }
    assert read(environ=links).settings.port == 50051


def test_every_problem_is_reported_at_once(config_file):
    found = problems(
        cli={"port": "x"}, environ={"TWINPLANE_THREADS": "-1"}, file=config_file("block-size: big\nnonsense: 1\n"), required=("model",)
    )
    assert len(found) == 5
    for part in ("--port", "TWINPLANE_THREADS", "block-size", "nonsense", "model is missing"):
        assert any(part in problem for problem in found)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [1"])
def test_a_file_that_is_no_mapping_is_an_error_naming_it(config_file, text):
    (problem,) = problems(file=config_file(text))
    assert "config.yaml" in problem


def test_a_missing_file_is_an_error_naming_it(tmp_path):
    assert problems(file=tmp_path / "none.yaml") == (f"{tmp_path}/none.yaml: can not be read: No such file or directory",)


def test_a_key_given_twice_is_an_error(config_file):
    (problem,) = problems(file=config_file("max-num-seqs: 1\nmax_num_seqs: 2\n"))
    assert "twice" in problem


def test_one_file_configures_both_planes(config_file):
    file = config_file("model: org/m\nthreads: 2\nport: 1\n")
    assert read(ControlPlaneSettings, file=file).settings.port == 1
    assert read(DataPlaneSettings, file=file).settings.threads == 2


def test_settings_that_contradict_each_other_are_refused_with_both_values():
    (problem,) = problems(cli={"max_num_seqs": "64", "max_num_batched_tokens": "32"})
    assert "64" in problem and "32" in problem
    (problem,) = problems(cli={"kv_cache_bytes": "1GiB", "memory_fraction": "0.5"})
    assert "kv-cache-bytes" in problem and "memory-fraction" in problem


@pytest.mark.parametrize("value", ["17", "8", "128"])
def test_block_sizes_without_a_kernel_are_refused(value):
    (problem,) = problems(cli={"block_size": value})
    assert value in problem


def test_F01_absurd_memory_fractions_are_refused():
    for value in ("0", "1.5", "90%", "nan", "-1"):
        (problem,) = problems(cli={"memory_fraction": value})
        assert "--memory-fraction" in problem and value in problem


def test_a_model_path_that_does_not_exist_is_found_before_anything_loads(tmp_path):
    (problem,) = problems(cli={"model": str(tmp_path / "none.gguf")})
    assert "does not exist" in problem
    assert read(cli={"model": "org/name-on-the-hub"}).settings.model == "org/name-on-the-hub"


def test_a_unix_path_longer_than_the_kernel_allows_is_refused_with_both_lengths():
    (problem,) = problems(cli={"uds": "/" + "x" * 120})
    assert "121" in problem and "107" in problem


@pytest.mark.parametrize(
    ("text", "value"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1024", 1024), ("1.5KiB", 1536), ("3 mib", 3 << 20), (4096, 4096), ("7B", 7)],
)
def test_sizes_are_read_with_and_without_units(text, value):
    assert Size().parse(text) == value


@pytest.mark.parametrize("text", ["", "2XB", "-1", "1e9", "GiB", True, "0"])
def test_nonsense_sizes_are_refused(text):
    with pytest.raises(ValueError, match="got"):
        Size().parse(text)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_size_that_is_shown_is_read_again(value):
    assert Size().parse(Size().show(value)) == value


@pytest.mark.parametrize(("text", "value"), [("5", 5.0), ("500ms", 0.5), ("2m", 120.0), (3, 3.0), (0.25, 0.25), ("1.5s", 1.5)])
def test_durations_are_read_with_and_without_units(text, value):
    assert Seconds().parse(text) == value


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (Integer(), True),
        (Integer(), "1.5"),
        (Integer(), 2.0),
        (Integer(1, 5), 6),
        (Number(), "inf-ish"),
        (Number(0, 1), float("nan")),
        (Seconds(), "5h"),
        (Seconds(), "-1"),
        (Choice(("a", "b")), "c"),
        (Text(), ""),
        (Text(), ["a"]),
    ],
)
def test_bad_values_are_refused_with_what_was_expected(kind, raw):
    with pytest.raises(ValueError, match=r"(expected|at least).*got"):
        kind.parse(raw)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "../x", "a b", "x" * 65, "a.lock", "a.sock"])
def test_instance_names_can_not_leave_their_directory(name):
    (problem,) = problems(cli={"instance": name})
    assert "--instance" in problem


def test_yaml_types_and_auto_are_understood(config_file):
    file = config_file(yaml.safe_dump({"max-model-len": "auto", "kv-cache-bytes": 1 << 20, "drain-grace": 1.5, "memory-fraction": None}))
    settings = read(file=file).settings
    assert (settings.max_model_len, settings.kv_cache_bytes, settings.drain_grace, settings.memory_fraction) == (None, 1 << 20, 1.5, None)

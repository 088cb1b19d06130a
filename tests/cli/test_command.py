"""The ``twinplane`` command: dispatch, early checks, and what the supervisor gets from and gives to the planes."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
from twinplane.cli import control_plane, data_plane
from twinplane.cli.arguments import load_settings
from twinplane.cli.listen import require_free
from twinplane.cli.main import COMMANDS, main
from twinplane.cli.plane import run_plane
from twinplane.cli.serve import plane_argv
from twinplane.shared import log, supervision
from twinplane.shared.config import ConfigError, ControlPlaneSettings, DataPlaneSettings, ServeSettings, read


def test_every_command_explains_itself(capsys):
    for commands in COMMANDS.values():
        for name in commands:
            with pytest.raises(SystemExit) as caught:
                main([name, "--help"])
            assert caught.value.code == 0
            assert capsys.readouterr().out.startswith(f"usage: twinplane {name}")


def test_the_help_lists_every_command_with_its_summary(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command.summary in out and name in out for group in COMMANDS.values() for name, command in group.items())


def test_no_command_is_a_usage_error_with_help_on_standard_error(capsys):
    assert main([]) == 2
    out = capsys.readouterr()
    assert out.out == "" and "usage: twinplane" in out.err


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == "twinplane: unknown command 'serv'; did you mean 'serve'?\n"


def test_the_version_is_that_of_the_installed_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twinplane {version('twinplane')}\n"


def test_check_prints_the_configuration_and_starts_nothing(capsys):
    for command in ("serve", "control-plane", "data-plane"):
        assert main([command, "a/model", "--instance", "x1", "--check"]) == 0
        out = capsys.readouterr().out
        assert 'instance: "x1"' in out and "# --instance" in out


def test_a_model_given_twice_is_refused():
    with pytest.raises(SystemExit, match="given twice"):
        main(["serve", "a/one", "--model", "a/two"])


def test_a_reader_that_has_enough_is_no_error():
    code = "import sys; from twinplane.cli.main import main; sys.exit(main(['config']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert err == b"" and process.returncode in (0, 141)


# ---- the address (D09)


@pytest.fixture
def listener():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as a gRPC server with default options would
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("command", ["serve", "control-plane"])
def test_D09_a_taken_port_is_found_before_anything_starts(listener, command, capsys):
    assert main([command, "a/model", "--port", str(listener)]) == 78
    err = capsys.readouterr().err
    assert f"port: {listener} on 127.0.0.1 is in use" in err and "--port" in err
    assert "started" not in err


def test_D09_a_free_port_and_a_port_in_time_wait_are_accepted():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC sets it
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits
        client.close()
    require_free(ControlPlaneSettings(model="a/m", port=port))


def test_D09_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="can not listen on 192"):
        require_free(ControlPlaneSettings(model="a/m", host="192.0.2.1"))


def test_a_unix_socket_is_refused_only_while_somebody_listens(tmp_path):
    path = str(tmp_path / "s.sock")
    settings = ControlPlaneSettings(model="a/m", uds=path)
    require_free(settings)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(ConfigError, match="another server listens"):
            require_free(settings)
    require_free(settings)  # its file is still there, as after kill -9


def test_a_unix_socket_in_no_directory_is_refused_with_the_directory(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        require_free(ControlPlaneSettings(model="a/m", uds=str(tmp_path / "nowhere" / "s.sock")))


# ---- between supervisor and planes


@pytest.mark.parametrize(
    ("command", "module", "settings"),
    [("control-plane", control_plane, ControlPlaneSettings), ("data-plane", data_plane, DataPlaneSettings)],
)
def test_a_plane_started_by_serve_gets_exactly_the_settings_of_serve(command, module, settings, monkeypatch, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("max-model-len: 100\ndrain-grace: 500ms\nthreads: 3\n")
    monkeypatch.setenv("TWINPLANE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("TWINPLANE_SEED", "auto")
    loaded = read(ServeSettings, {"model": "a b/-m", "kv_cache_bytes": "3MiB", "served_model_name": "with space"}, config=config)
    monkeypatch.delenv("TWINPLANE_MAX_NUM_SEQS")
    python, _, main_module, name, *flags = plane_argv(command, settings, loaded)
    assert (python, main_module, name) == (sys.executable, "twinplane.cli.main", command)
    plane = load_settings(module.parser("x").parse_args(flags), settings).settings
    for field in settings.__dataclass_fields__:
        assert getattr(plane, field) == getattr(loaded.settings, field), field


@pytest.fixture
def report_pipe():
    read_end, write_end = os.pipe()
    yield read_end, write_end
    supervision.attach(None)
    os.close(read_end)


def run_with(write_end: int, start) -> int:
    args = argparse.Namespace(config=None, check=False, supervisor_fd=write_end, model_argument="a/m", log_format="json")
    return run_plane(args, DataPlaneSettings, start)


def report(read_end: int, write_end: int) -> list[str]:
    os.close(write_end)
    return os.read(read_end, 65536).decode().splitlines()


def test_F03_an_exception_leaves_its_sentence_with_the_supervisor(report_pipe, capsys):
    def start(settings):
        raise FileNotFoundError("shard 2 of 3\nis missing")

    assert run_with(report_pipe[1], start) == 1
    assert report(*report_pipe) == ["failed FileNotFoundError: shard 2 of 3 is missing"]
    assert "Traceback" in capsys.readouterr().err


def test_F03_a_failure_the_plane_only_logged_reaches_the_supervisor_too(report_pipe, capsys):
    def start(settings):
        log.get_logger("x").critical("failed", error="the KV cache would need 8 GiB, 2 GiB are left")
        return 1

    assert run_with(report_pipe[1], start) == 1
    assert report(*report_pipe) == ["failed the KV cache would need 8 GiB, 2 GiB are left"]


def test_a_configuration_error_reaches_the_supervisor_and_the_command_line(report_pipe):
    def start(settings):
        raise ConfigError(["port: 1 is in use"])

    with pytest.raises(ConfigError):
        run_with(report_pipe[1], start)
    assert report(*report_pipe) == ["failed port: 1 is in use"]


def test_a_clean_end_reports_readiness_only(report_pipe):
    def start(settings):
        supervision.notify_ready()
        return 0

    assert run_with(report_pipe[1], start) == 0
    assert report(*report_pipe) == ["ready"]


def test_without_a_supervisor_notifications_do_nothing():
    supervision.attach(None)
    supervision.notify_ready()
    supervision.notify_failed("x")

"""``twinplane health``: exit codes and sentences, against a real gRPC health service and a real segment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from twinplane.cli.health import READY
from twinplane.cli.main import main
from twinplane.shared import segment
from twinplane.shared._shm import DataEnd
from twinplane.shared.wire import Capacities

CAPACITIES = Capacities(
    ring_depth=3,
    max_rows=2,
    max_step_tokens=8,
    max_table_writes=2,
    max_copies=1,
    max_extra_words=4,
    max_results=2,
    max_swaps=0,
    max_candidates=0,
)


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    servicer = health.HealthServicer()
    running = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}", servicer
    running.stop(None).wait()


@pytest.fixture
def attached() -> Iterator[tuple[str, DataEnd]]:
    """An instance with a data plane attached."""
    instance = f"test-health-{os.getpid()}"
    made = segment.create_segment(instance, CAPACITIES, epoch=1)
    end = DataEnd(made.fd, 1)
    made.close()
    yield instance, end
    end.close()
    segment.instance_names(instance).segment_path.unlink(missing_ok=True)


def test_a_serving_server_is_well(server, capsys):
    address, servicer = server
    servicer.set(READY, health_pb2.HealthCheckResponse.SERVING)
    assert main(["health", "--addr", address]) == 0
    assert capsys.readouterr().out == f"{address} {READY}: SERVING\n"


def test_D12_a_server_that_is_alive_but_not_ready_is_not_well(server, capsys):
    address, servicer = server
    servicer.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
    servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    assert main(["health", "--addr", address]) == 1
    assert main(["health", "--addr", address, "--service", "liveness"]) == 0
    assert "NOT_SERVING" in capsys.readouterr().out


def test_an_unknown_service_and_an_absent_server_say_which(server, capsys):
    address, _ = server
    assert main(["health", "--addr", address, "--service", "nonsense"]) == 1
    assert "knows no service 'nonsense'" in capsys.readouterr().out
    assert main(["health", "--addr", "127.0.0.1:1", "--timeout", "5s"]) == 1
    assert "127.0.0.1:1 can not be reached" in capsys.readouterr().out


def test_waiting_ends_as_soon_as_the_server_is_ready(server):
    address, servicer = server
    servicer.set(READY, health_pb2.HealthCheckResponse.NOT_SERVING)
    timer = threading.Timer(0.3, servicer.set, (READY, health_pb2.HealthCheckResponse.SERVING))
    timer.start()
    assert main(["health", "--addr", address, "--wait", "30s"]) == 0
    timer.join()


def test_the_address_defaults_to_where_this_environment_has_a_server_listen(server, monkeypatch):
    address, servicer = server
    servicer.set(READY, health_pb2.HealthCheckResponse.SERVING)
    monkeypatch.setenv("TWINPLANE_HOST", "0.0.0.0")
    monkeypatch.setenv("TWINPLANE_PORT", address.split(":")[1])
    assert main(["health"]) == 0


def test_a_data_plane_with_a_fresh_heartbeat_is_well(attached, capsys):
    instance, end = attached
    end.start_heartbeat()
    assert main(["health", "--shm", "--instance", instance, "--wait", "5"]) == 0
    assert "last heartbeat" in capsys.readouterr().out


def test_C05_a_data_plane_whose_heartbeat_is_old_is_not_well(attached, capsys):
    instance, end = attached
    end.start_heartbeat()
    assert main(["health", "--shm", "--instance", instance, "--wait", "5"]) == 0
    end.close()  # the last beat stays in the segment and ages
    threading.Event().wait(0.1)
    assert main(["health", "--shm", "--instance", instance, "--max-heartbeat-age", "50ms"]) == 1
    assert "more than 0.05 s" in capsys.readouterr().out


def test_a_data_plane_that_never_beat_is_not_well(attached, capsys):
    instance, _ = attached
    assert main(["health", "--shm", "--instance", instance]) == 1
    assert "no" in capsys.readouterr().out


def test_C08_looking_at_the_segment_leaves_it_there(attached):
    instance, _ = attached
    main(["health", "--shm", "--instance", instance])
    assert segment.instance_names(instance).segment_path.exists()


def test_no_segment_is_explained(capsys):
    assert main(["health", "--shm", "--instance", "test-nobody"]) == 1
    assert "no data plane is attached" in capsys.readouterr().out


def test_a_foreign_file_in_place_of_the_segment_is_refused(capsys):
    path = segment.instance_names("test-foreign").segment_path
    path.write_bytes(b"x" * 8192)
    try:
        assert main(["health", "--shm", "--instance", "test-foreign"]) == 1
    finally:
        path.unlink()
    assert "not made by this version" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--timeout", "soon"], ["--max-heartbeat-age", "-1"], ["--nonsense"]])
def test_usage_errors_exit_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(["health", *arguments])
    assert caught.value.code == 2

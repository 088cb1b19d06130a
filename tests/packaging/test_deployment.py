"""compose.yaml, the Dockerfile and the Kubernetes manifest, by the real checkers; and that what they say fits the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from twinplane.cli import control_plane, data_plane, health
from twinplane.shared.config import ControlPlaneSettings, DataPlaneSettings
from twinplane.shared.options import Seconds, load

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"


def check(program: str, *arguments: str | Path) -> None:
    """Run a checker that pip put beside our Python; skip where it is not installed."""
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"{program} is not installed (it is part of the `test` extra)")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def compose_services() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text())["services"])


def containers() -> dict[str, Any]:
    deployment = next(d for d in yaml.safe_load_all(KUBERNETES.read_text()) if d["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    return {c["name"]: c for c in [*pod["initContainers"], *pod["containers"]]} | {"pod": pod}


def test_docker_compose_accepts_the_compose_file():
    check("docker-compose", "-f", COMPOSE, "config", "-q")


def test_the_compose_file_follows_the_compose_specification():
    check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_the_manifest_follows_the_kubernetes_schemas():
    check("kubernetes-validate", "-k", "1.36", "--strict", KUBERNETES)


def test_the_dockerfile_has_no_findings():
    check("hadolint", ROOT / "Dockerfile")


PARSERS = {"control-plane": (control_plane, ControlPlaneSettings), "data-plane": (data_plane, DataPlaneSettings)}


def settings_of(command: list[str], environment: dict[str, str]) -> Any:
    """What a container's command line and environment make of it."""
    module, settings = PARSERS[command[0]]
    args = vars(module.parser("x").parse_args(command[1:]))
    names = {field: args[field] for field in settings.__dataclass_fields__ if field in args}
    known = {*ControlPlaneSettings.__dataclass_fields__, *DataPlaneSettings.__dataclass_fields__}
    assert environment["TWINPLANE_MODEL"].startswith(("/models/", "${TWINPLANE_MODEL:-/models/"))
    environment = environment | {"TWINPLANE_MODEL": "a/model"}  # the path exists in the container only
    return load(settings, cli=names, environ=environment, known=known, required=("model",)).settings


def test_the_compose_commands_are_understood_and_name_one_instance():
    services = compose_services()
    control = settings_of(services["control-plane"]["command"], services["control-plane"]["environment"])
    data = settings_of(services["data-plane"]["command"], services["data-plane"]["environment"])
    assert control.instance == data.instance
    assert (control.host, control.port) == ("0.0.0.0", 50051)
    assert Seconds().parse(services["control-plane"]["stop_grace_period"]) > control.drain_delay + control.drain_grace


def test_the_kubernetes_commands_are_understood_and_leave_time_to_drain():
    pods = containers()
    environments = {name: {e["name"]: e["value"] for e in pods[name]["env"]} for name in ("control-plane", "data-plane")}
    control = settings_of(pods["control-plane"]["args"], environments["control-plane"])
    data = settings_of(pods["data-plane"]["args"], environments["data-plane"])
    assert control.instance == data.instance
    assert environments["control-plane"]["TWINPLANE_MODEL"] == environments["data-plane"]["TWINPLANE_MODEL"]
    assert pods["pod"]["terminationGracePeriodSeconds"] > control.drain_delay + control.drain_grace


def test_both_planes_share_dev_shm_and_neither_needs_to_write_elsewhere_but_tmp():
    for service in compose_services().values():
        shm = [v for v in service["volumes"] if isinstance(v, dict) and v["target"] == "/dev/shm"]
        assert [v["source"] for v in shm] == ["shm"] and service["read_only"] is True
    pods = containers()
    for name in ("control-plane", "data-plane"):
        mounts = {m["mountPath"]: m["name"] for m in pods[name]["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm" and mounts["/tmp"] == "tmp"
        assert pods[name]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_compose_port_is_published_to_this_machine_only():
    assert all(port.startswith("127.0.0.1:") for port in compose_services()["control-plane"]["ports"])


def test_the_control_plane_is_stopped_before_the_data_plane():
    # compose stops a service before what it depends on; the data plane must not wait for a health that waits for it.
    assert compose_services()["control-plane"]["depends_on"] == {"data-plane": {"condition": "service_started"}}
    assert "depends_on" not in compose_services()["data-plane"]
    assert "startupProbe" not in containers()["data-plane"]
    assert containers()["data-plane"]["restartPolicy"] == "Always"


def test_health_checks_of_all_containers_are_understood():
    checks = [service["healthcheck"]["test"] for service in compose_services().values()]
    checks.append(["CMD", *containers()["data-plane"]["livenessProbe"]["exec"]["command"]])
    for kind, program, command, *arguments in checks:
        assert (kind, program, command) == ("CMD", "twinplane", "health")
        health.parser("x").parse_args(arguments)

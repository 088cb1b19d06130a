"""``twinplane health``: for people, container health checks and scripts.

A server is asked by the standard ``grpc.health.v1`` service. A data plane has no port: ``--shm`` reads its heartbeat
in the shared segment instead, which is also how the control plane sees it.

Exit codes: 0 well, 1 not well (the reason is printed), 2 usage.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from typing import NamedTuple

from twinplane.cli.arguments import new_parser
from twinplane.cli.target import add_address, target_of
from twinplane.shared.config import CommonSettings, read
from twinplane.shared.options import Seconds

READY = "twinplane.v1.GenerationService"  # a request would be served; "liveness" only says that the process answers


def parser(prog: str) -> argparse.ArgumentParser:
    description = "Ask a server (grpc.health.v1), or with --shm a data plane (heartbeat in shared memory), whether it is well."
    parser = new_parser(prog, description, "Exit code: 0 well, 1 not well, 2 usage error.")
    add_address(parser)
    parser.add_argument(
        "--service",
        default=READY,
        metavar="NAME",
        help=f"health service: {READY} (the default) is readiness, liveness only that the process answers",
    )
    parser.add_argument("--timeout", type=_seconds, default=3.0, metavar="SECONDS", help="for the answer (3)")
    parser.add_argument("--wait", type=_seconds, metavar="SECONDS", help="wait up to so long until it is well")
    shm = parser.add_argument_group("data plane")
    shm.add_argument("--shm", action="store_true", help="look at the data plane of an instance on this machine")
    shm.add_argument("--instance", metavar="NAME", help="which instance (TWINPLANE_INSTANCE, or default)")
    shm.add_argument("--max-heartbeat-age", type=_seconds, default=5.0, metavar="SECONDS", help="older means not well (5)")
    return parser


def _seconds(text: str) -> float:
    try:
        return Seconds().parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Verdict(NamedTuple):
    well: bool
    sentence: str


def run(args: argparse.Namespace) -> int:
    if args.shm:
        cli = {} if args.instance is None else {"instance": args.instance}
        instance = read(CommonSettings, cli, model_required=False).settings.instance
        verdict = _until(lambda: data_plane_health(instance, args.max_heartbeat_age), args.wait)
    else:
        target = target_of(args)
        verdict = _until(lambda: server_health(target, args.service, args.timeout), args.wait)
    print(verdict.sentence)
    return 0 if verdict.well else 1


def _until(ask: Callable[[], Verdict], wait_s: float | None) -> Verdict:
    """Ask until well or until ``wait_s`` is over."""
    end = time.monotonic() + (wait_s or 0.0)
    while True:
        verdict = ask()
        if verdict.well or time.monotonic() >= end:
            return verdict
        time.sleep(0.1)


def server_health(target: str, service: str, timeout_s: float) -> Verdict:
    """What ``grpc.health.v1.Health/Check`` says."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.NOT_FOUND:
                return Verdict(False, f"{target} knows no service {service!r}")
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Verdict(False, f"{target} did not answer within {timeout_s:g} s (--timeout)")
            return Verdict(False, f"{target} can not be reached: {code.name}: {error.details()}")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return Verdict(reply.status == health_pb2.HealthCheckResponse.SERVING, f"{target} {service}: {status}")


def data_plane_health(instance: str, max_age_s: float) -> Verdict:
    """How old the data plane's heartbeat is, read from the segment (shared/PROTOCOL.md, 3 and 6) without joining the session."""
    import numpy as np
    from twinplane.shared import wire
    from twinplane.shared.segment import instance_names

    path = instance_names(instance).segment_path
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            header = np.frombuffer(mapping, wire.HEADER, count=1)[0].copy()
            layout = wire.SegmentLayout(wire.Capacities(*(int(n) for n in header["capacities"])))
            if int(header["magic"]) != wire.MAGIC or int(header["layout_hash"]) != wire.LAYOUT_HASH or not header["ready"]:
                return Verdict(False, f"{path} was not made by this version of twinplane, or is not ready yet")
            state = np.frombuffer(mapping, wire.PLANE_STATE, count=1, offset=layout.data)[0].copy()
    except FileNotFoundError:
        return Verdict(False, f"no data plane is attached: {path} does not exist (is the control plane of instance {instance!r} running?)")
    except (OSError, ValueError) as error:
        return Verdict(False, f"{path} can not be read: {error}")
    if not state["heartbeat_ns"]:
        return Verdict(False, f"the data plane of instance {instance!r} has not given a sign of life yet")
    age_s = (time.monotonic_ns() - int(state["heartbeat_ns"])) / 1e9
    phase = wire.Phase(int(state["phase"])).name
    sentence = f"data plane of instance {instance!r}: phase {phase}, last heartbeat {max(age_s, 0.0):.2f} s ago"
    return Verdict(age_s <= max_age_s, sentence if age_s <= max_age_s else f"{sentence}, more than {max_age_s:g} s")

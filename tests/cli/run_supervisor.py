"""``run_supervisor.py FOLDER MAX_RESTARTS DRAIN_S CONTROL DATA``: the real supervisor over two fake planes.

CONTROL and DATA are comma-separated actions of fake_plane.py.
"""

import sys
from pathlib import Path

from twinplane.cli.supervisor import Plane, Supervisor

folder, max_restarts, drain_s, control, data = sys.argv[1:]
fake = [sys.executable, "-S", str(Path(__file__).with_name("fake_plane.py")), folder]


def report(event: str, sentence: str, *, level: str = "info") -> None:
    print(f"{event}: {sentence}", file=sys.stderr, flush=True)


sys.exit(
    Supervisor(
        Plane("control plane", [*fake, "control", *control.split(",")]),
        Plane("data plane", [*fake, "data", *data.split(",")]),
        max_restarts=int(max_restarts),
        drain_s=float(drain_s),
        report=report,
        ready_sentence=lambda: "model on address",
    ).run()
)

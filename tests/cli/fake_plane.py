"""A stand-in for a plane: ``fake_plane.py FOLDER NAME ACTION... --supervisor-fd N``.

Appends what happens to FOLDER/NAME.log, then does the first ACTION on its first life, the second on its second, and the
last one on all later lives.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]
actions, fd = sys.argv[3:-2], int(sys.argv[-1])
log = folder / f"{name}.log"


def note(text: str) -> None:
    with log.open("a") as file:
        file.write(f"{text} {os.getpid()} {time.monotonic()}\n")


note("start")
life = log.read_text().count("start ") - 1
action, _, value = actions[min(life, len(actions) - 1)].partition("=")


def on_term(number: int, _frame: object) -> None:
    note("term")
    if action == "stubborn":
        return
    if action == "drain":
        signal.signal(signal.SIGTERM, lambda *_: (note("term"), os._exit(0)))
        time.sleep(float(value))
    note("end")
    os._exit(0)


signal.signal(signal.SIGTERM, on_term)
if action == "fail":
    os.write(fd, f"failed {value}\n".encode())
    sys.exit(1)
if action == "exit":
    sys.exit(int(value))
if action == "die":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), getattr(signal, value))
if action != "load":
    os.write(fd, b"ready\n")
note("up")
while True:
    signal.pause()

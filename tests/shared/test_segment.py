"""Names, ownership, creation: who may, what is left behind, and what a person is told."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from twinplane.shared import wire
from twinplane.shared._shm import ControlEnd, DataEnd, ProtocolError, segment_bytes
from twinplane.shared.segment import InstanceInUseError, InstanceLock, SegmentError, create_segment, instance_names, open_segment
from twinplane.shared.wire import Capacities

Spawn = Callable[..., Any]  # conftest.PeerProcess


def run_python(code: str, *arguments: object, namespace: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; with ``namespace``, shell commands first run in a mount namespace of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if namespace:
        command = ["unshare", "-m", "sh", "-c", f'{namespace} && exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


can_mount = pytest.mark.skipif(
    os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs root and CAP_SYS_ADMIN to give a process a /dev/shm of its own",
)


# ---------------------------------------------------------------------------------------------------- names


def test_names_of_an_instance_tell_user_and_instance() -> None:
    names = instance_names("blue.1")
    base = f"/dev/shm/twinplane-{os.getuid()}-blue.1"
    assert (str(names.lock), str(names.socket), str(names.segment_path)) == (f"{base}.lock", f"{base}.sock", base)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "ä", "a\n", "x" * 65, "a.lock", "b.sock"])
def test_names_that_could_leave_the_folder_or_meet_another_instance_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="instance name"):
        instance_names(name)


def test_longest_name_fits_into_a_socket_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    assert len(str(instance_names("x" * 64).socket)) < 108  # sun_path, with its final zero


# ----------------------------------------------------------------------------------------------------- lock


def test_a_live_owner_is_named_to_whoever_comes_second(instance: str) -> None:
    code = "import sys; from twinplane.shared.segment import InstanceLock; InstanceLock(sys.argv[1]).acquire()"
    with InstanceLock(instance):
        second = run_python(code, instance)
        assert second.returncode == 1
        assert f"instance '{instance}' is in use by the control plane with pid {os.getpid()}" in second.stderr
        assert "--instance" in second.stderr
    assert run_python(code, instance).returncode == 0


def test_C04_instances_of_different_names_live_side_by_side(instance: str) -> None:
    with InstanceLock(instance) as first, InstanceLock(f"{instance}-b") as second:
        assert first.names != second.names


def test_a_dead_owners_leftovers_are_taken_over(instance: str, spawn: Spawn) -> None:
    dead = spawn("control", instance, 1, "--timeout-ns", 10**11).wait_attached()
    names = instance_names(instance)
    names.socket.touch()
    with pytest.raises(InstanceInUseError) as refused:
        InstanceLock(instance).acquire()
    assert refused.value.pid == dead.pid
    dead.kill()
    assert names.segment_path.exists()
    with InstanceLock(instance):
        assert not names.segment_path.exists() and not names.socket.exists()
        assert names.lock.read_text().startswith(f"{os.getpid()} ")
    assert not names.lock.exists()


def test_a_lock_on_a_removed_file_is_no_lock(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last owner unlinks the file between our open and our flock: we must lock the path's new file instead."""
    first = InstanceLock(instance)
    first.acquire()
    real_flock = fcntl.flock

    def release_then_lock(fd: int, flags: int) -> None:
        monkeypatch.undo()
        first.release()
        real_flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", release_then_lock)
    with InstanceLock(instance) as second:
        assert second.names.lock.exists()
        with pytest.raises(InstanceInUseError):
            InstanceLock(instance).acquire()


def test_an_owner_that_has_not_written_its_pid_yet_is_refused_all_the_same(instance: str) -> None:
    with InstanceLock(instance) as lock:
        os.truncate(lock.names.lock, 0)
        with pytest.raises(InstanceInUseError, match="another control plane") as refused:
            InstanceLock(instance).acquire()
        assert refused.value.pid == 0


def test_a_symbolic_link_in_place_of_the_lock_file_is_not_followed(instance: str, tmp_path: Any) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    instance_names(instance).lock.symlink_to(victim)
    with pytest.raises(SegmentError, match="can not open"):
        InstanceLock(instance).acquire()
    assert victim.read_text() == "precious"


def test_release_and_acquire_may_be_repeated(instance: str) -> None:
    lock = InstanceLock(instance)
    for _ in range(3):
        lock.acquire()
        lock.release()
        lock.release()
    lock.acquire()
    with pytest.raises(RuntimeError, match="already"):
        lock.acquire()
    lock.release()


# ------------------------------------------------------------------------------------------------- creation


def test_C17_everything_in_dev_shm_is_for_the_owner_alone(instance: str, capacities: Capacities) -> None:
    before = os.umask(0)  # the most permissive one must not matter
    try:
        with InstanceLock(instance) as lock:
            create_segment(instance, capacities, epoch=1).close()
            for path in (lock.names.lock, lock.names.segment_path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_new_session_gets_new_pages(instance: str, capacities: Capacities) -> None:
    first = create_segment(instance, capacities, epoch=1)
    old = ControlEnd(first.fd, 1)
    slot = old.step_slot(0)
    assert slot is not None
    slot[:] = 255
    old.publish()
    second = create_segment(instance, capacities._replace(max_rows=100), epoch=2)
    fresh = DataEnd(second.fd, 2)
    assert fresh.peer()["published"] == 0 and fresh.wait_step(0) is None
    size = second.bytes - wire.SegmentLayout(second.capacities).steps
    assert not np.frombuffer(os.pread(second.fd, size, wire.SegmentLayout(second.capacities).steps), np.uint8).any()
    assert fresh.capacities == tuple(second.capacities)
    first.close()
    second.close()


def test_pages_are_reserved_when_the_segment_is_made(instance: str, capacities: Capacities) -> None:
    made = create_segment(instance, capacities, epoch=1)
    assert os.fstat(made.fd).st_blocks * 512 >= made.bytes == segment_bytes(capacities)
    made.close()


@pytest.mark.parametrize("field", ["ring_depth", "max_rows", "max_step_tokens", "max_results"])
def test_capacities_no_session_can_have_are_refused_by_name(instance: str, capacities: Capacities, field: str) -> None:
    with pytest.raises(ProtocolError, match=f"capacity {field} is 0"):
        create_segment(instance, capacities._replace(**{field: 0}), epoch=1)
    assert not instance_names(instance).segment_path.exists()


def test_opening_a_segment_that_is_not_there_asks_about_the_ipc_namespace(instance: str) -> None:
    with pytest.raises(SegmentError, match="one IPC namespace"):
        open_segment(instance_names(instance).segment)


def test_C08_a_monitor_that_attached_and_ended_destroys_nothing(instance: str, capacities: Capacities) -> None:
    made = create_segment(instance, capacities, epoch=1)
    control, data = ControlEnd(made.fd, 1), DataEnd(made.fd, 1)
    monitor = run_python(
        "import sys, mmap; from twinplane.shared.segment import open_segment\nprint(mmap.mmap(open_segment(sys.argv[1]), 0)[:8])",
        made.name,
    )
    assert (monitor.stdout, monitor.stderr) == ("b'TWNPLANE'\n", "")
    slot = control.step_slot(0)
    assert slot is not None
    control.publish()
    assert data.wait_step(0) == 0
    os.close(open_segment(made.name))
    made.close()


# --------------------------------------------------------------------------------- C01, C17: a bad /dev/shm

CREATE = """
import os, sys
from twinplane.shared.segment import InstanceLock, SegmentError, create_segment
from twinplane.shared._shm import ControlEnd, DataEnd
from twinplane.shared.wire import Capacities
capacities = Capacities(4, 64, 2048, 512, 64, 4096, 128, 64, 256)
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))
try:
    with InstanceLock("small"):
        made = create_segment("small", capacities, 1)
        try:
            with open("/dev/shm/filler", "wb") as filler:
                filler.write(bytes(1 << 24))
        except OSError as error:
            print("full:", error.strerror)
        control, data = ControlEnd(made.fd, 1), DataEnd(made.fd, 1)
        for sequence in range(8):
            control.step_slot(0)[:] = 1
            control.publish()
            data.result_slot(0)[:] = 1
            data.publish()
            data.consume(data.wait_step(0))
            control.consume(control.wait_result(0))
        print("wrote every slot")
except SegmentError as error:
    print("refused:", error)
print("left:", [name for name in os.listdir("/dev/shm") if name.startswith("twinplane")])
"""


@can_mount
def test_C01_too_small_dev_shm_is_an_error_with_numbers_and_remedies() -> None:
    result = run_python(CREATE, namespace="mount -t tmpfs -o size=64k tmpfs /dev/shm")
    needed = segment_bytes((4, 64, 2048, 512, 64, 4096, 128, 64, 256))
    assert f"refused: /dev/shm is too small: the segment needs {needed} bytes," in result.stdout, result
    available = int(result.stdout.split(" are available")[0].rsplit(" ", 1)[1])
    assert 0 < available <= 65536
    for remedy in ("--shm-size", "--max-num-seqs", "--max-num-batched-tokens"):
        assert remedy in result.stdout
    assert result.stdout.endswith("left: []\n") and result.returncode == 0


@can_mount
def test_C01_filling_dev_shm_later_does_not_harm_a_running_session() -> None:
    result = run_python(CREATE, namespace="mount -t tmpfs -o size=1m tmpfs /dev/shm")
    assert result.stdout == "full: No space left on device\nwrote every slot\nleft: []\n", result


@can_mount
def test_C17_unwritable_dev_shm_is_named_with_its_mode() -> None:
    result = run_python(CREATE, 65534, namespace="mount -t tmpfs -o mode=755 tmpfs /dev/shm")
    assert "refused: /dev/shm (mode 0755, owner uid 0) is not writable for uid 65534" in result.stdout, result


@can_mount
def test_C17_ordinary_user_runs_normally_and_another_can_not_read() -> None:
    result = run_python(CREATE, 65534, namespace="mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm")
    assert "wrote every slot" in result.stdout, result


@can_mount
def test_C17_another_user_can_not_open_the_segment(instance: str, capacities: Capacities) -> None:
    create_segment(instance, capacities, epoch=1).close()
    result = run_python(
        "import os, sys; from twinplane.shared import segment\nos.setuid(65534)\nsegment.open_segment(sys.argv[1])",
        instance_names(instance).segment,
    )
    assert result.returncode == 1 and "SegmentError: can not open" in result.stderr, result


def test_C01_no_space_is_explained_and_nothing_is_left(instance: str, capacities: Capacities, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the right to mount: the reservation fails."""

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(SegmentError, match=f"needs {segment_bytes(capacities)} bytes, .*--shm-size"):
        create_segment(instance, capacities, epoch=1)
    assert not instance_names(instance).segment_path.exists()


# ------------------------------------------------------------------------------------- C02: kill and restart


def test_C02_twenty_kills_at_any_moment_leave_nothing_in_the_way(instance: str, spawn: Spawn) -> None:
    names = instance_names(instance)
    rng = np.random.default_rng(0)
    for epoch in range(1, 21):
        rows = 8 + epoch  # another segment size each time
        both = [spawn(role, instance, epoch, "--count", 10**9, "--rows", rows) for role in ("control", "data")]
        if epoch % 2:
            both[1].wait_attached()  # else: killed somewhere in its start
        signal.sigtimedwait([], float(rng.uniform(0, 0.02)))
        for peer in rng.permutation(np.array(both, dtype=object)):
            peer.kill()
    last = [spawn(role, instance, 21).wait_attached() for role in ("control", "data")]
    assert [peer.wait_exit() for peer in last] == [0, 0]
    assert not [path for path in (names.lock, names.socket, names.segment_path) if path.exists()]


def test_map_of_the_segment_shows_its_magic_to_any_tool(instance: str, capacities: Capacities) -> None:
    made = create_segment(instance, capacities, epoch=5)
    with mmap.mmap(made.fd, 0, access=mmap.ACCESS_READ) as content:
        header = np.frombuffer(content[: wire.HEADER.itemsize], wire.HEADER)[0]
    assert header["magic"] == wire.MAGIC and header["epoch"] == 5 and header["ready"] == 1
    assert header["owner_pid"] == os.getpid() and tuple(header["capacities"]) == tuple(capacities)
    made.close()

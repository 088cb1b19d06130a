"""Names, ownership and creation of an instance's shared memory (PROTOCOL.md, sections 1 to 3).

``posix_ipc`` and not ``multiprocessing.shared_memory``: the latter's resource tracker unlinks a segment when any process
that merely attached to it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import posix_ipc

from . import _shm, wire
from .liveness import process_start_time

SHM_DIRECTORY = Path("/dev/shm")  # where Linux puts POSIX shared memory; not a setting

_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODE = 0o600  # prompts lie in there

if _shm.LAYOUT_HASH != wire.LAYOUT_HASH:
    raise ImportError(
        f"the native module was built for layout {_shm.LAYOUT_HASH:#x}, wire.py describes {wire.LAYOUT_HASH:#x}: "
        "rebuild it with `scripts/native shared`"
    )


class SegmentError(Exception):
    """Shared memory can not be had. The message names what is missing and what to change."""


class InstanceInUseError(SegmentError):
    """A live control plane owns the instance. ``pid`` is the owner's as it wrote it, 0 if it has not yet."""

    def __init__(self, instance: str, pid: int) -> None:
        owner = f"the control plane with pid {pid}" if pid else "another control plane"
        super().__init__(f"instance {instance!r} is in use by {owner}: stop it, or give this one another name with --instance")
        self.pid = pid


@dataclass(frozen=True)
class InstanceNames:
    """The three names of an instance."""

    lock: Path
    socket: Path
    segment: str  # as shm_open wants it, with a leading slash

    @property
    def segment_path(self) -> Path:
        return SHM_DIRECTORY / self.segment[1:]


def instance_names(instance: str) -> InstanceNames:
    """The names of ``instance`` of the current user. Raises ValueError for a name that can not be one."""
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"instance name {instance!r}: expected 1 to 64 letters, digits, '_', '.' or '-', the first a letter or digit")
    if instance.endswith((".lock", ".sock")):
        raise ValueError(f"instance name {instance!r} ends like the lock or the socket of another instance: choose another ending")
    base = f"twinplane-{os.getuid()}-{instance}"
    return InstanceNames(SHM_DIRECTORY / f"{base}.lock", SHM_DIRECTORY / f"{base}.sock", f"/{base}")


class InstanceLock:
    """Ownership of an instance, by ``flock`` on its lock file.

    The kernel releases the lock when the holder dies, in whatever PID namespace it lived; so a stale instance is
    recognised without trusting a pid. Use as a context manager, or :meth:`acquire` and :meth:`release`.
    """

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.names = instance_names(instance)
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the instance over, removing what a dead owner left.

        Raises:
            InstanceInUseError: its owner lives.
            SegmentError: the lock file can not be created.
        """
        if self._fd is not None:
            raise RuntimeError(f"this process holds instance {self.instance!r} already")
        while self._fd is None:
            self._fd = self._try_lock()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {process_start_time(os.getpid())}\n".encode(), 0)
        self._remove_leftovers()

    def release(self) -> None:
        """Remove all three names and let go. Idempotent."""
        if self._fd is None:
            return
        self._remove_leftovers()
        # While still locked: whoever opened the old file meanwhile sees that the path no longer leads to it.
        self.names.lock.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None

    def __enter__(self) -> InstanceLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()

    def _try_lock(self) -> int | None:
        """The locked file's descriptor, or None if the file was removed by its last owner while we locked it."""
        path = self.names.lock
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        except OSError as error:
            raise _no_access(path, error) from error
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise SegmentError(f"{path} belongs to uid {os.fstat(fd).st_uid}, not to us ({os.getuid()}): have its owner remove it")
            os.fchmod(fd, _MODE)  # whatever the umask
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BlockingIOError:
            pid = _pid_in(os.pread(fd, 64, 0))
            os.close(fd)
            raise InstanceInUseError(self.instance, pid) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _remove_leftovers(self) -> None:
        self.names.socket.unlink(missing_ok=True)
        _unlink_segment(self.names.segment)


@dataclass(frozen=True)
class Segment:
    """A session's segment, created and formatted. ``fd`` stays open until :meth:`close`."""

    name: str
    fd: int
    bytes: int
    capacities: wire.Capacities
    epoch: int

    def close(self) -> None:
        """Close the descriptor. Mappings and the name stay."""
        os.close(self.fd)


def create_segment(instance: str, capacities: Sequence[int], epoch: int) -> Segment:
    """Create the segment of a new session under the instance's name, in place of the last one's.

    Its pages are reserved here, so that nobody gets SIGBUS later, and are all zero. Only the holder of the instance's lock
    may call this. Processes that still map the old segment keep their pages, which nobody else reads any more.

    Raises:
        SegmentError: /dev/shm is too small or not writable.
        ProtocolError: capacities no session can have.
    """
    name = instance_names(instance).segment
    sizes = wire.Capacities(*capacities)
    size = _shm.segment_bytes(sizes)
    _unlink_segment(name)
    try:
        fd: int = posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=_MODE).fd
    except (posix_ipc.PermissionsError, OSError) as error:
        raise _no_access(SHM_DIRECTORY / name[1:], error) from error
    try:
        os.fchmod(fd, _MODE)
        _reserve(fd, size, sizes)
        _shm.format_segment(fd, sizes, epoch)
    except BaseException:
        os.close(fd)
        _unlink_segment(name)  # frees what was reserved
        raise
    return Segment(name, fd, size, sizes, epoch)


def open_segment(name: str) -> int:
    """Open a segment by the name its ``welcome`` gave; returns a descriptor that the caller closes. Never unlinks.

    Raises SegmentError if there is none, or it is not ours.
    """
    try:
        fd: int = posix_ipc.SharedMemory(name, flags=0).fd
    except posix_ipc.ExistentialError as error:
        raise SegmentError(f"there is no shared memory {name}: do both planes share one /dev/shm (one IPC namespace)?") from error
    except (posix_ipc.PermissionsError, OSError) as error:
        raise _no_access(SHM_DIRECTORY / name[1:], error) from error
    owner = os.fstat(fd).st_uid
    if owner != os.getuid():
        os.close(fd)
        raise SegmentError(f"shared memory {name} belongs to uid {owner}, not to us ({os.getuid()}): run both planes as one user")
    return fd


def _unlink_segment(name: str) -> None:
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


def _reserve(fd: int, size: int, capacities: wire.Capacities) -> None:
    free = os.fstatvfs(fd)
    available = free.f_bavail * free.f_frsize
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SegmentError(
            f"{SHM_DIRECTORY} is too small: the segment needs {size} bytes, {available} are available. Enlarge it "
            f"(docker run --shm-size, compose shm_size, Kubernetes: an emptyDir with medium Memory), or need less with a smaller "
            f"--max-num-seqs (max_rows is {capacities.max_rows}) or --max-num-batched-tokens (max_step_tokens is "
            f"{capacities.max_step_tokens})"
        ) from error


def _no_access(path: Path, error: Exception) -> SegmentError:
    """Why a file in /dev/shm could not be opened, in words that say what to change."""
    try:
        status = SHM_DIRECTORY.stat()
    except OSError:
        return SegmentError(f"{SHM_DIRECTORY} does not exist: mount a tmpfs there")
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if not os.access(SHM_DIRECTORY, os.W_OK | os.X_OK):
        return SegmentError(
            f"{SHM_DIRECTORY} (mode {mode}, owner uid {status.st_uid}) is not writable for uid {os.getuid()}, so {path} can not be "
            "created: mount it with mode 1777"
        )
    return SegmentError(f"can not open {path}: {error} ({SHM_DIRECTORY} has mode {mode}, we are uid {os.getuid()})")


def _pid_in(content: bytes) -> int:
    """The pid a lock file names; 0 if its owner has locked it and not written yet."""
    first = content.split(b" ", 1)[0]
    return int(first) if first.isdigit() else 0

"""Which file this is, on which disk, and of which kind that is.

Role: what tells a file from another one that has its name or its inode number later, and a disk
from another one that was put in its place or set back; and whether it is another machine's.

Invariant: nothing is changed, and what the system does not say is answered with 0 or no, never
with an exception of its own.

It must not know what follows from the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys

from . import _files

# File systems on which locks, shared memory or syncs don't mean what they mean on a local disk.
# fmt: off
_NETWORK_TYPES = frozenset({
    "9p", "afs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "lustre", "ncpfs",
    "nfs", "nfs3", "nfs4", "ocfs2", "smb3", "smbfs",
    "fuse.ceph", "fuse.cephfs", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
    "fuse.moosefs", "fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
})
# fmt: on

_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_STATX_MNT_ID = 0x1000
_STATX_MNT_ID_UNIQUE = 0x4000


def _statx(target: int | str, mask: int) -> bytes | None:
    """The raw answer of statx(2), which Python's os module doesn't give on all our versions."""
    call = _files.libc("statx") if sys.platform == "linux" else None
    if call is None:
        return None
    answer = ctypes.create_string_buffer(256)
    if isinstance(target, int):
        failed = call(target, b"", _AT_EMPTY_PATH, mask, answer)
    else:
        failed = call(-100, os.fsencode(target), 0, mask, answer)
    return None if failed else answer.raw


def identity(target: int | str) -> tuple[int, int, int]:
    """(device, inode, birth time in ns or 0) of an open descriptor or a path."""
    found = os.stat(target)
    birth_ns = 0
    answer = _statx(target, _STATX_BTIME)
    if answer is not None and struct.unpack_from("<I", answer)[0] & _STATX_BTIME:
        seconds, nanoseconds = struct.unpack_from("<qI", answer, 80)
        birth_ns = seconds * 10**9 + nanoseconds
    elif sys.platform == "darwin":
        birth_ns = int(found.st_birthtime * 1e9)
    return found.st_dev, found.st_ino, birth_ns


def disk_sequence(target: int | str) -> int:
    """A number that changes when the disk under the file was swapped or set back.

    The kernel's sequence number of the block device; where there is none the mount's id; 0
    where there is neither.
    """
    device = os.stat(target).st_dev
    base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for name in (f"{base}/diskseq", f"{base}/../diskseq"):  # the second: of a partition's disk
        with contextlib.suppress(OSError, ValueError), open(name, encoding="ascii") as file:
            return int(file.read())
    for mask in (_STATX_MNT_ID_UNIQUE, _STATX_MNT_ID):
        answer = _statx(target, mask)
        if answer is not None and struct.unpack_from("<I", answer)[0] & mask:
            return int(struct.unpack_from("<Q", answer, 144)[0])
    return 0


def is_network_file_system(path: str) -> bool:
    """Whether a path (or, if it isn't there yet, its folder) lies on a file system of another
    machine, where locks and shared memory don't reach the other users.
    """
    path = os.path.realpath(path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        device = os.stat(path).st_dev
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read().decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best: tuple[bool, int] = (False, -1)
    kind = ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        if len(parts) < 5 or not rest:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), parts[4])
        if path == place or path.startswith(place.rstrip("/") + "/"):
            # The device decides; the longest mount point does where devices don't match up
            # (btrfs subvolumes).  Of two mounts at one place the later is on top.
            rank = (parts[2] == wanted, len(place))
            if rank >= best:
                best, kind = rank, rest.split()[0]
    return kind in _NETWORK_TYPES

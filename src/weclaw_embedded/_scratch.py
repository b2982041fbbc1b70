"""The scratch folder beside a queue file: what is in it, and when its index may be believed.

Role: names of its files, making it, and the life of the index that lies there: used when nothing in
it can have been lost, deleted unopened otherwise (opening a torn one can end the process).

It must not know what is in the log.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from . import _files, _names
from ._index import FILE_NAME, Index
from .errors import StorageError

PAGE_NAME: Final = "page"
INDEX_NAME: Final = "index"
CLEAN_NAME: Final = "clean"
_LMDB_MAGIC: Final = 0xBEEFC0DE
_META_AT: Final = 16  # in each of its first two pages
_META_BYTES: Final = 24 + 96 + 16
_LARGEST_PAGE: Final = 1 << 16


def scratch_of(path: str) -> str:
    """Where the scratch folder of a queue file is."""
    return path + ".d"


def make_directory(directory: str, fd: int) -> None:
    """Make the scratch folder if it is not there. Raises StorageError if it can't be one."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise StorageError(
                f"{directory} is not a folder, but is where the scratch of the queue belongs; "
                "nothing was touched; move it away"
            ) from None
    _names.match_owner_and_mode(directory, fd)


def remove_pipes(directory: str) -> None:
    """Remove the pipes of those who are gone."""
    for name in os.listdir(directory):
        if name.startswith("wake-"):
            _names.unlink(os.path.join(directory, name))


def _delete_index(directory: str) -> None:
    path = os.path.join(directory, INDEX_NAME)
    if os.path.isdir(path) and not os.path.islink(path):
        _names.remove_folder(path)
    else:
        _names.unlink(path)
    os.mkdir(path, 0o700)
    parent = _files.open_ro(directory)
    try:
        _names.match_owner_and_mode(path, parent)
    finally:
        _files.close(parent)


def new_index(directory: str) -> Index:
    """An empty index in the place of whatever is there."""
    _delete_index(directory)
    return Index.open(os.path.join(directory, INDEX_NAME), create=True)


def believable_index(
    directory: str, same_boot: bool, looked: tuple[int, int] | None
) -> Index | None:
    """Open the index if nothing in it can have been lost or changed by others. `looked` is what
    those who died over it, in this boot, saw of it last (`Index.looks`); None when that is not
    known, as of one who died over a change.
    """
    data = os.path.join(directory, FILE_NAME)
    mark = read_clean_mark(directory)
    # The mark is of the state on disk now. Once we write, it must not be found after a power cut.
    _names.unlink(os.path.join(directory, CLEAN_NAME))
    try:
        found = os.stat(data)
        _files.sync_dir(directory)
    except OSError:
        return None
    if mark is not None:
        believed = mark == (found.st_ino, found.st_mtime_ns, found.st_size)
    else:
        believed = same_boot and looked in (None, (found.st_mtime_ns, found.st_size))
    if not believed or not _looks_like_lmdb(data, found.st_size):
        return None
    try:
        return Index.open(directory, create=False)
    except OSError:
        return None


def _looks_like_lmdb(path: str, size: int) -> bool:
    """Check both meta pages by hand; LMDB itself may end the process over a torn file."""
    fd = _files.open_ro(path)
    try:
        head = _files.read_at(fd, 2 * _LARGEST_PAGE, 0)
    finally:
        _files.close(fd)
    if len(head) < _META_AT + _META_BYTES:
        return False
    # A page of LMDB is one of the system's memory, and says how large that is.
    (page_bytes,) = struct.unpack_from("<I", head, _META_AT + 24)
    if not 512 <= page_bytes <= _LARGEST_PAGE or len(head) < 2 * page_bytes:
        return False
    for at in (_META_AT, page_bytes + _META_AT):
        magic, _version = struct.unpack_from("<II", head, at)
        # Meta: magic, version, address, map size, two databases of 48 bytes, last page, txn id.
        last_page, _txn = struct.unpack_from("<QQ", head, at + 24 + 96)
        if magic != _LMDB_MAGIC or (last_page + 1) * page_bytes > size:
            return False
    return True


def write_clean_mark(directory: str) -> None:
    """Note that the index was synced and closed by the last process; it survives a reboot."""
    found = os.stat(os.path.join(directory, FILE_NAME))
    data = struct.pack("<QQQ", found.st_ino, found.st_mtime_ns, found.st_size)
    path = os.path.join(directory, CLEAN_NAME)
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _files.write_at(fd, [data], 0)
        _files.sync_data(fd)
    finally:
        _files.close(fd)
    _names.replace(path + ".new", path)


def read_clean_mark(directory: str) -> tuple[int, int, int] | None:
    """What `write_clean_mark` noted; None if there is nothing that can be read."""
    try:
        with open(os.path.join(directory, CLEAN_NAME), "rb") as file:
            data = file.read(64)
    except OSError:
        return None
    if len(data) != 24:
        return None
    inode, mtime, size = struct.unpack("<QQQ", data)
    return inode, mtime, size

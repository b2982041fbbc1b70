"""Names of files: what is made whole or not at all, and nobody's file replaced, on real files."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from weclaw_embedded import _files, _names


def test_a_new_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """While its content is written nothing has the name; when that fails nothing is left."""
    path = tmp_path / "new"

    def write(fd: int) -> None:
        assert not path.exists()
        _files.write_at(fd, [b"content"], 0)

    _names.create_whole(str(path), write)
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail(fd: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        _names.create_whole(str(tmp_path / "other"), fail)
    assert os.listdir(tmp_path) == ["new"]


def test_nobodys_new_file_is_replaced(tmp_path: Path) -> None:
    """Of many who create at once one succeeds, and the others find its file."""
    path = str(tmp_path / "new")
    won = []

    def create(n: int) -> None:
        try:
            _names.create_whole(path, lambda fd: void(_files.write_at(fd, [b"%d" % n], 0)))
            won.append(n)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % n for n in won] == [Path(path).read_bytes()]
    assert os.listdir(tmp_path) == ["new"]


def void(_: object) -> None:
    return None


def test_an_empty_file_counts_as_new_only_when_asked(tmp_path: Path) -> None:
    """With replace_empty a file of no bytes is replaced; one of any bytes never is."""
    path = tmp_path / "new"
    path.touch()
    with pytest.raises(FileExistsError):
        _names.create_whole(str(path), lambda fd: None)
    _names.create_whole(
        str(path), lambda fd: void(_files.write_at(fd, [b"1"], 0)), replace_empty=True
    )
    assert path.read_bytes() == b"1"
    with pytest.raises(FileExistsError):
        _names.create_whole(str(path), lambda fd: None, replace_empty=True)
    assert path.read_bytes() == b"1"


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """With replace_file a regular file is; what is none is refused by whoever moves a file."""
    path = tmp_path / "new"
    for text in (b"1", b"2"):
        _names.create_whole(
            str(path), lambda fd, text=text: void(_files.write_at(fd, [text], 0)), replace_file=True
        )
        assert path.read_bytes() == text
    for other in ("pipe", "folder", "link"):
        taken = tmp_path / other
        if other == "pipe":
            os.mkfifo(taken)
        elif other == "folder":
            taken.mkdir()
        else:
            taken.symlink_to(path)
        before = taken.lstat()
        with pytest.raises(FileExistsError, match="no regular file"):
            _names.replace(str(path), str(taken))
        with pytest.raises(FileExistsError, match="no regular file"):
            _names.create_whole(str(taken), lambda fd: None, replace_file=True)
        assert taken.lstat() == before
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "new", "pipe"]


def test_without_hard_links_a_new_file_is_still_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no hard links the name is claimed first."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "new"
    _names.create_whole(str(path), lambda fd: void(_files.write_at(fd, [b"1"], 0)))
    assert path.read_bytes() == b"1"
    with pytest.raises(FileExistsError):
        _names.create_whole(str(path), lambda fd: None)


def test_what_a_killed_creator_left_is_removed_later(tmp_path: Path) -> None:
    """A temporary file of more than an hour ago goes with the next creation; a fresh one stays."""
    old = tmp_path / f".new.{'0' * 16}.tmp"
    fresh = tmp_path / f".new.{'1' * 16}.tmp"
    other = tmp_path / ".new.other.tmp"
    for leftover in (old, fresh, other):
        leftover.touch()
        if leftover is not fresh:
            os.utime(leftover, (1, 1))
    _names.create_whole(str(tmp_path / "new"), lambda fd: None)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_owner_and_mode_are_matched(tmp_path: Path) -> None:
    """What lies beside the file takes its mode; folders can be entered by who can read."""
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o640)
    beside, folder = tmp_path / "beside", tmp_path / "folder"
    beside.touch()
    folder.mkdir(0o700)
    file = _files.open_ro(str(path))
    try:
        _names.match_owner_and_mode(str(beside), file)
        _names.match_owner_and_mode(str(folder), file)
    finally:
        _files.close(file)
    assert stat.S_IMODE(beside.stat().st_mode) == 0o640
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    _names.make_fifo(str(tmp_path / "fifo"), 0o620)
    assert stat.S_IMODE((tmp_path / "fifo").stat().st_mode) == 0o620

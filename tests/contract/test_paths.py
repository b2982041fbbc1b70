"""Contract 2 and 10: what a path leads to when it is no queue, said in one line."""

from __future__ import annotations

import os
import shutil

import pytest
from tests.helpers.queues import drain, scratch

import weclaw_embedded as weclaw


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("what", "name"), [("fifo", "a named pipe"), ("folder", "a folder"), ("device", "a device")]
)
def test_what_is_no_file_is_no_queue(tmp_path, what, name, readonly):
    """A pipe, a folder or a device is `NotAQueueError`; nothing waits and nothing is made."""
    path = tmp_path / what
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path = "/dev/null"
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(weclaw.NotAQueueError, match=name):
        weclaw.Queue(path, readonly=readonly)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_that_is_missing_is_named(tmp_path):
    """No folder, no queue: `StorageError` names it, and no temporary name of ours."""
    with pytest.raises(weclaw.StorageError, match=r"the folder .*nowhere does not exist") as caught:
        weclaw.Queue(tmp_path / "nowhere" / "tasks.wq")
    assert ".tasks.wq" not in str(caught.value)
    (tmp_path / "file").write_text("x")
    with pytest.raises(weclaw.StorageError):
        weclaw.Queue(tmp_path / "file" / "tasks.wq")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up its rights for a moment")
def test_a_folder_that_may_not_be_written_is_said_of_the_file(tmp_path):
    """The error names the file that was wanted, not the temporary one."""
    tmp_path.chmod(0o555)
    os.seteuid(65534)
    try:
        with pytest.raises(OSError) as caught:
            weclaw.Queue(tmp_path / "tasks.wq")
    finally:
        os.seteuid(0)
        tmp_path.chmod(0o755)
    assert ".tasks.wq" not in str(caught.value)


def test_an_empty_file_has_nothing_to_look_at(path):
    """An empty file counts as new, and who only looks makes nothing of it."""
    path.touch()
    with pytest.raises(weclaw.StorageError, match="is empty") as caught:
        weclaw.Queue(path, readonly=True)
    assert not isinstance(caught.value, weclaw.NotAQueueError)
    assert path.stat().st_size == 0
    with weclaw.Queue(path) as q:
        q.put("x")
        assert drain(q) == ["x"]


def test_who_looks_first_keeps_nobody_from_writing(path):
    """A looker that was there before the first writer, scratch gone, is in nobody's way."""
    with weclaw.Queue(path) as q:
        q.put("x")
    shutil.rmtree(scratch(path))
    with weclaw.Queue(path, readonly=True) as looker:
        assert looker.qsize() == 1
        with weclaw.Queue(path) as q:
            q.put("y")
            assert looker.qsize() == 2
            assert drain(q) == ["x", "y"]
        assert looker.qsize() == 0


@pytest.mark.parametrize("at", [0, 2048])
def test_a_damaged_copy_of_the_header_is_reported(path, at):
    """Either copy of the header block: who looks is told, who opens mends it and says so once."""
    with weclaw.Queue(path) as q:
        q.put("x")
    good = path.read_bytes()

    def damage():
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(os.urandom(64))

    damage()
    with weclaw.open(path, readonly=True) as store:
        assert [offset for offset, _ in store.verify()] == [0]
    with weclaw.open(path) as store:
        assert [offset for offset, _ in store.verify()] == [0]
        assert path.read_bytes()[:4096] == good[:4096]
        assert len(store.repair()) == 1
        assert store.verify() == []
        damage()
        assert len(store.verify()) == 1
        assert len(store.repair()) == 1
        assert store.verify() == []
        assert path.read_bytes()[:4096] == good[:4096]
    with weclaw.open(path) as store:
        assert store.verify() == []
        assert drain(store.queue()) == ["x"]

"""Contract 2 and 10: what a path leads to when it is no queue, said in one line."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import tempfile

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, scratch

import weclaw_embedded as weclaw
from weclaw_embedded import replica


def make(what, path):
    """A thing that is no regular file; a device of our own, never one that others use."""
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif os.geteuid():
        pytest.skip("only root makes devices")
    else:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    return path


THINGS = [("fifo", "a named pipe"), ("folder", "a folder"), ("device", "a device")]


@pytest.mark.parametrize("options", [{}, {"readonly": True}, {"replica": True}], ids=str)
@pytest.mark.parametrize(("what", "name"), THINGS)
def test_what_is_no_file_is_no_queue(tmp_path, what, name, options):
    """A pipe, a folder or a device is `NotAQueueError`; nothing waits, and nothing is made or
    replaced, though a replica has data.
    """
    if "replica" in options:
        copy = tmp_path / "copy.wq"
        options = {"replica": str(copy)}
        with weclaw.Queue(tmp_path / "tasks.wq", **options) as q:
            q.put("kept")
    path = make(what, tmp_path / what)
    before = sorted(os.listdir(tmp_path)), path.lstat()
    for opener in (weclaw.Queue, weclaw.open):
        with pytest.raises(weclaw.NotAQueueError, match=name):
            opener(path, **options)
    assert (sorted(os.listdir(tmp_path)), path.lstat()) == before


def test_a_path_that_can_not_be_one_is_refused():
    """Before anything is looked at, in words of ours."""
    for path in ("a\0b", "a\ud800b"):
        for opener in (weclaw.Queue, weclaw.open, replica.node, replica.promote):
            with pytest.raises(ValueError, match="is no path; nothing was opened or made"):
                opener(path)


@pytest.mark.parametrize("ending", ["/", "//", "/.", "/.."])
@pytest.mark.parametrize("there", ["nothing", "a file", "a folder"])
def test_a_path_that_names_a_folder_is_refused(tmp_path, ending, there):
    """As a queue, a copy and a backup, whatever is there: a file of that name without what says so
    is another.
    """
    path = tmp_path / "a"
    with weclaw.Queue(tmp_path / "tasks.wq") as q:
        q.put(1)
        if there == "a file":
            q._store.backup(path)
        elif there == "a folder":
            path.mkdir()
        before = sorted(os.listdir(tmp_path))
        named = f"{path}{ending}"
        for refuses in (weclaw.Queue, weclaw.open, replica.node, q._store.backup):
            with pytest.raises(weclaw.NotAQueueError, match="is the name of a folder, and a queue"):
                refuses(named)
        with pytest.raises(ValueError, match="replica must name a file, not the folder"):
            weclaw.open(tmp_path / "new.wq", replica=named)
        assert sorted(os.listdir(tmp_path)) == before


def test_the_name_of_a_file_is_any_bytes(tmp_path):
    """Also what is no UTF-8: put, reopened, looked at, and kept a copy of."""
    path = os.path.join(tmp_path, os.fsdecode(b"a\xff \xe4.wq"))
    for _ in range(2):
        with weclaw.Queue(path, replica=tmp_path / "copy.wq") as q:
            q.put(1)
            assert q.stats().replica_lag == 0
        with weclaw.Queue(os.fsencode(path), readonly=True) as q:
            assert q._store.verify() == []
    shutil.rmtree(scratch(path))
    with weclaw.Queue(path) as q:
        assert drain(q) == [1, 1]
    assert b"a\xff \xe4.wq" in os.listdir(os.fsencode(tmp_path))


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "link to a device"])
def test_nothing_but_a_file_is_ever_replaced(tmp_path, what):
    """A backup or an export onto a pipe, a folder or a device is `StorageError`, which is as it
    was.
    """
    path = make(what.split()[-1], tmp_path / "thing")
    target = path
    if what.startswith("link"):
        target = tmp_path / "link"
        target.symlink_to(path)
    with weclaw.Queue(tmp_path / "tasks.wq", retry=weclaw.RetryPolicy(max_retries=0)) as q:
        q.put("dead")
        q.get().nack()
        before = sorted(os.listdir(tmp_path)), path.lstat()
        with pytest.raises(weclaw.StorageError, match="is no regular file"):
            q.dlq.export(target)
        with pytest.raises(weclaw.StorageError, match="exists already"):
            q._store.backup(target)
        assert (sorted(os.listdir(tmp_path)), path.lstat()) == before


def open_and_wait(pipe, path):
    with weclaw.Queue(path) as q:
        pipe.send(q.put("of the child"))
        pipe.recv()


def test_a_second_name_of_a_file_that_others_have_open_is_refused(tmp_path):
    """Nobody deleted anything: it says that the file has two names, and to use theirs."""
    path, other = tmp_path / "tasks.wq", tmp_path / "second.wq"
    with Child(open_and_wait, path) as child:
        child.hear()
        os.link(path, other)
        with pytest.raises(
            weclaw.LockedError, match=r"the file has 2 names \(hard links\)"
        ) as told:
            weclaw.Queue(other)
        assert f"{other} open" in str(told.value)
        with weclaw.Queue(path) as q:  # as it advises
            assert drain(q) == ["of the child"]
        child.say("end")
        child.end()
    with weclaw.Queue(other) as q:
        assert q.stats().settled == 1


@pytest.mark.parametrize("how", ["by its name", "by a symbolic link", "by a hard link"])
def test_an_export_never_replaces_the_queue(tmp_path, how):
    """An export or a backup onto the queue's own file is `StorageError`, and the queue goes on."""
    path = other = tmp_path / "tasks.wq"
    with weclaw.Queue(path, retry=weclaw.RetryPolicy(max_retries=0)) as q:
        if how == "by a symbolic link":
            other = tmp_path / "link"
            other.symlink_to(path)
        elif how == "by a hard link":
            other = tmp_path / "link"
            os.link(path, other)
        q.put("dead")
        q.get().nack()
        with pytest.raises(weclaw.StorageError, match="is the queue itself"):
            q.dlq.export(other)
        with pytest.raises(weclaw.StorageError, match="exists already"):
            q._store.backup(other)
        q.put("more")
        assert drain(q) == ["more"]
    with weclaw.Queue(path) as q:
        assert [letter.body for letter in q.dlq] == ["dead"]


def test_an_export_replaces_a_file_whole_and_leaves_its_neighbours(tmp_path):
    """What a link leads to is replaced, not the link; nothing else in the folder is touched."""
    (tmp_path / "letters.jsonl.part").write_text("mine")
    (tmp_path / "letters.jsonl").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "letters.jsonl")
    with weclaw.Queue(tmp_path / "tasks.wq", retry=weclaw.RetryPolicy(max_retries=0)) as q:
        q.put("dead")
        q.get().nack()
        before = sorted(os.listdir(tmp_path))
        assert q.dlq.export(tmp_path / "link") == 1
        with pytest.raises(weclaw.StorageError, match="can't be written") as caught:
            q.dlq.export(tmp_path / "nowhere" / "letters.jsonl")
        assert "nowhere" in str(caught.value)
        assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "letters.jsonl.part").read_text() == "mine"
    assert '"body": "dead"' in (tmp_path / "letters.jsonl").read_text()


def test_what_is_no_path_for_an_export_is_said_in_our_words(tmp_path):
    """A pipe by its descriptor is a pipe, `new/` is no file to be made, and other bytes no path."""
    with weclaw.Queue(tmp_path / "tasks.wq") as q:
        q.put("dead")
        q.get().fail("why")
        before = sorted(os.listdir(tmp_path))
        reader, writer = os.pipe()
        try:
            with pytest.raises(weclaw.StorageError, match="is no regular file"):
                q.dlq.export(f"/dev/fd/{writer}")
        finally:
            os.close(reader)
            os.close(writer)
        for name in ("new/", "nowhere/.."):
            with pytest.raises(weclaw.StorageError, match="is the name of a folder"):
                q.dlq.export(f"{tmp_path}/{name}")
        for name in ("a\0b", "\ud800", ""):
            with pytest.raises(ValueError, match="nothing was opened or made; name a file"):
                q.dlq.export(name)
        assert sorted(os.listdir(tmp_path)) == before


def export_under_a_limit(pipe, path, out):
    with weclaw.Queue(path, readonly=True) as q:
        assert len(q.dlq) == 3
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            q.dlq.export(out)
        except weclaw.DiskFullError as error:
            pipe.send(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_an_export_that_has_no_room_leaves_what_was_there(tmp_path):
    """`DiskFullError`, the older file as it was, and nothing beside it."""
    out = tmp_path / "letters.jsonl"
    out.write_text("older")
    path = tmp_path / "tasks.wq"
    with weclaw.Queue(path) as q:
        for _ in range(3):
            q.put("x" * 3000)
            q.get().fail("why")
        before = sorted(os.listdir(tmp_path))
        with Child(export_under_a_limit, path, out) as child:
            assert f"no room for {out}" in str(child.hear())
            child.end()
        assert sorted(os.listdir(tmp_path)) == before
        assert out.read_text() == "older"
        assert q.dlq.export(out) == 3


def test_a_path_that_leads_nowhere_is_said_in_our_words(tmp_path):
    """Links in a circle and names that are too long are `StorageError`; nothing is made."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("n" * 300)):
        for options in ({}, {"replica": str(tmp_path / "copy.wq")}):
            with pytest.raises(weclaw.StorageError, match="nothing was made; check the path"):
                weclaw.Queue(path, **options)
    with pytest.raises(weclaw.StorageError, match=r"the folder .* does not exist"):
        weclaw.Queue(tmp_path / "nowhere" / "tasks.wq", replica=str(tmp_path / "copy.wq"))
    assert os.listdir(tmp_path) == ["loop"]


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
        with pytest.raises(weclaw.StorageError, match="Permission denied; nothing was") as caught:
            weclaw.Queue(tmp_path / "tasks.wq")
    finally:
        os.seteuid(0)
        tmp_path.chmod(0o755)
    assert ".tasks.wq" not in str(caught.value)
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up its rights for a moment")
@pytest.mark.parametrize("options", [{}, {"readonly": True}], ids=["to write", "to look"])
def test_a_file_that_is_not_ours_is_said_in_our_words(path, options):
    """Nothing can be done with it, and who can is said."""
    weclaw.Queue(path).close()
    path.chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(weclaw.StorageError, match=r"Permission denied; .* as its owner"):
            weclaw.Queue(path, **options)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up its rights for a moment")
def test_a_folder_that_may_not_be_written_is_not_said_to_be_the_file():
    """The file may be written by all, but no scratch folder can be made beside it."""
    folder = tempfile.mkdtemp()  # that of the test is in one which only its owner may enter
    path = os.path.join(folder, "tasks.wq")
    try:
        weclaw.Queue(path).close()
        shutil.rmtree(scratch(path))
        os.chmod(path, 0o666)
        os.chmod(folder, 0o755)
        os.seteuid(65534)
        if not os.access(path, os.R_OK, effective_ids=True):
            pytest.skip("others may not enter the folder of temporary files")
        with pytest.raises(weclaw.StorageError, match="the file itself can be written") as caught:
            weclaw.Queue(path)
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)
    assert str(scratch(path)) in str(caught.value)
    assert "as its owner" not in str(caught.value)


@pytest.mark.parametrize("size", [240, 255])
def test_a_name_that_leaves_no_room_for_what_stands_beside_it(tmp_path, size):
    """The folder and the temporary name are longer than the file's own: that is said at once."""
    with pytest.raises(weclaw.StorageError, match="choose a name of at most 200 bytes"):
        weclaw.Queue(tmp_path / ("n" * size))
    assert os.listdir(tmp_path) == []
    weclaw.Queue(tmp_path / ("n" * 200)).close()


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

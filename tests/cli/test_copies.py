"""weclawctl with a replica: level, behind, promoted over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import Terminal, start, until

import weclaw_embedded as weclaw


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "other disk").mkdir()
    return tmp_path / "other disk" / "my tasks.wq"


def test_a_copy_is_looked_at_while_it_is_written(file: Path, copy: Path, js: Any, ctl: Any) -> None:
    """Nobody has to say --readonly; nothing may be changed; health has a line for each node."""
    with weclaw.Queue(file, replica=str(copy)) as q:
        ids = q.put_many([1, 2, 3])
        assert [one["id"] for one in js("peek", copy)] == ids
        assert js("stats", copy)["ready"] == 3
        assert js("stats", file)["replica_lag"] == 0
        assert "this file is a replica's copy" in ctl("stats", copy)[1]
        assert "replica level" in ctl("stats", file)[1]
        found = js("health", file, "--max-lag", 0)
        nodes = {one["node"]: one["value"] for one in found["checks"] if one["check"] == "node"}
        assert nodes == {str(file): "primary, epoch 1", str(copy): "copy, epoch 1"}
        for words in (("put", copy, "1"), ("promote", copy), ("purge", copy, "--yes")):
            status, _, err = ctl(*words)
            assert status == 1
            assert len(err.splitlines()) == 1
        assert js("verify", file, "--against", copy)["behind"] == 0
        q.put(4)
        assert js("verify", file, "--against", copy)["behind"] == 0


def test_a_copy_is_promoted_and_the_other_is_refused(
    file: Path, copy: Path, js: Any, ctl: Any
) -> None:
    with weclaw.Queue(file, replica=str(copy)) as q:
        ids = q.put_many([1, 2, 3])
    assert js("verify", file, "--against", copy)["behind"] == 0
    assert js("promote", copy) == {"path": str(copy), "epoch": 2}
    assert [one["id"] for one in js("peek", copy)] == ids
    assert ctl("put", copy, "4")[0] == 0
    status, _, err = ctl("put", file, "5")
    assert status == 1
    assert "promoted" in err
    assert "Traceback" not in err
    status, out, _ = ctl("verify", file, "--against", copy)
    assert status == 1
    assert "the copy was promoted (epoch 2)" in out
    assert "never promote" not in out
    assert "doesn't fit" not in out
    assert "promoted over it" in ctl("stats", file)[1]
    assert max(map(len, ctl("stats", file)[1].splitlines())) <= 80
    checks = js("health", file, status=1)["checks"]
    assert "fenced, epoch 1" in [one["value"] for one in checks if one["check"] == "node"]
    status, _, err = ctl("promote", copy)
    assert status == 1
    assert "no copy" in err
    status, out, err = ctl("promote", file, "--yes")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert "promoted and is in its place (epoch 2, this file has 1)" in err
    assert ctl("put", file, "5")[0] == 1


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Path.mkdir, "a folder"), (os.mkfifo, "a named pipe")],
    ids=["folder", "pipe"],
)
def test_promote_of_what_is_no_file(file: Path, ctl: Any, make: Any, kind: str) -> None:
    make(file)
    status, _, err = ctl("promote", file, "--yes")
    assert (status, len(err.splitlines())) == (1, 1)
    assert f"is {kind}, and a queue is a file; it wasn't touched; check the path" in err


def test_promote_of_what_is_no_copy(file: Path, ctl: Any) -> None:
    assert ctl("promote", file)[0] == 1
    with weclaw.Queue(file) as q:
        q.put(1)
    status, _, err = ctl("promote", file)
    assert status == 1
    assert len(err.splitlines()) == 1


def test_a_receiver_ends_with_its_input(copy: Path) -> None:
    """`weclawctl replica` is started by a queue; alone it makes nothing and ends."""
    child = start("replica", copy, stdin=-3)
    _, err = child.communicate(timeout=30)
    assert "Traceback" not in err
    assert not copy.exists()


def test_a_command_as_replica(file: Path, copy: Path, js: Any) -> None:
    """As ssh would be: the stream goes to a command's standard input."""
    import sys

    command = [sys.executable, "-m", "weclaw_embedded.cli", "replica", str(copy)]
    with weclaw.Queue(file, replica=command) as q:
        q.put_many([1, 2, 3])
        until(lambda: q.stats().replica_lag == 0)
        assert js("stats", copy)["ready"] == 3
        nodes = [one for one in js("health", file)["checks"] if one["check"] == "node"]
        assert [one["node"] for one in nodes] == [str(file), " ".join(command)]
        assert [one["role"] for one in nodes] == ["primary", "copy"]
        assert [one["epoch"] for one in nodes] == [1, 1]
        assert all(one["alive"] for one in nodes)
    nodes = [one for one in js("health", file)["checks"] if one["check"] == "node"]
    assert not any(one["alive"] for one in nodes)
    copy.write_bytes(b"no queue at all")
    found = js("health", file, status=1)["checks"]
    assert "no copy there" in [one["value"] for one in found if one["check"] == "node"][1]


def test_health_says_which_file_is_in_use(file: Path, copy: Path, ctl: Any) -> None:
    """Also for people, in a line for each of the two."""
    with weclaw.Queue(file, replica=str(copy)) as q:
        q.put(1)
        assert "primary, epoch 1, in use" in ctl("health", file)[1]
        assert "copy, epoch 1, in use" in ctl("health", file)[1]
    assert "copy, epoch 1, not in use" in ctl("health", file)[1]
    assert ctl("health", copy)[1].count(" node ") == 1


def test_a_backup_has_no_replica_and_says_so(
    file: Path, copy: Path, js: Any, ctl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy of the original is not its own; a new place, or replica=False, and all is well."""
    with weclaw.Queue(file, replica=str(copy)) as q:
        q.put(1)
    kept = file.parent / "kept.wq"
    assert ctl("backup", file, kept)[0] == 0
    checks = js("health", kept)["checks"]
    assert [one["node"] for one in checks if one["check"] == "node"] == [str(kept)]
    (lag,) = [one for one in checks if one["check"] == "replica_lag"]
    assert (lag["ok"], lag["warning"], lag["value"]) == (True, True, None)
    assert "!!  replica_lag: there is no replica" in ctl("health", kept)[1]
    caplog.clear()
    with weclaw.Queue(kept) as q:
        assert q.stats().replica_lag is None
    assert "name a new place for it with replica=" in caplog.text
    caplog.clear()
    with weclaw.Queue(kept, replica=str(file.parent / "new.wq")) as q:
        q.put(2)
        assert q.stats().replica_lag == 0
    assert not caplog.records
    assert not any(one["warning"] for one in js("health", kept)["checks"])


def test_the_copy_of_another_queue_is_not_called_ours(file: Path, copy: Path, js: Any) -> None:
    with weclaw.Queue(file, replica=str(copy)) as q:
        q.put(1)
    other = file.parent / "other.wq"
    with weclaw.Queue(other, replica=str(file.parent / "its own.wq")) as q:
        q.put(1)
    copy.write_bytes((file.parent / "its own.wq").read_bytes())
    nodes = [one for one in js("health", file, status=1)["checks"] if one["check"] == "node"]
    assert nodes[1]["value"] == "copy of another queue, epoch 1"
    assert not nodes[1]["ok"]


def test_promote_says_it_once_and_asks_only_of_a_copy(file: Path, copy: Path, ctl: Any) -> None:
    with weclaw.Queue(file, replica=str(copy)) as q:
        q.put(1)
    with Terminal("promote", file) as screen:
        assert screen.end() == 1
        assert "is no copy but a queue" in screen.text
        assert "[y/N]" not in screen.text
    with Terminal("promote", copy) as screen:
        screen.wait_for(r"\[y/N\]")
        screen.type("n\n")
        assert screen.end() == 1
    status, out, err = ctl("promote", copy)
    assert (status, len(out.splitlines()), err) == (0, 1, "")


def test_promote_sends_nobody_to_open_what_can_not_be_opened(file: Path, ctl: Any) -> None:
    """Of a file cut short its first bytes say that it is no copy; the rest is gone."""
    weclaw.Queue(file).close()
    os.truncate(file, 100)
    status, _, err = ctl("promote", file, "--yes")
    assert status == 1
    assert "restore it" in err
    assert "open it as it is" not in err

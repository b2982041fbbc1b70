"""weclawctl replay, backup, repair, verify --against, and the second copy of a file."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import Terminal, kill_letters

import weclaw_embedded as weclaw
from weclaw_embedded._format import END_RECORD_AT


@pytest.fixture
def done(file: Path) -> list[str]:
    """Ten settled messages, half of them with a result."""
    with weclaw.Queue(file) as q:
        ids = q.put_many([{"n": n} for n in range(10)])
        for n in range(10):
            q.get(timeout=5).ack(result=n if n % 2 else None)
    return ids


def damage(file: Path, what: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(what) + len(what) // 2] ^= 0xFF
    file.write_bytes(data)


# results


def test_results_without_ids_are_all_that_are_kept(
    file: Path, done: list[str], js: Any, ctl: Any
) -> None:
    """In the order of their puts; what was acked without a result has none to show."""
    found = js("results", file)
    given = [one for one in found if one["result"] is not None]
    assert [(one["id"], one["result"]) for one in given] == [(done[n], n) for n in range(1, 10, 2)]
    assert all(one["status"] == "done" for one in found)
    status, out, err = ctl("results", file, "-n", 2)
    assert status == 0
    assert "the first 2" in err
    assert len([line for line in out.splitlines() if "done" in line]) == 2


def test_a_thousand_results_are_listed_unless_told(file: Path, js: Any) -> None:
    with weclaw.Queue(file) as q:
        ids = q.put_many(list(range(1000)))
        with q.transaction() as tx:
            for msg in q.get_many(1000):
                tx.ack(msg, result=str(msg.body))
    assert [one["id"] for one in js("results", file)] == ids


# replay


def test_replay_from_the_earliest(file: Path, done: list[str], js: Any, ctl: Any) -> None:
    assert js("replay", file, "--offset", "earliest") == {"replayed": 10}
    assert js("stats", file)["ready"] == 10
    assert [one["id"] for one in js("peek", file)] == done
    assert js("results", file) == []


def test_replay_by_offset_id_and_time(file: Path, done: list[str], js: Any, ctl: Any) -> None:
    (dead,) = kill_letters(file, "dead")
    with weclaw.Queue(file) as q:
        offsets = [one.offset for one in _replayed(q, done)]
        for _ in done:
            q.get(timeout=5).ack()
    assert js("replay", file, "--offset", offsets[4]) == {"replayed": 6}
    assert js("replay", file, "--id", done[0], "--id", done[1]) == {"replayed": 2}
    assert js("replay", file, "--since", "1h") == {"replayed": 2}
    assert js("replay", file, "--since", "1h") == {"replayed": 0}
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    assert js("replay", file, "--since", later.isoformat()[:16]) == {"replayed": 0}
    status, _, err = ctl("replay", file, "--id", dead)
    assert status == 1
    assert "not settled" in err


def _replayed(q: weclaw.Queue, ids: list[str]) -> list[weclaw.Message]:
    q.replay(ids=ids)
    return q.peek(len(ids))


@pytest.mark.parametrize(
    "words",
    [(), ("--offset", "x"), ("--since", "long ago"), ("--offset", "1", "--since", "1h")],
    ids=" ".join,
)
def test_replay_of_nothing_is_wrong_usage(
    words: tuple[str, ...], file: Path, done: list[str], ctl: Any
) -> None:
    assert ctl("replay", file, *words)[0] == 2


def test_replay_before_what_is_kept_names_the_first_offset(file: Path, ctl: Any) -> None:
    with weclaw.Queue(file, retention=0, segment_bytes=65536) as q:
        for _ in range(20):
            q.put(b"x" * 30_000)
            q.get(timeout=5).ack()
        q.put("kept")
    status, _, err = ctl("replay", file, "--offset", 0)
    assert status == 1
    assert "Traceback" not in err
    assert any(word.strip(".,;()").isdigit() for word in err.split())


# backup, verify, repair


def test_a_backup_is_a_queue_of_its_own(file: Path, done: list[str], js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        waiting = q.put("waits")
        held = q.put("held", priority=9)
        q.get(timeout=5)
        out = file.parent / "the backup.wq"
        assert js("backup", file, out)["path"] == str(out)
    assert {one["id"] for one in js("peek", out)} == {waiting, held}
    assert [one["result"] for one in js("results", out, done[3])] == [3]
    assert ctl("verify", out)[0] == 0
    status, _, err = ctl("backup", file, out)
    assert status == 1
    assert "exists already" in err
    assert ctl("backup", file, file.parent / "none" / "x.wq")[0] == 1


def test_verify_says_what_becomes_of_what_is_damaged(file: Path, ctl: Any) -> None:
    """Nothing is said to be set aside before somebody came upon it, and nothing left out after."""
    with weclaw.Queue(file) as q:
        q.put("a" * 300)
        q.put_many(["b" * 300, "c" * 300])
    damage(file, b"b" * 300)
    for words in (["--readonly"], [], []):
        said = ctl("verify", file, *words)[1].splitlines()[-1]
        assert said.startswith("1 fault; what they hit is set aside when it is come upon, or by")
    with weclaw.Queue(file) as q:
        assert [q.get(block=False).body[0]] == ["a"]
        with pytest.raises(weclaw.Empty):
            q.get(block=False)
    said = ctl("verify", file)[1].splitlines()[-1]
    assert said == "1 fault; 2 messages that they hit are set aside; the rest flows"
    ctl("repair", file, "--yes")
    assert ctl("verify", file)[1].startswith("good")


@pytest.mark.parametrize("what", ["header", "end", "message"])
def test_verify_writes_nothing(file: Path, ctl: Any, what: str) -> None:
    """Neither where a copy of a header is damaged, nor where the end is torn; and it says so each
    time anew.
    """
    with weclaw.Queue(file) as q:
        for text in "abc":
            q.put(text * 300)
    shutil.rmtree(f"{file}.d")
    data = bytearray(file.read_bytes())
    if what == "header":
        data[2048 + 30] ^= 1
    elif what == "message":
        data[data.index(b"b" * 300)] ^= 1
    else:
        at = data.index(b"c" * 300) + 100
        data[at : at + 4000] = bytes(4000)
        data[END_RECORD_AT : END_RECORD_AT + 16] = bytes(16)  # which only a clean end writes
    file.write_bytes(data)
    said = [ctl("verify", file) for _ in range(2)]
    assert said[0] == said[1]
    assert said[0][0] == (0 if what == "end" else 1)
    assert file.read_bytes() == data
    assert not Path(f"{file}.d").exists()


def test_damage_is_told_once_whoever_has_met_it(file: Path, js: Any, ctl: Any) -> None:
    """A message that was set aside is not told of beside the place in which it stands."""
    with weclaw.Queue(file) as q:
        for text in "abcde":
            q.put(text * 300)
    damage(file, b"b" * 300)
    damage(file, b"d" * 300)
    before = js("verify", file, status=1)
    assert len(before) == 2
    assert len(js("peek", file)) == 3
    assert js("verify", file, status=1) == before
    assert [one["offset"] for one in js("repair", file, "--yes")] == [
        one["offset"] for one in before
    ]
    assert js("verify", file) == []


def test_repair_does_not_say_that_nothing_is_gone_when_it_does_not_know(
    file: Path, js: Any, ctl: Any
) -> None:
    """The space in which the damage stood was used again before."""
    with weclaw.Queue(file, segment_bytes=65536, retention=0) as q:
        for text in "abc":
            q.put(text * 300)
    damage(file, b"b" * 300)
    with weclaw.Queue(file) as q:
        assert [msg.body[0] for msg in q.get_many(3)] == ["a", "c"]
        q.purge()
    with weclaw.Queue(file) as q:
        while msgs := q.get_many(3, timeout=0.1) if q.qsize() else []:
            for msg in msgs:
                msg.ack()
        while q._store._engine.first_offset() == 0:
            q.put_many(["n" * 1000] * 50)
            for msg in q.get_many(50):
                msg.ack()
        assert q.stats().damaged == 1
    status, out, _ = ctl("repair", file, "--yes")
    assert status == 0
    assert "no message" not in out
    assert "the space was used again since, and what stood there is not known any more" in out
    assert js("verify", file) == []


def test_verify_says_that_a_header_is_no_message(file: Path, ctl: Any) -> None:
    with weclaw.Queue(file, segment_bytes=65536) as q:
        q.put("a")
        with file.open("r+b") as opened:
            opened.seek(4096 + 65536 - 64)
            opened.write(bytes(64))
        said = ctl("verify", file)[1].splitlines()[-1]
        assert said.startswith("1 fault; no message is hit while the other copy of a header is")


def test_a_backup_of_what_may_only_be_read(file: Path, done: list[str], js: Any, ctl: Any) -> None:
    out = file.parent / "copy.wq"
    before = file.read_bytes()
    assert js("backup", file, out, "--readonly")["path"] == str(out)
    assert file.read_bytes() == before
    assert [one["id"] for one in js("results", out)] == done[1::2]


def test_repair_makes_verify_quiet(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        for text in ("a", "b", "c"):
            q.put(text * 300)
    damage(file, b"b" * 300)
    (fault,) = js("verify", file, status=1)
    found = js("repair", file, "--yes")
    assert [one["offset"] for one in found] == [fault["offset"]]
    assert 300 < found[0]["size_bytes"] < 400
    assert found[0]["after"] <= found[0]["before"]
    assert js("verify", file) == []
    assert js("repair", file) == []
    assert "nothing to repair" in ctl("repair", file)[1]
    assert [one["body"][0] for one in js("peek", file)] == ["a", "c"]


def test_repair_says_what_is_gone(file: Path, ctl: Any) -> None:
    """How much, and when it was written."""
    with weclaw.Queue(file) as q:
        for text in ("a", "b", "c"):
            q.put(text * 300)
    damage(file, b"b" * 300)
    status, out, _ = ctl("repair", file, "--yes")
    assert status == 0
    assert re.search(r"\d+ +34\d +\d{4}-\d\d-\d\d [\d:]+ and [\d:]+ +the checksum is wrong", out)
    assert re.search(r"1 place set aside: the messages in 34\d bytes are gone; all others", out)
    assert max(map(len, out.splitlines())) <= 80


def test_repair_says_what_came_back(file: Path, js: Any, ctl: Any) -> None:
    """What the replica had is not said to be gone; what it lacks too is."""
    copy = file.parent / "copy.wq"
    with weclaw.Queue(file, replica=str(copy)) as q:
        for text in "abcd":
            q.put(text * 300)
    damage(file, b"b" * 300)
    (found,) = js("repair", file, "--yes")
    assert (found["healed"], found["size_bytes"]) == (True, 0)
    damage(file, b"b" * 300)
    status, out, _ = ctl("repair", file, "--yes")
    assert status == 0
    assert "1 place healed from the replica: nothing is gone" in out
    assert "set aside" not in out
    damage(copy, b"d" * 300)  # it was made anew, from a file that was whole
    damage(file, b"b" * 300)
    damage(file, b"d" * 300)
    sizes = {one["healed"]: one["size_bytes"] for one in js("repair", file, "--yes")}
    assert sizes[True] == 0
    assert sizes[False] > 300
    assert js("verify", file) == []
    assert [one["body"][0] for one in js("peek", file)] == ["a", "b", "c"]


@pytest.mark.parametrize("verb", ["verify", "repair", "backup", "replay"])
def test_what_takes_long_tells_how_far_it_is(
    verb: str, file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes, from little to all, for the bar to show as a percentage."""
    from weclaw_embedded.cli import _common

    seen: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def bar(label: str, total: int | None, **_: Any) -> Iterator[Any]:
        def update(*, completed: int | None = None, total: int | None = None) -> None:
            assert completed is not None
            assert total is not None
            seen.append((label, completed, total))

        yield update

    monkeypatch.setattr(_common, "progress_bar", bar)
    with weclaw.Queue(file, segment_bytes=65536) as q:
        for n in range(100):
            q.put(f"{n:05}" * 2000)
        with q.transaction() as tx:
            for msg in q.get_many(100):
                tx.ack(msg)
    damage(file, b"00050" * 2000)
    monkeypatch.setattr("weclaw_embedded._asking._REPLAY_TOLD_BYTES", 20_000)
    out = file.parent / "out.wq"
    words = {"backup": [out], "replay": ["--offset", "earliest"], "repair": ["--yes"]}
    assert ctl(verb, file, *words.get(verb, []))[0] == (verb in ("verify", "replay"))
    mine = [(done, total) for label, done, total in seen if label == verb]
    assert len(mine) > 5
    assert all(0 <= done <= total for done, total in mine)
    assert mine[0][0] / mine[0][1] < 0.3
    assert max(done / total for done, total in mine) > 0.8


def test_repair_does_nothing_unasked(file: Path, js: Any, ctl: Any) -> None:
    """Where nobody can be asked, a script that means it says --yes."""
    with weclaw.Queue(file) as q:
        q.put_many(["a" * 300])
        q.put("b" * 300)
    damage(file, b"b" * 300)
    before = file.read_bytes()
    status, out, err = ctl("repair", file)
    assert (status, out) == (1, "")
    assert "Nothing was done; add --yes" in err
    assert ctl("repair", file, "--json")[0] == 1
    assert file.read_bytes() == before
    assert len(js("repair", file, "--yes")) == 1
    assert ctl("repair", file)[0] == 0


def test_repair_asks_on_a_terminal(file: Path, js: Any) -> None:
    with weclaw.Queue(file) as q:
        for text in ("a", "b", "c"):
            q.put(text * 300)
    damage(file, b"b" * 300)
    with Terminal("repair", file) as screen:
        screen.wait_for(r"Overwrite 1 place that can't be read, for good\? \[y/N\]")
        screen.type("n\n")
        assert screen.end() == 1
    assert js("verify", file, status=1)
    with Terminal("repair", file, "--yes") as screen:
        assert screen.end() == 0
    assert js("verify", file) == []


def test_a_copy_is_held_against_the_file(
    file: Path, done: list[str], js: Any, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, behind, damaged, of another queue."""
    from weclaw_embedded.cli import mend

    monkeypatch.setattr(mend, "_PATIENCE_S", 0.0)
    copy = file.parent / "copy.wq"
    with weclaw.Queue(file) as q:
        q.put("the last " * 50)
    shutil.copy(file, copy)
    found = js("verify", file, "--against", copy)
    assert found["frames"] > 10
    assert (found["behind"], found["differences"]) == (0, [])
    assert "the same" in ctl("verify", file, "--against", copy)[1]

    damage(copy, b"the last " * 50)
    (fault,) = js("verify", file, "--against", copy, status=1)["differences"]
    assert "the copy" in fault["reason"]
    assert "never promote" in ctl("verify", file, "--against", copy)[1]

    shutil.copy(file, copy)
    with weclaw.Queue(file) as q:
        q.put("more")
    found = js("verify", file, "--against", copy, status=1)
    assert found["behind"] > 0
    assert found["differences"] == []
    assert "lacks the last" in ctl("verify", file, "--against", copy)[1]

    with weclaw.Queue(copy) as q:  # both went on: they have parted
        q.put("something else")
    assert js("verify", file, "--against", copy, status=1)["differences"]

    other = file.parent / "other.wq"
    with weclaw.Queue(other) as q:
        q.put(1)
    (fault,) = js("verify", file, "--against", other, status=1)["differences"]
    assert "another queue" in fault["reason"]
    assert ctl("verify", file, "--against", file.parent / "none.wq")[0] == 1


# purge


def test_a_group_is_left_behind(file: Path, js: Any, ctl: Any) -> None:
    """--drop-group asks too, and forgets one group only."""
    with weclaw.open(file) as store:
        store.queue("mails", group="old", start="earliest")
        store.queue("mails", group="new", start="earliest")
        store.queue("mails").put_many([1, 2])
    words = ("purge", file, "--topic", "mails", "--group", "old", "--drop-group")
    assert ctl(*words)[0] == 1
    assert js(*words, "--yes") == {"purged": 2, "kept": None}
    with weclaw.open(file) as store:
        assert [(one.group, one.ready) for one in store.groups()] == [("new", 2)]
    status, _, err = ctl(*words, "--yes")
    assert status == 1
    assert "there is no group 'old' in topic 'mails'" in err


def test_the_only_group_is_forgotten_and_what_that_means_is_said(
    file: Path, js: Any, ctl: Any
) -> None:
    """A topic without groups keeps everything for the next one, what was done and purged too."""

    def begin() -> None:
        with weclaw.Queue(file, "mails") as q:
            q.put_many([1, 2, 3])
            q.get(timeout=5).ack()
            q.purge()
            q.put("waits")

    begin()
    words = ("purge", file, "--topic", "mails", "--drop-group")
    with Terminal(*words) as screen:
        screen.wait_for(r"the only one, though the topic then keeps everything\? \[y/N\]")
        screen.type("y\n")
        assert screen.end() == 0
        told = (
            "topic 'mails' has no group any more: what it keeps waits for the next one, 4 messages"
        )
        assert told in " ".join(screen.text.split())
    assert js("stats", file, "--topic", "mails")["ready"] == 4
    begin()
    assert js(*words, "--yes") == {"purged": 0, "kept": 8}
    begin()
    assert js(*words[:-1], "--yes") == {"purged": 1, "kept": None}
    assert js("stats", file, "--topic", "mails")["ready"] == 0
    assert "without groups a topic keeps all of it" in " ".join(ctl("purge", "--help")[1].split())


@pytest.mark.parametrize("scratch", ["kept", "deleted"])
def test_verify_says_each_fault_once(scratch: str, file: Path, done: list[str], ctl: Any) -> None:
    """Also where it is met while the file is opened: it stands in the answer."""
    with weclaw.Queue(file) as q:
        q.put("b" * 300)
        q.put("after it")
    damage(file, b"b" * 300)
    if scratch == "deleted":
        shutil.rmtree(f"{file}.d")
    for form in ((), ("--json",)):
        status, out, err = ctl("verify", file, *form)
        assert (status, err) == (1, "")
        assert out.count("checksum") == 1, out

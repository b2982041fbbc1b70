"""Who looks without a lock while others write: no false alarm, and no damage that is missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _files

SEGMENT = 65536
BODY = "x" * 20_000


def turn_over(q: weclaw.Queue, n: int) -> None:
    """Put and settle so many messages that all the space of the file is used again."""
    for _ in range(n):
        q.put_many([BODY] * 3)
        for msg in q.get_many(3):
            msg.ack()


def at_read(
    monkeypatch: pytest.MonkeyPatch, looker: weclaw.Store, number: int, do: Callable[[], object]
) -> list[int]:
    """Have `do` called before the looker reads for the so-many-th time; what it read by then."""
    real = _files.read_at
    reads: list[int] = []

    def read_at(fd: int, n: int, offset: int, **how: bool) -> bytes:
        if fd == looker._engine.fd:
            reads.append(offset)
            if len(reads) == number:
                do()
        return real(fd, n, offset, **how)

    monkeypatch.setattr(_files, "read_at", read_at)
    return reads


@pytest.mark.parametrize("known", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("number", range(1, 61, 3))
def test_space_that_is_used_again_while_it_is_looked_at_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, known: bool
) -> None:
    """Whatever it was reading when the writer went over the whole file: a looker says what was true
    before or after, and of no damage.
    """
    with weclaw.Queue(path, segment_bytes=SEGMENT, retention=0, flush="os") as q:
        turn_over(q, 3)
        ids = q.put_many([[n, BODY] for n in range(8)])
        with weclaw.open(path, readonly=True) as looker:
            looking = looker.queue()
            if known:
                assert looking.qsize() == 8
                q.put_many([[n, BODY] for n in range(8, 16)])
            settled = q.stats().settled

            def go_on() -> None:
                for msg in q.get_many(16):
                    msg.ack()
                turn_over(q, 6)
                q.put("the last")

            at_read(monkeypatch, looker, number, go_on)
            bodies = [msg.body for msg in looking.peek(20)]
            stats = looking.stats()
            status = looking.status(ids[0])
            found = looker.verify()
            monkeypatch.undo()
            assert (stats.damaged, found) == (0, [])
            assert all(body == "the last" or body[0] in range(16) for body in bodies)
            assert looking.stats()[:5] == q.stats()[:5]
            assert stats.settled in (settled, q.stats().settled)
            assert status in ("ready", "unknown")


@pytest.mark.parametrize("number", range(1, 16))
def test_a_segment_that_begins_while_the_slots_are_looked_at_is_not_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Slots are read one after another; what begins in one that was read before is no gap."""
    with weclaw.Queue(path, segment_bytes=SEGMENT, retention=0, flush="os") as q:
        turn_over(q, 3)
        with weclaw.open(path, readonly=True) as looker:
            at_read(monkeypatch, looker, number, lambda: turn_over(q, 4))
            assert looker.verify() == []
            monkeypatch.undo()
            assert looker.queue().stats()[:5] == q.stats()[:5]


@pytest.mark.parametrize("number", [1, 5, 10, 15, 18, 19, 20, 21, 22, 25, 30])
def test_a_backup_by_who_only_looks_is_of_one_moment(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also when all space of the file is used again under it: it begins anew then."""
    with weclaw.Queue(path, segment_bytes=SEGMENT, retention=0, flush="os") as q:
        turn_over(q, 3)
        q.put_many([[n, BODY] for n in range(8)])
        with weclaw.open(path, readonly=True) as looker:

            def go_on() -> None:
                for msg in q.get_many(8):
                    msg.ack()
                turn_over(q, 6)
                q.put("the last")

            at_read(monkeypatch, looker, number, go_on)
            looker.backup(tmp_path / "copy.wq")
            monkeypatch.undo()
    with weclaw.Queue(tmp_path / "copy.wq") as copy:
        assert copy._store.verify() == []
        assert copy.stats().damaged == 0
        bodies = [msg.body for msg in copy.peek(20)]
        assert bodies in ([[n, BODY] for n in range(8)], ["the last"])


def test_a_backup_that_is_always_overtaken_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is still true; and there is no file."""
    with weclaw.Queue(path, segment_bytes=SEGMENT, retention=0, flush="os") as q:
        turn_over(q, 3)
        with weclaw.open(path, readonly=True) as looker:
            real = _files.read_at

            def read_at(fd: int, n: int, offset: int, **how: bool) -> bytes:
                if fd == looker._engine.fd and n == SEGMENT:
                    turn_over(q, 4)
                return real(fd, n, offset, **how)

            monkeypatch.setattr(_files, "read_at", read_at)
            with pytest.raises(weclaw.StorageError, match="nothing is wrong with it"):
                looker.backup(tmp_path / "copy.wq")
            monkeypatch.undo()
            assert not list(tmp_path.glob("*copy*"))
            looker.backup(tmp_path / "copy.wq")


def flip(path: Path, what: bytes) -> None:
    """Turn over one bit in the middle of these bytes of the file."""
    at = path.read_bytes().index(what) + len(what) // 2
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_damage_is_found_by_who_looks_while_others_write(path: Path) -> None:
    """It is told of by a looker that comes, by one that had read it while it was well, and by
    neither once a writer has repaired it; what is not hit is shown.
    """
    with weclaw.Queue(path, segment_bytes=SEGMENT, flush="os") as q:
        ids = [q.put(body * 100) for body in ("one ", "two ", "three ")]
        with weclaw.open(path, readonly=True) as before:
            assert before.queue().stats().damaged == 0
            flip(path, b"two " * 100)
            four = q.put("four")
            with weclaw.open(path, readonly=True) as after:
                for _ in range(2):
                    assert [msg.id for msg in after.queue().peek(3)] == [ids[0], ids[2], four]
                    assert after.queue().stats().damaged == 1
                    assert len(after.verify()) == 1
                assert [msg.id for msg in before.queue().peek(3)] != ids
                assert before.queue().stats().damaged == 1
                assert len(before.verify()) == 1
                assert len(q._store.repair()) == 1
                for looker in (before, after):
                    assert looker.verify() == []
                    assert looker.queue().stats().damaged == 0
                    assert looker.queue().qsize() == 3

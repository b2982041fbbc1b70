"""The rule by which space is given back: the table of its cases, and some of them in a file."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.queues import scratch

import weclaw_embedded as weclaw
from weclaw_embedded import _reclaim, _reclaim_rule, _records, _upkeep
from weclaw_embedded._reclaim_rule import Does, decide
from weclaw_embedded._upkeep import Pin
from weclaw_embedded.wal import HEAD, LAST

DESIGN = Path(__file__).resolve().parent.parent / "docs" / "design.md"


class Oldest:
    """What is known of a segment of 1 000 bytes; whatever else is asked about it fails the test.

    `live`, `ready`: how many messages live in it and in those that follow, and whether something
    is ready there.
    """

    segment_bytes = 1000

    def __init__(self, **known: Any) -> None:
        self.is_forced = known.pop("forced", False)
        self.is_short = known.pop("short", False)
        self._known: dict[str, Any] = {"is_last": False, "is_pinned": False, **known}
        if not self.is_forced:
            self._known.setdefault("retained_s", 0.0)

    def n_segments(self) -> int:
        return len(self._known["live"])

    def n_live(self, number: int) -> int:
        return self._known["live"][number]

    def has_ready(self, number: int) -> bool:
        return self._known["ready"][number]

    def __getattr__(self, name: str) -> Any:
        def answer() -> Any:
            assert name in self._known, f"{name} decides nothing here, and was asked"
            return self._known[name]

        return answer


def forced(**known: Any) -> dict[str, Any]:
    return {"forced": True, "room_bytes": 10_000, **known}


def held(live: tuple[int, ...], carried: int, **known: Any) -> dict[str, Any]:
    """Nothing is ready; what lives in the first takes so many bytes."""
    return {"live": live, "ready": (False,) * len(live), "carried_bytes": carried, **known}


MOSTLY_LIVE = {"all_bytes": (6000, 100), "kept_bytes": 10_000}
HALF_OVER = {"all_bytes": (2999, 100), "kept_bytes": 10_000}  # and 2 segments beside
THIRD_OVER = {"all_bytes": (4600, 100), "kept_bytes": 10_000}

CASES: list[tuple[str, dict[str, Any], Does, str, float | None]] = [
    # what it is, what is known, what is done, why, when it is asked again
    ("the last", {"is_last": True}, Does.LEAVE, "the log goes on in it", None),
    ("the last, for a put", forced(is_last=True), Does.LEAVE, "the log goes on in it", None),
    ("pinned", {"is_pinned": True}, Does.LEAVE, "it is still read", None),
    ("pinned, for a put", forced(is_pinned=True), Does.LEAVE, "it is still read", None),
    ("retained for a time", {"retained_s": 7.0}, Does.LEAVE, "retention holds it", 7.0),
    ("retained for its size", {"retained_s": None}, Does.LEAVE, "retention holds it", None),
    ("settled", {"live": (0, 9)}, Does.FREE, "nothing lives in it", None),
    ("settled, for a put", forced(live=(0, 9)), Does.FREE, "nothing lives in it", None),
    ("settled, short", {"live": (0, 9), "short": True}, Does.FREE, "nothing lives in it", None),
    # some of it is ready
    (
        "its groups get on",
        {"live": (1,), "ready": (True,), "getting_on_s": 4.0},
        Does.LEAVE,
        "it is being worked off",
        4.0,
    ),
    (
        "its groups stand still, and it is little",
        {"live": (1,), "ready": (True,), "getting_on_s": 0.0, "carried_bytes": 500},
        Does.CARRY,
        "little lives in it",
        None,
    ),
    (
        "its groups get on, short, most lives",
        {"live": (1,), "ready": (True,), "getting_on_s": 4.0, "short": True, **MOSTLY_LIVE},
        Does.LEAVE,
        "it is being worked off",
        4.0,
    ),
    (
        "its groups get on, short, a third is over",
        {
            **held((1, 0), 900, short=True, **THIRD_OVER),
            "ready": (True, False),
            "room_bytes": 1,
        },
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "much is ready in the next eight, for a put",
        forced(
            live=(6,) + (5,) * 7 + (0,) * 9,
            ready=(True,) * 17,
            each_bytes=100,
            can_be_settled=True,
            **MOSTLY_LIVE,
        ),
        Does.LEAVE,
        "it can be worked off where it is",
        None,
    ),
    (
        "half is ready in the next eight, for a put",
        forced(
            live=(5,) * 8,
            ready=(True,) * 8,
            each_bytes=100,
            can_be_settled=True,
            carried_bytes=875,
        ),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "much is ready in the next eight, for a put, and half of all is over",
        forced(
            live=(10,) * 8,
            ready=(True,) * 8,
            each_bytes=100,
            can_be_settled=True,
            carried_bytes=900,
            **HALF_OVER,
        ),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "much is ready, for a put, and no room to settle it there",
        forced(live=(9,), ready=(True,), can_be_settled=False, carried_bytes=800),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    # nothing is ready, and nobody waits for it
    ("a half", held((5,), 500), Does.CARRY, "little lives in it", None),
    ("a half, short", held((5,), 500, short=True), Does.CARRY, "little lives in it", None),
    (
        "more than a half",
        held((5,), 501, **MOSTLY_LIVE),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "more than a half, of all a half is over",
        held((5,), 501, **HALF_OVER),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "more than a half, of all not quite a half is over",
        held((5,), 501, all_bytes=(3000, 1), kept_bytes=10_000),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "more than a half, of all a third is over",
        held((5,), 501, **THIRD_OVER),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "20 000 small ones",
        held((20_000,), 500),
        Does.CARRY,
        "little lives in it",
        None,
    ),
    (
        "more than 20 000: they are not read",
        {"live": (20_001,), "ready": (False,), **MOSTLY_LIVE},
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    # the same where the disk is short: is a third over, and does it fit on the way?
    (
        "short, of all a third is over",
        held((10, 10, 0), 900, short=True, room_bytes=1, **THIRD_OVER),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "short, of all not quite a third is over",
        held((10, 0), 900, short=True, all_bytes=(4667, 100), kept_bytes=10_000),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "short, all would fit in the end, and the first ones don't",
        held((15, 15, 0), 900, short=True, room_bytes=500, **THIRD_OVER),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "short, the first gives what the next ones are carried with",
        held((9, 30), 900, short=True, room_bytes=500, **THIRD_OVER),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "short, the first ones just fit",
        held((15, 14, 0), 900, short=True, room_bytes=901, **THIRD_OVER),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    # nothing is ready, and a put found no room
    (
        "seven eighths, for a put",
        forced(**held((5,), 875)),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "more than seven eighths, for a put",
        forced(**held((5,), 876, **MOSTLY_LIVE)),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "seven eighths, for a put, short",
        forced(**held((5,), 875, short=True)),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "more than that, for a put, little in the next",
        forced(**held((10, 7), 1000, each_bytes=107)),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "more than that, for a put, too much in the next",
        forced(**held((10, 7), 1000, each_bytes=108, **MOSTLY_LIVE)),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "seven full ones before one that is settled",
        forced(**held((10,) * 7 + (0,), 1000, each_bytes=100)),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "eight full ones before one that is settled",
        forced(**held((10,) * 8 + (0,), 1000, each_bytes=100, **MOSTLY_LIVE)),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "one with something ready before one that is settled",
        forced(
            live=(10, 1, 0),
            ready=(False, True, False),
            carried_bytes=1000,
            each_bytes=100,
            **MOSTLY_LIVE,
        ),
        Does.LEAVE,
        "too much lives in it",
        None,
    ),
    (
        "full, for a put, half of all is over",
        forced(**held((10,), 1000, each_bytes=100, **HALF_OVER)),
        Does.CARRY,
        "little lives in all that is kept",
        None,
    ),
    (
        "at max_bytes two segments are there for a moment",
        forced(**held((5,), 800), room_bytes=0),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
    (
        "there are no more than these",
        forced(**held((50,), 2001), room_bytes=0),
        Does.LEAVE,
        "there is no room to carry it",
        None,
    ),
    (
        "on a short disk they are not there",
        forced(**held((5,), 800, short=True), room_bytes=799),
        Does.LEAVE,
        "there is no room to carry it",
        None,
    ),
    (
        "on a short disk it just fits",
        forced(**held((5,), 800, short=True), room_bytes=800),
        Does.CARRY,
        "it gives room for the put",
        None,
    ),
]


@pytest.mark.parametrize(
    ("known", "does", "why", "wait_s"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_done_with_the_oldest_segment(
    known: dict[str, Any], does: Does, why: str, wait_s: float | None
) -> None:
    """Freed, carried up or left, for a reason, and asking no more than what decides it."""
    assert decide(Oldest(**known)) == (does, why, wait_s)


def reasons() -> list[str]:
    """What the rule can say, in the order in which it is asked."""
    found = [
        (node.lineno, node.args[1].value)
        for node in ast.walk(ast.parse(inspect.getsource(_reclaim_rule)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Decision"
    ]
    return list(dict.fromkeys(why for _, why in sorted(found)))


def test_each_reason_has_its_case_and_stands_in_the_design() -> None:
    """What docs/design.md lists is what the rule can say, in the order in which it is asked."""
    assert {case[3] for case in CASES} == set(reasons())
    section = DESIGN.read_text().split("## 12. ")[1].split("\n## ")[0]
    listed = [
        cells[1].strip()
        for line in section.splitlines()
        if line.startswith("| ")
        and len(cells := re.split(r"(?<!\\)\|", line.strip("|"))) == 3
        and cells[0].strip() in {"free", "carry", "leave"}
    ]
    assert list(dict.fromkeys(listed)) == reasons()


@pytest.mark.parametrize("n_kept", [1, 8, 9, 100])
def test_space_is_freed_for_one_put_until_all_that_was_kept_was_looked_at(n_kept: int) -> None:
    """Not for ever, where what is freed is written once more; and in few tries, because each looks
    at the whole put.
    """

    class Engine:
        page = SimpleNamespace(words={HEAD: 5, LAST: 4 + n_kept})

        def make_room(self, at_most: int) -> int:
            freed = max(8, at_most)
            for word in (HEAD, LAST):
                self.page.words[word] += freed
            return freed

    making = _upkeep.MakingRoom(Engine())
    tries = 0
    while making.step():
        tries += 1
        assert tries < 100
    assert making.is_over
    assert n_kept <= Engine.page.words[HEAD] - 5 < 8 + 2 * n_kept
    assert tries <= 1 + n_kept.bit_length()


def test_a_call_is_tried_again_also_where_nothing_was_freed_for_it() -> None:
    """Another may have freed something since it was refused."""
    engine = SimpleNamespace(
        page=SimpleNamespace(words={HEAD: 0, LAST: 9}), make_room=lambda at_most: 0
    )
    making = _upkeep.MakingRoom(engine)
    assert making.step()
    assert not making.step()


def words_of(n: int) -> str:
    return {2: "two", 4: "four", 5: "five", 7: "seven", 8: "eight"}.get(
        n, f"{n:,}".replace(",", " ")
    )


def test_the_numbers_in_the_documents_are_those_of_the_code() -> None:
    """What docs/design.md and docs/operations.md say of giving space back is what is done."""
    design = " ".join(DESIGN.read_text().split("## 12. ")[1].split("\n## ")[0].split())
    operations = " ".join((DESIGN.parent / "operations.md").read_text().split())
    for_retries = _reclaim._MOST_FOR_RETRIES // _reclaim._RETRY_BYTES // 1000 * 1000
    short_mib = f"{_reclaim._SHORT_BYTES >> 20} MiB"
    for said in (
        f"no more than {words_of(_reclaim_rule._MANY)} messages",
        f"half of the next {words_of(_reclaim_rule.AHEAD)} segments",
        f"some of the {words_of(_reclaim_rule.AHEAD - 1)} behind it",
        f"with {words_of(_reclaim_rule._BESIDE)} segments more",
        f"within {words_of(int(_reclaim._STALLED_S))} seconds",
        f"with {_reclaim._CARRIED_BYTES} bytes more",
        f"with {_reclaim._INDEXED_BYTES} in the index",
        f"less than {short_mib} left",
        f"{words_of(_reclaim._AT_ONCE)} at most in one turn",
        f"holds {_reclaim._RESERVED_BYTES} bytes for every message",
        f"and {words_of(_reclaim._RETRY_BYTES)} more, up to {_reclaim._MOST_FOR_RETRIES >> 20} MiB",
    ):
        assert said in design, said
    for said in (
        f"less than {short_mib} left",
        f"beside {(_reclaim._RESERVED_BYTES + _reclaim._RETRY_BYTES) >> 10} KiB for each waiting",
        f"behind the first {words_of(for_retries)}",
        f"{_upkeep.LOOKS} times a segment where the disk is short",
        f"{words_of(_upkeep._FEW_LOOKS)} times where it is not",
    ):
        assert said in operations, said
    assert (_reclaim_rule._HALF, _reclaim_rule._EIGHTH, _reclaim_rule._SHORT) == (
        1 / 2,
        1 / 8,
        2 / 3,
    )
    assert (_upkeep.UPKEEP_S, _upkeep.OFTEN_S) == (0.1, 1.0)


def decided(q: weclaw.Queue, forced: bool = False) -> tuple[str, str]:
    """What the rule says of the oldest segment of a file."""
    oldest = q._engine.run_once(lambda session: decide(_reclaim._Oldest(session, forced, False)))
    return oldest.does.value, oldest.why


def put_segments(q: weclaw.Queue, n: int, size: int = 9_000) -> int:
    """Fill so many segments of 64 KiB, and begin one more; how many messages that took."""
    n_messages = n * 7 + 1
    for _ in range(n_messages):
        q.put(os.urandom(size))
    return n_messages


def test_what_is_settled_in_a_file_is_held_by_retention_and_by_no_put(open_queue) -> None:
    """Retention holds it against upkeep, and not where a put found no room."""
    q = open_queue(segment_bytes=65536, retention=3600, flush="os")
    assert decided(q) == ("leave", "the log goes on in it")
    for msg in q.get_many(put_segments(q, 2)):
        msg.ack()
    assert decided(q) == ("leave", "retention holds it")
    assert decided(q, forced=True) == ("free", "nothing lives in it")


def test_what_lives_in_a_file_is_told_from_what_is_over(open_queue, monkeypatch) -> None:
    """A backlog is worked off, a few that are held are carried, and many are left."""
    monkeypatch.setattr(_reclaim, "maintain", lambda *args, **kwargs: None)
    q = open_queue(segment_bytes=65536, retention=0, flush="os")
    n = put_segments(q, 4)
    assert decided(q) == ("leave", "it is being worked off")
    assert decided(q, forced=True) == ("leave", "it can be worked off where it is")
    msgs = q.get_many(n, visibility_timeout=None)
    assert decided(q) == ("leave", "too much lives in it")
    for msg in msgs[14:]:
        msg.ack()
    assert decided(q) == ("leave", "too much lives in it")
    assert decided(q, forced=True) == ("carry", "it gives room for the put")
    for msg in msgs[2:7]:
        msg.ack()
    assert decided(q) == ("carry", "little lives in it")


def test_a_backup_pins_the_oldest_segment(open_queue) -> None:
    """What a backup reads is left for as long as it does, also where a put found no room."""
    q = open_queue(segment_bytes=65536, retention=0, flush="os")
    put_segments(q, 2)
    pin = Pin()
    pin.segment = q._engine.log.state.words[_reclaim.HEAD]
    q._engine.pins.append(pin)
    q._engine.run_once(lambda session: session.engine.pin())
    assert decided(q, forced=True) == ("leave", "it is still read")
    pin.is_over = True
    q._engine.run_once(lambda session: session.engine.pin())
    assert decided(q, forced=True) == ("leave", "it can be worked off where it is")


def test_what_lives_is_carried_up_a_bounded_number_a_turn(
    path: Path, open_queue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is lost, told twice or out of order wherever that ends: a copy made between two
    turns is whole, whatever its scratch folder knows of it.
    """
    monkeypatch.setattr(_reclaim, "_AT_ONCE", 7)
    turns: list[int] = []
    packed: list[Any] = []
    pack_carry = _records.pack_carry

    def counted(said: Any) -> Any:
        packed.append(said)
        return pack_carry(said)

    monkeypatch.setattr(_records, "pack_carry", counted)
    monkeypatch.setattr(_upkeep.Upkeep, "_upkeep", lambda engine, busy=False: None)
    retry = weclaw.RetryPolicy(max_retries=1, backoff=60.0)
    q = open_queue(segment_bytes=65536, retention=0, flush="os", retry=retry)
    other = weclaw.Queue(path, group="other", flush="os")
    other.put("first")
    assert [q.get(block=False).ack(), other.get(block=False).ack()] == [None, None]
    lives = [
        weclaw.Put(["lives", n], key=None if n % 4 else "k", delay=600.0 * (n % 2))
        for n in range(40)
    ]
    q.put_many([*lives, *(weclaw.Put(bytes(1000), priority=9) for _ in range(500))])
    for handle in (q, other):
        for msg in handle.get_many(500):
            msg.ack()
    failed = q.get_many(3)
    failed[0].fail("bad")
    failed[1].nack(reason="late")
    monkeypatch.setattr(_reclaim, "_STALLED_S", 0.0)
    engine = q._engine

    def state(one: weclaw.Queue, *, closed: bool) -> Any:
        with contextlib.ExitStack() as stack:
            if closed:
                stack.enter_context(one)
            letters = [(letter.id, letter.body, letter.reason) for letter in one.dlq]
            stats = one.stats()
            status = [one.status(id) for id in ids]
            waiting = [(msg.id, msg.body) for msg in one.peek(100)]
            return letters, sum(stats[:3]), stats.damaged, status, waiting

    ids = [msg.id for msg in q.peek(100)]
    failed[2].release()
    expected = state(q, closed=False)
    wait_s: float | None = 0.0
    while wait_s == 0.0:
        packed.clear()
        wait_s = _reclaim.take_step(engine, False)
        turns.append(len(packed))
        assert state(q, closed=False) == expected
        for known in (True, False):
            copy = tmp_path / f"{len(turns)} {known}.wq"
            shutil.copy(path, copy)
            if known:
                shutil.copytree(scratch(path), scratch(copy))
            assert state(weclaw.Queue(copy, retry=retry), closed=True) == expected
    assert engine.first_offset() > 65536
    assert turns[:4] == [7, 7, 7, 7]
    assert max(turns) == 7
    assert q._store.verify() == []
    other.close()

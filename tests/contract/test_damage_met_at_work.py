"""Contract 9: what is come upon damaged while at work is counted by places, told of, and passed."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, scratch

import weclaw_embedded as weclaw


def flip(path, *names):
    """One byte in the body of each of these messages, with nobody at work."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        for name in names:
            at = data.index(name.encode()) + 20
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))


def bodies(*names):
    return [f"{name} " + "x" * 200 for name in names]


def warnings(caplog):
    return [one.message for one in caplog.records if one.levelno == logging.WARNING]


@pytest.fixture
def damaged(path):
    """A letter, a message that waits, both damaged; then a good one. Their ids."""
    with weclaw.Queue(path) as q:
        ids = [q.put(body) for body in bodies("letter", "between", "waiting", "good")]
        q.get().fail("why")
        q.get().ack()
    flip(path, "letter", "waiting")
    return ids


def test_an_id_of_what_is_damaged_is_not_unknown_in_silence(path, damaged, caplog, tmp_path):
    """`result` and `dlq.get` say where, before it was met and after; `status` has it counted."""
    letter, _, waiting, good = damaged
    with weclaw.Queue(path) as q:
        for _ in range(2):
            for call, id in ((q.dlq.get, letter), (q.result, letter), (q.result, waiting)):
                with pytest.raises(weclaw.CorruptError) as caught:
                    call(id)
                assert caught.value.offset == int(id[:14], 16)
        assert [q.status(id) for id in (letter, waiting, good)] == ["unknown", "unknown", "ready"]
        assert q.stats().damaged == 2
        assert len(warnings(caplog)) == 2
        assert drain(q) == bodies("good")


@pytest.mark.parametrize("call", ["status", "result", "dlq.get", "peek", "get", "list"])
def test_damage_is_counted_and_told_of_by_whatever_meets_it(path, damaged, caplog, call):
    """Once for each place, as a warning with its offset."""
    letter, _, waiting, _ = damaged
    with weclaw.Queue(path) as q:
        assert q.stats().damaged == 0
        for _ in range(2):
            if call == "status":
                assert q.status(waiting) == "unknown"
            elif call in ("result", "dlq.get"):
                with pytest.raises(weclaw.CorruptError):
                    (q.result if call == "result" else q.dlq.get)(letter)
            elif call == "list":
                assert list(q.dlq) == []
            else:
                assert (q.peek()[0] if call == "peek" else q.get()).body in bodies("good")
                if call == "get":
                    break
        assert q.stats().damaged == 1
        (told,) = warnings(caplog)
        assert "damage at offset" in told


def test_what_was_put_with_what_is_damaged_is_not_said_to_be_done(path, caplog):
    """Of a batch over two segments that lost its second part nothing came, also where the first can
    be read.
    """
    with weclaw.Queue(path, segment_bytes=65536) as q:
        q.put("before")
        q.get().ack()
        ids = q.put_many(bodies(*["batch"] * 400))
        q.put("after")
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"batch")] ^= 1
    path.write_bytes(raw)
    shutil.rmtree(scratch(path))
    with weclaw.Queue(path) as q:
        assert {q.status(id) for id in ids} == {"unknown"}
        with pytest.raises(weclaw.CorruptError) as caught:
            q.result(ids[0])
        assert caught.value.offset == int(ids[0][:14], 16)
        assert not q.cancel(ids[0])
        assert q.replay(ids=ids) == 0
        assert f"{len(ids)} messages can't be read and were not replayed" in caplog.text
        assert drain(q) == ["after"]


def test_with_await_a_damaged_id_is_told_of_too(path, damaged):
    """As by `Queue.result`, which the awaited one ends in."""

    async def run():
        async with weclaw.AsyncQueue(path) as q:
            with pytest.raises(weclaw.CorruptError):
                await q.result(damaged[2])
            assert (await q.stats()).damaged == 1

    asyncio.run(run())


def look(pipe, path, ids):
    with weclaw.Queue(path) as q:
        pipe.send([q.status(id) for id in ids])
        pipe.send(len(q.peek(9)))
        pipe.send(q.result(ids[1]))
        pipe.send(q.stats().damaged)


def test_who_has_read_a_message_settles_it_though_it_is_damaged_since(path):
    """It is not set aside with its neighbours; leases and results are answered for by the id."""
    with weclaw.Queue(path) as q:
        held, done, waits = q.put_many(bodies("held", "done", "waits"))
        msg, other = q.get(), q.get()
        other.ack(result="result")
        flip(path, "held")  # they were put together
        with Child(look, path, [held, done, waits]) as child:  # which has not read them yet
            assert child.hear() == ["leased", "done", "unknown"]
            assert child.hear() == 0
            assert child.hear() == "result"
            assert child.hear() == 1
        msg.ack(result="too")
        assert (q.result(held), q.result(done), q.qsize()) == ("too", "result", 0)


def test_damage_is_counted_by_places_with_the_scratch_and_without(path, caplog):
    """Of what was put together one place is damaged, and all that stood there is set aside with it:
    the same count for who meets it and for who folds the log anew.
    """
    with weclaw.Queue(path) as q:
        q.put_many(bodies(*(f"m{n:04}" for n in range(3000))))
        q.put_many(bodies("good", "better"))
        q.get_many(5)
    flip(path, "m0007")
    with weclaw.Queue(path) as q:
        assert [msg.body for msg in q.peek(2)] == bodies("good", "better")
        assert (q.stats().damaged, q.qsize()) == (1, 2)
        assert len(warnings(caplog)) == 1
    shutil.rmtree(scratch(path))
    with weclaw.open(path) as store:
        q = store.queue()
        assert (q.stats().damaged, q.qsize(), len(store.verify())) == (1, 2, 1)
        assert len(store.repair()) == 1
        assert (q.stats().damaged, store.verify()) == (0, [])
    shutil.rmtree(scratch(path))
    with weclaw.Queue(path) as q:
        assert (q.stats().damaged, drain(q)) == (0, bodies("good", "better"))


@pytest.mark.parametrize("readonly", [False, True])
def test_a_peek_goes_on_past_what_is_damaged(path, readonly):
    """It shows as many messages as were asked for, not what was left of as many rows."""
    names = [f"m{n:02}" for n in range(30)]
    with weclaw.Queue(path) as q:
        for body in bodies(*names):
            q.put(body)
    flip(path, *names[:9:2], *names[10:20])
    good = [name for name in names if name not in (*names[:9:2], *names[10:20])]
    with weclaw.Queue(path, readonly=readonly) as q:
        assert [msg.body for msg in q.peek(1)] == bodies(*good[:1])
        assert [msg.body for msg in q.peek(8)] == bodies(*good[:8])
        assert [msg.body for msg in q.peek(99)] == bodies(*good)


def test_an_export_says_what_it_left_out(path, caplog, tmp_path):
    """A letter that can't be read is not in the file, and is named by its offset."""
    with weclaw.Queue(path) as q:
        ids = [q.put(body) for body in bodies("one", "two", "three")]
        for _ in ids:
            q.get().fail("why")
    flip(path, "two")
    with weclaw.Queue(path) as q:
        assert q.dlq.export(tmp_path / "letters.jsonl") == 2
        assert f"1 dead letters can't be read and were left out of {tmp_path}" in caplog.text
        assert f"at offset {int(ids[1][:14], 16)}" in caplog.text


FOUR = ("one", "two", "three", "four")


def four(path, *, given, end, **options):
    """Four messages that ended in the same way, the second of them damaged since; their ids."""
    with weclaw.Queue(path, **options) as q:
        ids = [q.put(body, id=body[:5] if given else None) for body in bodies(*FOUR)]
        for _ in ids:
            end(q.get(timeout=5))
    flip(path, "two")
    return ids


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("named", [True, False], ids=["ids", "all"])
def test_a_damaged_letter_holds_up_no_other(path, caplog, named, given):
    """The others are redriven and counted; a warning says where the damaged one stood."""
    ids = four(path, given=given, end=lambda msg: msg.fail("why"))
    with weclaw.Queue(path) as q:
        at = q.dlq.get(ids[0]).offset
        assert q.dlq.redrive(ids if named else None) == 3
        (said,) = (one for one in warnings(caplog) if "redriven" in one)
        assert "1 dead letters can't be read and were not redriven, those at offset" in said
        assert int(said.split()[-1]) > at
        assert q.stats()[:4] == (3, 0, 0, 0)
        assert q.stats().damaged == 1
        assert drain(q) == bodies("one", "three", "four")


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
def test_a_damaged_letter_can_be_thrown_away(path, given):
    """By its id, as with all others."""
    ids = four(path, given=given, end=lambda msg: msg.fail("why"))
    with weclaw.Queue(path) as q:
        assert q.dlq.purge(ids) == 4
        assert len(q.dlq) == 0


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
def test_a_damaged_message_holds_up_no_other_that_is_replayed(path, caplog, given):
    """The others flow and are counted; a warning names the damaged one, whose result is kept."""
    ids = four(path, given=given, end=lambda msg: msg.ack(result=msg.body[:3]))
    with weclaw.Queue(path) as q:
        assert q.replay(ids=ids) == 3
        (said,) = warnings(caplog)
        assert said.endswith(f"1 messages can't be read and were not replayed, {ids[1]!r}")
        assert q.result(ids[1]) == "two"
        assert drain(q) == bodies("one", "three", "four")


@pytest.mark.parametrize("chosen", ["ids", "offset"])
def test_what_a_replica_has_is_healed_before_it_is_replayed(path, tmp_path, chosen):
    """Then none is left out."""
    ids = four(path, given=True, end=lambda msg: msg.ack(), replica=str(tmp_path / "copy.wq"))
    with weclaw.Queue(path) as q:
        assert q.replay(**{"ids": ids} if chosen == "ids" else {"offset": "earliest"}) == 4
        assert drain(q) == bodies(*FOUR)


@pytest.mark.parametrize("chosen", ["offset", "earliest", "since"])
def test_a_replay_of_all_says_what_it_could_not_read(path, caplog, chosen):
    """As one of ids does; the place is counted, and results that were given are kept."""
    ids = four(path, given=False, end=lambda msg: msg.ack(result=msg.body[:3]))
    at = int(ids[1][:14], 16)
    with weclaw.Queue(path) as q:
        since = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=1)
        how = {"offset": 0, "earliest": "earliest", "since": since}[chosen]
        assert q.replay(**{"since" if chosen == "since" else "offset": how}) == 3
        told, said = warnings(caplog)
        assert "damage at offset" in told
        assert "1 places can't be read, and what stood there was not replayed" in said
        assert 0 < at - int(said.split()[-1]) < 100
        assert q.stats().damaged == 1
        assert q.result(ids[1]) == "two"
        assert drain(q) == bodies("one", "three", "four")


def test_a_replay_tells_only_of_damage_in_what_it_reads(path, caplog):
    """What stands before its offset, or was written before its time, is not asked for."""
    ids = four(path, given=False, end=lambda msg: msg.ack())
    with weclaw.Queue(path) as q:
        assert q.replay(offset=int(ids[2][:14], 16)) == 2
        since = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
        assert q.replay(since=since) == 0
        assert warnings(caplog) == []
        assert q.stats().damaged == 0


def test_a_replay_takes_nothing_from_who_has_read_it(path):
    """A message in hand that is damaged since is settled like any other, one that waits is out."""
    with weclaw.Queue(path) as q:
        held, done, _ = q.put_many(bodies("held", "done", "waits"))
        msg, other = q.get(), q.get()
        other.ack(result="result")
        flip(path, "held")  # they were put together
        assert q.replay(offset="earliest") == 0
        assert q.stats().damaged == 1
        msg.ack(result="too")
        assert (q.result(held), q.result(done), q.qsize()) == ("too", "result", 0)


def test_what_a_replica_can_not_be_asked_for_now_is_not_set_aside_by_a_replay(
    path, tmp_path, caplog
):
    """It is told of; when the copy is there again, it is healed and flows."""
    copy = tmp_path / "disk" / "copy.wq"
    copy.parent.mkdir()
    ids = four(path, given=False, end=lambda msg: msg.ack(), replica=str(copy))
    copy.parent.rename(tmp_path / "away")
    with weclaw.Queue(path, sync_replica=False) as q:
        assert q.replay(offset="earliest") == 3
        assert "1 places can't be read, and what stood there was not replayed" in caplog.text
        assert q.stats().damaged == 0
    (tmp_path / "away").rename(copy.parent)
    with weclaw.Queue(path) as q:
        assert q.replay(ids=ids[1:2]) == 1

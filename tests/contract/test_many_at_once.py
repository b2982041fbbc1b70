"""Contract 4: what is counted is true however many messages ended by themselves at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _clock, _index_ask, _taking, aio, threads
from weclaw_embedded._session import Session
from weclaw_embedded.wal import TAIL

AT_ONCE = weclaw.RetryPolicy(max_retries=0, max_crashes=0)
N = 2500  # more than are judged before something is handed out
HOW = ["expires", "lapses", "dies"]


def take_all(pipe, path, n, visibility_s):
    held = weclaw.Queue(path).get_many(n, visibility_timeout=visibility_s)
    pipe.send(len(held))
    time.sleep(60)


def holder_of(path, n, visibility_s=None):
    """A process that has leased so many."""
    child = Child(take_all, path, n, visibility_s)
    assert child.hear() == n
    return child


def all_end(q, how):
    """Put messages, all of which are dead letters when this returns, with nobody having looked.
    Their ids.
    """
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    ids = q.put_many([weclaw.Put(n, ttl=0.2 if how == "expires" else None) for n in range(N)])
    if how == "lapses":
        assert len(q.get_many(N, visibility_timeout=0.2)) == N
    if how == "dies":
        holder_of(q.store.path, N).kill()
    else:
        time.sleep(0.25)
    return ids


QUESTIONS = {
    "stats": lambda q: q.stats()[:4] == (0, 0, 0, N),
    "qsize": lambda q: q.qsize() == 0,
    "empty": lambda q: q.empty(),
    "full": lambda q: not q.full(),
    "join": lambda q: q.join(timeout=0.0),
    "purge": lambda q: q.purge() == 0,
    "letters": lambda q: len(q.dlq) == N,
    "room": lambda q: len(q.put_many(range(N), block=False)) == N,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_answer_is_true(open_queue, how, question):
    """Whoever asks first is told of all that ended, and not of the first thousand."""
    q = open_queue(retry=AT_ONCE, maxsize=N, flush="os")
    all_end(q, how)
    assert QUESTIONS[question](q)


def test_the_first_answer_of_a_drop_in_is_true(path):
    """The same of what counts beside `Queue`: the drop-ins."""
    items = threads.Queue(path=path)
    try:
        with weclaw.Queue(path, flush="os") as q:
            all_end(q, "expires")
            assert items.qsize() == 0
            assert items.unfinished_tasks == 0
    finally:
        items.close()


def test_who_takes_finds_what_is_behind_those_that_died(open_queue):
    """What is behind more dead ones than are judged at a time is had at once."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=1, backoff=0.0), flush="os")
    q.put_many(range(N))
    for msg in q.get_many(2000):
        msg.nack()
    assert len(q.get_many(N, visibility_timeout=0.2)) == N
    time.sleep(0.25)  # those have a second failure now, and the rest their first
    assert q.get(block=False).body == 2000
    assert q.stats()[:4] == (499, 0, 1, 2000)


def test_what_is_judged_at_once_is_not_one_frame(open_queue, monkeypatch):
    """However many end together, a frame has only so many records."""
    monkeypatch.setattr(_taking, "_RECORDS", 7)
    monkeypatch.setattr(_taking, "_MANY", 20)
    q = open_queue(retry=NO_WAIT, flush="os")
    q.put_many(range(50))
    assert len(q.get_many(50, visibility_timeout=0.2)) == 50
    log = q.store._engine.log
    before = log.state.words[TAIL]
    time.sleep(0.25)
    assert q.stats()[:4] == (50, 0, 0, 0)
    frames = log.frames(before, log.state.words[TAIL])
    assert [len(frame.records) for frame in frames] == [7, 7, 6, 7, 7, 6, 7, 3]


@contextlib.contextmanager
def turns_that_write(monkeypatch):
    """How much each turn writes that writes anything."""
    turns = []
    finish = Session.finish

    def counted(self):
        before = self.page.words[TAIL]
        finish(self)
        if self.page.words[TAIL] > before:
            turns.append(self.page.words[TAIL] - before)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "finish", counted)
        yield turns


@pytest.mark.parametrize(
    ("how", "question"),
    # What is in hands takes no room, and is not looked at for a put.
    [("expires", one) for one in QUESTIONS]
    + [(how, one) for how in ("lapses", "dies") for one in QUESTIONS if one != "room"],
)
def test_others_have_the_lock_in_between(open_queue, monkeypatch, how, question):
    """Where so much has ended that judging it takes long, it takes several turns; the answer is as
    true, and each letter is told of once.
    """
    monkeypatch.setattr(_taking, "_MANY", 500)
    told = []
    q = open_queue(retry=AT_ONCE, maxsize=N, flush="os", on_dead=lambda letter: told.append(letter))
    all_end(q, how)
    with turns_that_write(monkeypatch) as turns:
        assert QUESTIONS[question](q)
    assert len(turns) >= N // 500
    assert eventually(lambda: len(told) == N)
    assert len({letter.id for letter in told}) == N


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["Queue", "threads", "tasks", "task at once"])
def test_who_takes_looks_on_behind_them_in_other_turns(path, monkeypatch, how, kind):
    """Whoever takes judges a few in a turn, and is given what stands behind all of them."""
    monkeypatch.setattr(_taking, "_FEW", 100)
    with weclaw.Queue(path, retry=AT_ONCE, flush="os") as q:
        all_end(q, how)
        q.put("behind")
        if kind == "Queue":
            assert q.get(block=False).body == "behind"
        elif kind == "threads":
            items = threads.Queue(path=path, retry=AT_ONCE)
            assert items.get(block=False) == "behind"
            items.close()
        else:

            async def take():
                if kind == "tasks":
                    async with weclaw.AsyncQueue(path, retry=AT_ONCE) as tasks:
                        return (await tasks.get(block=False)).body
                items = aio.Queue(path=path, retry=AT_ONCE)
                body = items.get_nowait()
                items.close()
                return body

            assert asyncio.run(take()) == "behind"


def test_what_the_dead_held_never_ran_out(path, monkeypatch):
    """However many turns it takes, and though the time of all of it is over by then: each is told
    of the end that it had, and of what the living hold nothing is.
    """
    monkeypatch.setattr(_taking, "_MANY", 30)
    monkeypatch.setattr(_taking, "_FEW", 20)
    with weclaw.Queue(path, retry=AT_ONCE, flush="os") as q:
        q.put_many(range(300))
        mine = q.get_many(50, visibility_timeout=60)
        first = holder_of(path, 100, 60)
        kept = q.get_many(20, visibility_timeout=None)
        second = holder_of(path, 100, 60)
        first.kill()
        second.kill()
        now_ns = _clock.monotonic_ns
        monkeypatch.setattr(_clock, "monotonic_ns", lambda: now_ns() + 70 * 10**9)
        assert q.get(block=False).body == 270
        assert q.stats()[:4] == (29, 0, 21, 250)
        reasons = [letter.reason for letter in q.dlq]
        assert reasons == ["lease ran out"] * 50 + ["consumer died"] * 200
        with pytest.raises(weclaw.LeaseLostError):
            mine[0].ack()
        for msg in kept:
            msg.ack()


def test_a_death_that_others_follow_before_all_of_it_was_judged(path, monkeypatch):
    """Who dies while what another held is given back is not forgotten, wherever his messages are:
    also before those that were looked at already.
    """
    monkeypatch.setattr(_taking, "_FEW", 20)
    with weclaw.Queue(path, retry=NO_WAIT, flush="os") as q:
        q.put_many(range(300))
        early, late = holder_of(path, 100), holder_of(path, 200)
        late.kill()
        given = q.get(block=False)
        assert (given.body, given.crash_count) == (100, 1)
        early.kill()
        assert q.stats()[:4] == (299, 0, 1, 0)
        given.ack()


def test_leases_of_the_living_are_looked_at_once_for_a_death(path, monkeypatch):
    """However many there are before those of the dead, a turn looks at so many, and the next goes
    on behind them.
    """
    monkeypatch.setattr(_taking, "_MANY", 10)
    monkeypatch.setattr(_index_ask, "_LOOKED_FOR_ONE", 2)
    looked = []
    ask = _index_ask.Ask.leases_of_dead

    def counted(self, *args):
        found, more = ask(self, *args)
        looked.append(len(found))
        return found, more

    monkeypatch.setattr(_index_ask.Ask, "leases_of_dead", counted)
    with weclaw.Queue(path, retry=NO_WAIT, flush="os") as q:
        q.put_many(range(100))
        kept = q.get_many(50)
        holder_of(path, 30).kill()
        looked.clear()
        assert q.stats()[:4] == (50, 0, 50, 0)
        assert looked == [0, 0, 10, 10, 10, 0]
        for msg in kept:
            msg.ack()


def test_what_a_turn_that_came_to_nothing_has_judged_is_judged_again(path):
    """Nothing of it was written, so nothing of it counts."""
    with weclaw.Queue(path, retry=NO_WAIT, flush="os") as q:
        q.put_many(range(100))
        holder_of(path, 90).kill()

        def fail(session):
            group = session.tx.group(q._address.gid)
            session.engine.bury(session, session.engine.dead_owners(everyone=True))
            for _ in range(3):
                assert _taking.sweep(session, session.tx, group, NO_WAIT, 0, [], 10)
            raise ZeroDivisionError

        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                q.store._engine.run(fail)
        assert q.stats()[:4] == (100, 0, 0, 0)


async def result(q, id):
    with pytest.raises(weclaw.DeadLetterError):
        await q.result(id)
    return True


async def transaction(q, id):
    async with q.transaction() as tx:
        for n in range(N):
            tx.put(n)
    return tx.ids


ON_LOOPS = {
    "result": result,
    "join": lambda q, _: q.join(),
    "put_many": lambda q, _: q.put_many(range(N)),
    "transaction": transaction,
}
COUNTING = [(how, call) for how in HOW for call in ("result", "join")]


@pytest.mark.parametrize(
    # What is in hands takes no room, and is not looked at for a put.
    ("how", "call"),
    COUNTING + [("expires", call) for call in ON_LOOPS if call not in ("result", "join")],
)
def test_what_tasks_wait_for_is_judged_in_turns_too(path, monkeypatch, how, call):
    """Those of the thread that serves them; each letter is told of once."""
    monkeypatch.setattr(_taking, "_MANY", 500)
    told = []
    options = {"retry": AT_ONCE, "maxsize": N, "flush": "os"}

    async def run():
        async with weclaw.AsyncQueue(path, on_dead=told.append, **options) as tasks:
            q = weclaw.Queue(path, **options)
            ids = all_end(q, how)
            with turns_that_write(monkeypatch) as turns:
                assert await ON_LOOPS[call](tasks, ids[0])
            assert len(turns) >= N // 500
            q.close()

    asyncio.run(run())
    assert len(told) == N
    assert len({letter.id for letter in told}) == N


DROP_INS = {
    "put": lambda q: q.put_nowait("more"),
    "get": lambda q: q.get_nowait(),
    "qsize": lambda q: q.qsize(),
    "task_done": lambda q: q.task_done(),
}


@pytest.mark.parametrize("kind", [aio, threads])
@pytest.mark.parametrize("call", DROP_INS)
def test_what_a_drop_in_judges_it_judges_in_turns_too(path, monkeypatch, kind, call):
    """Those that answer at once as well; what they did themselves is done once."""
    monkeypatch.setattr(_taking, "_MANY", 500)
    monkeypatch.setattr(_taking, "_FEW", 100)

    async def run():
        items = kind.Queue(N + 1, path=path, retry=AT_ONCE)
        items.put_nowait("got")
        assert items.get_nowait() == "got"
        items.put_nowait("left")
        with weclaw.Queue(path, flush="os") as q:
            q.put_many([weclaw.Put(n, ttl=0.2) for n in range(N)])
        time.sleep(0.25)
        with turns_that_write(monkeypatch) as turns:
            DROP_INS[call](items)
            assert items.qsize() == {"put": 2, "get": 0}.get(call, 1)
        assert len(turns) >= N // 500
        assert items.unfinished_tasks == {"put": 3, "task_done": 1}.get(call, 2)
        items.close()

    asyncio.run(run())


def test_puts_stay_in_order_behind_one_that_judges(path, monkeypatch):
    """Those of other tasks that came after it are not before it, in whatever turn it ends."""
    monkeypatch.setattr(_taking, "_MANY", 100)

    async def run():
        async with weclaw.AsyncQueue(path, maxsize=N, flush="os", retry=AT_ONCE) as tasks:
            with weclaw.Queue(path, flush="os") as q:
                all_end(q, "expires")
            waits = [{"timeout": 60}, {}]
            # So few that they are encoded on the loop: what a pool encodes comes in any order.
            puts = (tasks.put_many([n] * 150, **waits[n % 2]) for n in range(12))
            await asyncio.gather(*puts)
            found = [msg.body for msg in await tasks.get_many(N)]
            assert found == [n for n in range(12) for _ in range(150)]

    asyncio.run(run())


def test_threads_that_put_together_judge_in_turns_too(path, monkeypatch):
    """One that finds much that ended takes turns of its own for it; each puts once."""
    monkeypatch.setattr(_taking, "_MANY", 100)
    with weclaw.Queue(path, maxsize=N, flush="os", retry=AT_ONCE) as q:
        all_end(q, "expires")
        with turns_that_write(monkeypatch) as turns, ThreadPoolExecutor(8) as pool:
            ids = [*pool.map(lambda n: q.put_many([n] * 300), range(8))]
        assert len(turns) >= N // 100
        assert len({id for some in ids for id in some}) == 2400
        assert sorted(msg.body for msg in q.get_many(N)) == [
            n for n in range(8) for _ in range(300)
        ]

"""The stand-ins for the queues of the standard library's `queue`."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import pickle
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _files, aio, threads
from weclaw_embedded._delivery import Lease


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def test_a_program_of_queue_needs_one_other_line(path):
    """Workers as in the documentation of `queue`."""
    q = threads.Queue(path=path)
    got = []

    def work():
        while True:
            item = q.get()
            if item is None:
                q.task_done()
                return
            got.append(item)
            q.task_done()

    workers = [in_thread(work) for _ in range(3)]
    for i in range(30):
        q.put(i)
    q.join()
    assert sorted(got) == list(range(30))
    assert q.unfinished_tasks == 0
    for _ in workers:
        q.put(None)
    for worker in workers:
        worker.join()
    q.join()
    with pytest.raises(ValueError, match="too many"):
        q.task_done()
    q.close()


def put_then_die(pipe, path):
    from weclaw_embedded import threads

    q = threads.Queue(path=path)
    for i in range(4):
        q.put(i)
    q.get()
    q.task_done()
    q.get()
    pipe.send("now")
    time.sleep(60)


def test_items_survive_a_kill_and_only_those_done_are_gone(path):
    """After kill -9 everything that was put and not `task_done` is there, in order."""
    with Child(put_then_die, path) as child:
        assert child.hear() == "now"
        child.kill()
    q = threads.Queue(path=path)
    assert (q.unfinished_tasks, q.qsize()) == (3, 3)
    assert [q.get() for _ in range(3)] == [1, 2, 3]
    q.close()


def be_done_in_a_child(pipe, path):
    from weclaw_embedded import threads

    q = threads.Queue(path=path)
    q.put("the parent's")
    q.put("the child's")
    q.get()
    pid = os.fork()
    if pid == 0:
        try:
            q.get()
            q.task_done()
            q.task_done()
            q.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    with weclaw.Queue(path) as plain:
        pipe.send(plain.stats()[:5])
    q.task_done()
    pipe.send(q.unfinished_tasks)
    q.close()


def test_an_item_that_was_got_before_a_fork_stays_the_parents(path):
    """A child's task_done settles what the child got, and not that."""
    with Child(be_done_in_a_child, path, env={"PYTHONWARNINGS": "ignore"}) as child:
        assert child.hear() == (0, 0, 1, 0, 1)
        assert child.hear() == 0
        child.end()


def work_in_a_child(pipe, path, module, ending):
    """The parent has an item in hand, and has counted one done by a stranger; the child works."""
    from weclaw_embedded import aio, threads

    q = {"threads": threads, "aio": aio}[module].Queue(path=path)
    for n in range(6):
        q.put_nowait(n)
    assert [q.get_nowait(), q.get_nowait()] == [0, 1]
    stranger = threading.Thread(target=q.task_done)
    stranger.start()
    stranger.join()
    seen = [q.unfinished_tasks]
    pid = os.fork()
    if pid == 0:
        try:
            told = [q.unfinished_tasks]
            for _ in range(3):
                got = q.get_nowait()
                q.task_done()
                told.append((got, q.unfinished_tasks))
            pipe.send(told)
            if ending == "close":
                q.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    seen.append(q.unfinished_tasks)
    with weclaw.Queue(path) as plain:
        pipe.send((seen, plain.stats().settled, [msg.body for msg in plain.peek(9)]))
        q.task_done()  # with that of the stranger as many as are out
        pipe.send((q.unfinished_tasks, plain.stats()[:5]))
    q.close()


@pytest.mark.parametrize("ending", ["close", "exit"])
@pytest.mark.parametrize("module", ["threads", "aio"])
def test_a_childs_task_done_is_for_what_the_child_got(path, module, ending):
    """Each settles an item of its own, whatever its parent holds and has counted at the fork."""
    env = {"PYTHONWARNINGS": "ignore"}
    with Child(work_in_a_child, path, module, ending, env=env) as child:
        # Two of them are the parent's, as those of any other process.
        assert child.hear() == [6, (2, 5), (3, 4), (4, 3)]
        assert child.hear() == ([5, 2], 3, [5])
        assert child.hear() == (1, (1, 0, 0, 0, 5))
        child.end()


def test_task_done_settles_the_item_of_the_calling_thread(path):
    """Another thread's item stays held."""
    q = threads.Queue(path=path)
    q.put("theirs")
    q.put("mine")
    in_thread(q.get).join()
    q.get()
    q.task_done()
    with weclaw.Queue(path) as plain:
        assert (plain.stats().leased, plain.stats().settled) == (1, 1)
    q.close()


def test_task_done_settles_the_item_its_context_inherited(path):
    """A function run in a copy of the context is done with the item of that context."""
    q = threads.Queue(path=path)
    q.put(1)
    q.put(2)
    in_thread(q.get).join()
    q.get()
    context = contextvars.copy_context()
    in_thread(context.run, q.task_done).join()
    with weclaw.Queue(path) as plain:
        assert plain.stats().settled == 1
    q.task_done()  # counted: it is the only one that is out
    with weclaw.Queue(path) as plain:
        assert plain.stats().settled == 2
    q.close()


def test_a_pool_that_is_given_the_context_settles_as_it_goes(path):
    """One thread gets and the threads of a pool are done, with always some in hand: what each has
    done is settled, and what is in hand is not.
    """
    q = threads.Queue(path=path, flush="os")
    in_hand, done, may_end = threading.Semaphore(4), [], threading.Event()

    def work(n):
        if n == 0:
            may_end.wait(30)
        done.append(n)
        q.task_done()
        in_hand.release()

    for n in range(40):
        q.put(n)
    with ThreadPoolExecutor(4) as pool, weclaw.Queue(path) as plain:
        for _ in range(40):
            in_hand.acquire()
            pool.submit(contextvars.copy_context().run, work, q.get())
        eventually(lambda: plain.stats().settled == 39)
        assert (0 in done, plain.stats().leased) == (False, 1)
        may_end.set()
    assert q.unfinished_tasks == 0
    q.close()


@pytest.mark.parametrize("module", [threads, aio])
def test_that_many_calls_settle_nothing_is_said_once(path, module, caplog):
    """Of a program that always has one in hand, not of one that settles all now and then."""
    q = module.Queue(path=path, flush="os")
    for n in range(301):
        q.put_nowait(n)
    for _ in range(3):
        for _ in range(60):
            q.get_nowait()
        in_thread(lambda: [q.task_done() for _ in range(60)]).join()
    q.get_nowait()
    for n in range(120):
        assert len(_warnings(caplog)) == (n >= 100)
        q.get_nowait()
        in_thread(q.task_done).join()
    [told] = _warnings(caplog)
    assert told.startswith(f"{path}: 100 calls of task_done()")
    with weclaw.Queue(path) as plain:
        assert plain.stats().settled == 180
    q.close()


@pytest.mark.parametrize("getter", ["own", "other"])
def test_a_task_done_that_found_no_room_is_none(path, monkeypatch, getter):
    """It raises and leaves all as it was: the next call settles what it was to settle."""
    q = threads.Queue(path=path)
    q.put("a")
    q.put("b")
    if getter == "own":
        assert q.get() == "a"
    else:
        in_thread(q.get).join()

    def full(*_):
        raise weclaw.DiskFullError("no room")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(_files, "write_at", full)
            with pytest.raises(weclaw.DiskFullError):
                q.task_done()
        assert q.unfinished_tasks == 2
    q.task_done()
    assert q.unfinished_tasks == 1
    q.close()
    with weclaw.Queue(path) as plain:
        assert [msg.body for msg in plain.get_many(9)] == ["b"]


@pytest.mark.parametrize(
    ("kind", "order"),
    [(threads.Queue, "12"), (threads.PriorityQueue, "12"), (threads.LifoQueue, "21")],
)
def test_an_item_whose_get_found_no_room_is_got_by_the_next(path, monkeypatch, kind, order):
    """In its place in the order."""
    q = kind(path=path)
    for item in ("1", "2"):
        q.put(item)

    def full(*_):
        raise weclaw.DiskFullError("no room")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(_files, "write_at", full)
            with pytest.raises(weclaw.DiskFullError):
                q.get()
        assert q.qsize() == 2
    assert [q.get_nowait() for _ in range(2)] == [*order]
    q.close()


@pytest.mark.parametrize("kind", [threads.Queue, aio.Queue])
def test_a_get_does_not_wait_for_the_on_dead_of_what_it_could_not_decode(path, kind):
    """It goes to the dead letters, and the next item to who gets."""
    with weclaw.Queue(path, codec="pickle") as plain:
        plain.put({1, 2})
        may_end, told = threading.Event(), []

        def on_dead(letter):
            may_end.wait(30)
            told.append(letter.id)

        with weclaw.Queue(path) as other:
            other.put("next")
            q = kind(path=path, on_dead=on_dead)
            assert (q.get_nowait(), told) == ("next", [])
            may_end.set()
            q.close()
            assert told == [letter.id for letter in other.dlq]
            assert len(told) == 1


def test_what_one_thread_gets_and_another_is_done_with_is_forgotten(path):
    """One thread hands out and another says task_done: nothing is kept of what is settled."""
    q = threads.Queue(path=path, flush="os")
    for _ in range(3):
        for n in range(5):
            q.put(n)
            q.get()
        in_thread(lambda: [q.task_done() for _ in range(5)]).join()
        assert q.unfinished_tasks == 0
    q.put("the last")
    q.get()  # what was settled is forgotten of its context, too
    gc.collect()
    engine = q._core.engine
    kept = [one for one in gc.get_objects() if type(one) is Lease and one.engine is engine]
    assert kept == [*engine.held]
    q.close()


@pytest.mark.parametrize("immediate", [False, True])
def test_shutdown_has_the_meaning_of_3_13_and_leaves_the_items(path, immediate):
    """Those who wait are told within half a second, and nothing is taken off the disk."""
    q = threads.Queue(2, path=path)
    told = []

    def wait(function, *args):
        try:
            function(*args)
        except threads.ShutDown:
            told.append(time.monotonic())

    getters = [in_thread(wait, q.get) for _ in range(3)]
    time.sleep(0.1)
    assert not q.is_shutdown
    started = time.monotonic()
    q.shutdown(immediate)
    for getter in getters:
        getter.join()
    assert len(told) == 3
    # Half a second is the promise; the rest is for a busy machine.
    assert max(told) - started < 5
    q.close()

    q = threads.Queue(2, path=path)
    q.put(1)
    q.put(2)
    putter = in_thread(wait, q.put, 3)
    time.sleep(0.1)
    assert q.get() == 1
    putter.join()
    assert q.get() == 2
    q.put(4)
    q.shutdown(immediate)
    for call in (lambda: q.put(5), lambda: q.put_nowait(5)):
        with pytest.raises(threads.ShutDown):
            call()
    if immediate:
        assert (q.qsize(), q.unfinished_tasks) == (0, 2)
    else:
        assert q.unfinished_tasks == 4
        assert (q.get(), q.get_nowait()) == (3, 4)
    with pytest.raises(threads.ShutDown):
        q.get(timeout=5)
    for _ in range(2 if immediate else 4):
        q.task_done()
    q.join()
    q.close()
    with weclaw.Queue(path) as plain:
        assert plain.qsize() == (2 if immediate else 0)


def test_waiting_has_an_end(path):
    """Timeouts raise `Full` and `Empty`, which are those of `queue`; room that comes is used."""
    q = threads.Queue(1, path=path)
    with pytest.raises(queue.Empty):
        q.get(timeout=0.05)
    q.put(1)
    with pytest.raises(queue.Full):
        q.put(2, timeout=0.05)
    with pytest.raises(queue.Full):
        q.put(2, block=False)
    with pytest.raises(ValueError, match="negative"):
        q.get(timeout=-1)
    timer = threading.Timer(0.05, q.get)
    timer.start()
    q.put(2, timeout=5)
    timer.join()
    assert (q.get(), q.empty(), q.full()) == (2, True, False)
    q.close()


@pytest.mark.parametrize(
    ("cls", "order"), [(threads.PriorityQueue, [1, 2, 3, 4]), (threads.LifoQueue, [4, 1, 2, 3])]
)
def test_other_orders_hold_over_restarts(path, cls, order):
    """Priority and last-in-first-out orders are kept for what an earlier process has left."""
    q = cls(path=path)
    for i in (3, 2, 1, 4):
        q.put(i)
    q.close()
    q = cls(path=path)
    assert [q.get() for _ in range(4)] == order
    q.close()


def test_joins_wait_for_what_other_processes_hold(path):
    """What is unfinished is what the file says, whoever has it."""
    with weclaw.Queue(path) as plain:
        plain.put("x")
        q = threads.Queue(path=path)
        joined = threading.Event()
        joining = in_thread(lambda: (q.join(), joined.set()))
        msg = plain.get()
        assert not joined.wait(0.1)
        msg.ack()
        assert joined.wait(5)
        joining.join()
        q.close()


@pytest.mark.parametrize("cls", [threads.Queue, threads.LifoQueue, aio.Queue])
def test_one_that_is_handed_to_another_process_says_what_to_do(path, cls):
    """In words about itself, not about the store behind it, which nobody has named."""
    q = cls(path=path)
    q.put_nowait(1)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(q)
    assert str(caught.value).startswith(f"a {cls.__module__}.{cls.__name__} can't be pickled: ")
    assert repr(str(path)) in str(caught.value)
    assert "store" not in str(caught.value)
    q.close()
    with weclaw.Queue(path) as plain, pickle.loads(pickle.dumps(plain)) as copy:  # as it advises
        assert copy.get(timeout=5).body == 1


@pytest.mark.parametrize("hook", ["_init", "_put", "_get", "_qsize"])
@pytest.mark.parametrize("module", [threads, aio])
def test_a_subclass_that_keeps_items_its_own_way_is_refused(module, hook):
    """Its methods would never be called: so it is said when the class is made."""
    other = type("Mixed", (), {hook: lambda self, *_: None})
    for bases, names in (((), {hook: lambda self, *_: None}), ((other,), {})):
        with pytest.raises(TypeError, match=f"Unique has {hook}, .* would never be called"):
            type("Unique", (*bases, module.PriorityQueue), names)


def test_a_subclass_with_methods_of_its_own_is_none_of_these(path):
    """What a user changes in `put` and `get` is called."""

    class Doubled(threads.Queue):
        def put(self, item, *args):
            super().put(2 * item, *args)

    q = Doubled(path=path)
    q.put(2)
    assert q.get() == 4
    q.close()


def take_then_die(pipe, path, n):
    from weclaw_embedded import threads

    q = threads.Queue(path=path)
    pipe.send([q.get(timeout=20) for _ in range(n)])
    time.sleep(60)


def die_with(path, n):
    with Child(take_then_die, path, n) as child:
        assert len(child.hear()) == n
        child.kill()


def _warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@pytest.mark.parametrize("call", ["get", "get_nowait", "waiting get", "aio", "aio get_nowait"])
def test_a_get_that_finds_nothing_but_suspects_says_so_once(path, call, caplog):
    """Two were in hand at a crash: the second waits until the first is done, and the log, and
    `Empty`, say what to do.
    """
    with weclaw.Queue(path) as plain:
        plain.put_many([0, 1])
    die_with(path, 2)

    async def got(q):
        getter = asyncio.create_task(q.get())
        await asyncio.to_thread(eventually, lambda: _warnings(caplog))
        assert not getter.done()
        q.task_done()
        return await asyncio.wait_for(getter, 30)

    q = (aio if call.startswith("aio") else threads).Queue(path=path)
    assert (q.get_nowait(), q.qsize()) == (0, 1)
    assert _warnings(caplog) == []
    if call.endswith("get_nowait") or call == "get":
        take = q.get_nowait if call.endswith("get_nowait") else lambda: q.get(timeout=0.1)
        for _ in range(2):
            with pytest.raises(threads.Empty, match=r"one at a time; .* task_done"):
                take()
        q.task_done()
        assert take() == 1
    elif call == "waiting get":
        found = []
        getter = in_thread(lambda: found.append(q.get(timeout=30)))
        eventually(lambda: _warnings(caplog))
        assert not found
        q.task_done()
        getter.join()
        assert found == [1]
    else:
        assert asyncio.run(got(q)) == 1
    [told] = _warnings(caplog)
    assert told.startswith(f"{path}: ")
    assert "waits for ever" in told
    q.task_done()
    with pytest.raises(threads.Empty, match="nothing waits"):
        q.get_nowait()
    assert len(_warnings(caplog)) == 1
    q.close()


@pytest.mark.parametrize("kind", ["PriorityQueue", "LifoQueue"])
def test_other_orders_say_it_too(path, kind, caplog):
    """What is held back for the one in hand is told of whatever the order."""
    with weclaw.Queue(path) as plain:
        plain.put_many([0, 1])
    die_with(path, 2)
    q = getattr(threads, kind)(path=path)
    q.get()
    with pytest.raises(threads.Empty, match="one at a time"):
        q.get_nowait()
    assert len(_warnings(caplog)) == 1
    q.close()


@pytest.mark.parametrize("given", [None, "on_dead"])
@pytest.mark.parametrize("module", [threads, aio])
def test_an_item_that_dies_is_told_of(path, module, given, caplog):
    """By the user's `on_dead`; where there is none, by a warning that says where to find it."""
    options = {"retry": weclaw.RetryPolicy(max_crashes=0), "group": "workers"}
    letters = []
    q = module.Queue(path=path, on_dead=letters.append if given else None, **options)
    q.put_nowait("once in hand")
    with Child(take_of_group_then_die, path) as child:
        assert child.hear() == "once in hand"
        child.kill()
    with pytest.raises(threads.Empty):
        q.get_nowait()
    q.close()
    with weclaw.Queue(path, group="workers") as plain:
        [letter] = plain.dlq
        where = f"weclaw_embedded.Queue({str(path)!r}, group='workers').dlq"
        if given:
            assert ([one.id for one in letters], _warnings(caplog)) == ([letter.id], [])
        else:
            [told] = _warnings(caplog)
            assert f"item {letter.id} is a dead letter (consumer died)" in told
            assert where in told
            assert plain.dlq.redrive() == 1
            assert plain.get_nowait().body == "once in hand"


def take_of_group_then_die(pipe, path):
    from weclaw_embedded import threads

    q = threads.Queue(path=path, group="workers")
    pipe.send(q.get(timeout=20))
    time.sleep(60)

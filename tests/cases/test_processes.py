"""Several processes, several threads, several handles, one file."""

from __future__ import annotations

import os
import threading

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _durability, _files


def put_300(pipe, path, name):
    q = weclaw.Queue(path)
    pipe.send("ready")
    pipe.recv()
    for n in range(300):
        pipe.send(q.put([name, n]))
    q.close()


def test_case_21_two_processes_put_at_once(path, open_queue):
    """Case 21: two processes put 300 each at once: 600, once each, each in its order."""
    with Child(put_300, path, "left") as left, Child(put_300, path, "right") as right:
        for child in (left, right):
            assert child.hear() == "ready"
        for child in (left, right):
            child.say("go")
        ids = left.end() + right.end()
    assert len(set(ids)) == 600
    q = open_queue()
    bodies = drain(q)
    assert len(bodies) == 600
    for name in ("left", "right"):
        assert [b for b in bodies if b[0] == name] == [[name, n] for n in range(300)]


def eight_threads(pipe, path):
    q = weclaw.Queue(path)
    lock = threading.Lock()

    def work():
        while True:
            try:
                msg = q.get(timeout=1.0)
            except weclaw.Empty:
                return
            with lock:
                pipe.send((msg.body, msg.delivery_count))
            msg.ack()

    pipe.send("ready")
    pipe.recv()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    q.close()


def test_case_22_each_message_is_in_one_hand(path, open_queue):
    """Case 22: two processes of 8 threads share 1 000 messages: each is delivered once."""
    q = open_queue()
    q.put_many(list(range(1000)))
    with Child(eight_threads, path) as left, Child(eight_threads, path) as right:
        for child in (left, right):
            assert child.hear() == "ready"
        for child in (left, right):
            child.say("go")
        said = [left.end(), right.end()]
    assert all(said), "one process got everything"
    assert sorted(said[0] + said[1]) == [(n, 1) for n in range(1000)]
    assert q.stats()[:5] == (0, 0, 0, 0, 1000)


def test_case_23_twice_in_a_process_once_through_a_symlink(path, tmp_path):
    """Case 23: of two handles on one file, one through a symlink, closing one leaves the other."""
    link = tmp_path / "link.wq"
    link.symlink_to(path)
    direct = weclaw.Queue(path)
    linked = weclaw.Queue(link)
    direct.put("a")
    assert linked.qsize() == 1
    direct.close()
    linked.put("b")
    assert drain(linked) == ["a", "b"]
    again = weclaw.Queue(path)
    linked.close()
    again.put("c")
    assert drain(again) == ["c"]
    again.close()
    assert not (tmp_path / "link.wq.d").exists()


def fork_after_open(pipe, path, opened_how):
    q = weclaw.Queue(path)
    q.put("before")
    held = q.get()
    if opened_how == "waiting":
        # A thread of the parent waits in get while the fork happens.
        threading.Thread(target=lambda: pipe.send(("waiter", q.get(timeout=20).body))).start()
        time.sleep(0.1)  # noqa: F821
    pid = os.fork()
    if pid == 0:
        try:
            q.put("from the child")
            try:
                held.ack()
            except weclaw.LeaseLostError:
                os._exit(7)
            os._exit(1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    pipe.send(("child", code))
    assert q.status(held.id) == "leased"
    held.ack(result="mine")
    q.put("after")
    pipe.send(("parent", q.result(held.id)))
    pipe.recv()
    q.close()


def test_case_24_fork_after_open(path, open_queue):
    """Case 24: a forked child puts and exits: both are fine, the lease stays the parent's."""
    with Child(fork_after_open, path, "plain", env={"PYTHONWARNINGS": "ignore"}) as child:
        assert child.hear() == ("child", 7)
        assert child.hear() == ("parent", "mine")
        child.say("end")
        child.end()
    q = open_queue()
    assert drain(q) == ["from the child", "after"]


def test_case_24_fork_while_a_thread_waits(path, open_queue):
    """Case 24: the same while another thread of the parent waits in `get`."""
    with Child(fork_after_open, path, "waiting", env={"PYTHONWARNINGS": "ignore"}) as child:
        said = [child.hear() for _ in range(3)]
        assert sorted(said) == [
            ("child", 7),
            ("parent", "mine"),
            ("waiter", "from the child"),
        ]
        child.say("end")
        child.end()
    q = open_queue()
    # The waiter's lease was handed back at the parent's close; "after" is behind it.
    assert drain(q) == ["from the child", "after"]


def end_a_transaction_in_a_child(pipe, path):
    """The child ends what the parent began, and then the parent does."""
    q = weclaw.Queue(path)
    id = q.put("x")
    with q.transaction() as tx:
        tx.ack(q.get(), result="done")
        pid = os.fork()
        if pid == 0:
            try:
                tx.__exit__(None, None, None)
                pipe.send("acked")
            except weclaw.LeaseLostError as error:
                pipe.send(str(error))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        pipe.send(q.status(id))
    pipe.send(q.result(id))
    q.close()


def test_a_transaction_that_was_begun_before_a_fork_is_the_parents(path):
    """A child that ends it acks nothing: the leases are the parent's, who ends it as if alone."""
    with Child(end_a_transaction_in_a_child, path, env={"PYTHONWARNINGS": "ignore"}) as child:
        assert "held by the parent" in child.hear()
        assert child.hear() == "leased"
        assert child.hear() == "done"
        child.end()


def fail_in_a_child(pipe, path, consumer):
    """One is failed by a forked child, which dies of the next; the parent finds that dead."""
    import contextlib
    import socket

    q = weclaw.Queue(path, consumer=consumer, retry=weclaw.RetryPolicy(backoff=0.0, max_crashes=0))
    q.put_many(["failed", "killed"])
    pid = os.fork()
    if pid == 0:
        try:
            q.get().fail("in the child")
            q.get()
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    with contextlib.suppress(weclaw.Empty):
        q.get(block=False)
    names = [failure.consumer for letter in q.dlq for failure in letter.failures]
    pipe.send((f"{socket.gethostname()}:{pid}", names))
    q.close()


@pytest.mark.parametrize("consumer", [None, "given"])
def test_a_child_has_a_name_of_its_own(path, consumer):
    """What it fails, and what it dies of, is noted under its pid, unless a name was given."""
    with Child(fail_in_a_child, path, consumer, env={"PYTHONWARNINGS": "ignore"}) as child:
        name, names = child.hear()
        child.end()
    assert names == [consumer or name] * 2


def fork_many(pipe, path):
    q = weclaw.Queue(path)
    q.put("first")
    pids = []
    for n in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                for k in range(20):
                    q.put([n, k])
                q.get(block=False).ack()
                q.close()
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    q.put("last")
    pipe.send((codes, q.stats()[:5]))
    q.close()


def test_case_24_many_children_of_one_parent(path):
    """Case 24: eight forked children all put, take and acknowledge with what they inherited."""
    with Child(fork_many, path) as child:
        codes, stats = child.hear()
        child.end()
    assert codes == [0] * 8
    assert stats == (1 + 160 + 1 - 8, 0, 0, 0, 8)


def put_with_held_syncs(pipe, path):
    from weclaw_embedded import _files

    q = weclaw.Queue(path)
    q.put("first")
    sync = _files.sync_data

    def held(fd):
        pipe.send("syncing")
        pipe.recv()
        sync(fd)

    _files.sync_data = held
    q.put("second")
    q.put("third")
    _files.sync_data = sync
    pipe.send("done")
    q.close()


@pytest.fixture
def n_syncs(monkeypatch):
    """How many syncs this process makes; a list of one number."""
    found = [0]
    sync = _files.sync_data

    def counted(fd):
        found[0] += 1
        sync(fd)

    monkeypatch.setattr(_files, "sync_data", counted)
    return found


def test_an_ack_is_answered_by_the_next_sync_of_another_process(
    path, open_queue, monkeypatch, n_syncs
):
    """Not by the one that is under way when it is written, which may not have it; and it makes none
    of its own.
    """
    q = open_queue()
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.01)  # so that there is a pipe to be woken by
    with Child(put_with_held_syncs, path) as child:
        assert child.hear() == "syncing"
        msg = q.get()
        monkeypatch.setattr(_durability, "_SHARED_S", 60.0)
        n_syncs[0] = 0
        acking = threading.Thread(target=msg.ack)
        acking.start()
        assert eventually(lambda: q.status(msg.id) == "done")
        child.say("go on")
        assert child.hear() == "syncing"
        assert acking.is_alive()
        child.say("go on")
        assert child.hear() == "done"
        acking.join(60.0)
        assert not acking.is_alive()
        assert n_syncs == [0]
        child.end()
    assert drain(q) == ["second", "third"]


def test_an_ack_waits_for_no_sync_of_another_process_that_does_not_come(path, open_queue, n_syncs):
    """It makes its own, and so does the next one, while the other process hangs in its sync."""
    q = open_queue()
    q.put_many(["a", "b"])
    with pytest.raises(weclaw.Empty):
        open_queue(topic="another").get(timeout=0.01)
    with Child(put_with_held_syncs, path) as child:
        assert child.hear() == "syncing"
        n_syncs[0] = 0
        for n in (1, 2):
            q.get().ack()
            assert n_syncs == [n]
        child.kill()
    assert drain(q)[0] == "first"

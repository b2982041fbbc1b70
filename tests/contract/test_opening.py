"""Contract 2: opening, options, what is shared and what is refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import stat
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import disk_bytes, drain, scratch, take

import weclaw_embedded as weclaw


def test_a_new_queue_is_one_small_private_file(path, open_queue):
    """A fresh queue is a file of mode 0600 and its scratch, together under 4 MB."""
    before = os.umask(0)
    try:
        q = open_queue()
    finally:
        os.umask(before)
    q.put("x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {x.name for x in path.parent.iterdir()} <= {"tasks.wq", "tasks.wq.d"}
    beside = list(scratch(path).rglob("*"))
    for file in [scratch(path), *beside]:
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    assert disk_bytes(path) + sum(disk_bytes(x) for x in beside) < 4_000_000


def test_who_only_looks_writes_nothing_to_the_file(path):
    """Opening, asking and closing leave the file as it was, byte for byte, however often."""
    with weclaw.Queue(path) as q:
        q.put("x")
    content = path.read_bytes()
    for _ in range(3):
        with weclaw.Queue(path) as q:
            assert q.qsize() == 1
            assert q.peek(1)[0].body == "x"
    assert path.read_bytes() == content
    with weclaw.Queue(path) as q:
        assert take(q)[0].body == "x"
    assert path.read_bytes() != content


@pytest.mark.parametrize("scratch_there", [True, False])
def test_what_lies_beside_takes_the_files_mode_and_owner(path, open_queue, scratch_there):
    """What lies beside a file takes its mode and owner, also when they change."""
    open_queue().close()
    os.chmod(path, 0o660)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    if not scratch_there:
        shutil.rmtree(scratch(path))
    open_queue().put("x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    for file in scratch(path).rglob("*"):
        wanted = 0o070 if file.is_dir() else 0o060
        assert stat.S_IMODE(file.stat().st_mode) & 0o070 == wanted, file
        if os.geteuid() == 0:
            assert (file.stat().st_uid, file.stat().st_gid) == (12345, 23456), file
    assert stat.S_IMODE(scratch(path).stat().st_mode) == 0o770


def test_path_may_be_text_or_path_and_relative(tmp_path, monkeypatch):
    """A path is text or an `os.PathLike`, and stays the same when the directory changes."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with weclaw.Queue("größe und so.wq") as q:
        q.put("a")
        monkeypatch.chdir(tmp_path / "elsewhere")
        q.put("b")
        q.flush()
    with weclaw.Queue(tmp_path / "größe und so.wq") as q:
        assert drain(q) == ["a", "b"]


def test_an_empty_file_counts_as_new(path, open_queue):
    """An empty file becomes a queue."""
    path.touch()
    q = open_queue()
    q.put("x")
    assert drain(q) == ["x"]


@pytest.mark.parametrize(
    "content",
    [b"x", b"hello, I am a text\n" * 1000, b"\x89PNG\r\n\x1a\n" + bytes(9000), bytes(100_000)],
    ids=["one byte", "text", "png", "zeros"],
)
def test_a_file_that_is_not_ours_is_left_alone(path, content):
    """A file that is not a queue: `NotAQueueError`, nothing touched."""
    path.write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(weclaw.NotAQueueError, match=r"tasks\.wq"):
            weclaw.Queue(path, readonly=readonly)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_newer_format_is_left_alone(path):
    """A newer version is `FormatVersionError` before any checksum is looked at."""
    weclaw.Queue(path).close()
    shutil.rmtree(scratch(path))
    content = bytearray(path.read_bytes())
    assert int.from_bytes(content[16:20], "little") == 1, "docs/format.md says otherwise"
    content[16:20] = (2).to_bytes(4, "little")
    content[40] ^= 0xFF
    path.write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(weclaw.FormatVersionError, match="2"):
            weclaw.Queue(path, readonly=readonly)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_readonly_makes_no_file(path):
    """`readonly` of what is not there raises, and makes no file."""
    with pytest.raises((weclaw.StorageError, FileNotFoundError)):
        weclaw.Queue(path, readonly=True)
    assert list(path.parent.iterdir()) == []


def test_readonly_refuses_every_change(path, open_queue, open_store):
    """Every change through a read-only handle is `StorageError`, and looking works."""
    q = open_queue()
    ids = q.put_many(["a", "b", "c"])
    q.get().ack(result=1)
    q.get().fail("bad")
    q.close()
    before = path.read_bytes()
    store = open_store(readonly=True)
    q = store.queue()
    changes = [
        lambda: q.put("x"),
        lambda: q.put_nowait("x"),
        lambda: q.put_many(["x"]),
        lambda: q.get(block=False),
        lambda: q.get_many(3, block=False),
        lambda: q.cancel(ids[2]),
        lambda: q.purge(),
        lambda: q.pause(10),
        lambda: q.resume(),
        lambda: q.replay(offset="earliest"),
        lambda: q.dlq.redrive(),
        lambda: q.dlq.purge(),
        lambda: store.drop_group("default"),
        lambda: store.repair(),
    ]
    for change in changes:
        with pytest.raises(weclaw.StorageError):
            change()
    assert [q.status(x) for x in ids] == ["done", "dead", "ready"]
    assert q.result(ids[0]) == 1
    assert [m.body for m in q.peek(10)] == ["c"]
    assert len(q.dlq) == 1
    assert store.verify() == []
    assert [g[:2] for g in store.groups()] == [("default", "default")]
    store.close()
    assert path.read_bytes() == before


def test_the_file_remembers_its_options(path, open_queue):
    """What belongs to the file is recorded when given and inherited when left out."""
    open_queue(max_message_bytes=1000, codec="raw").close()
    q = open_queue(codec="raw")
    q.put(bytes(1000))
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put(bytes(1001))
    q.close()
    q = open_queue(max_message_bytes=2000, codec="raw")
    q.put(bytes(2000))
    q.close()
    q = open_queue(codec="raw")
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put(bytes(2001))


def test_options_survive_the_loss_of_the_scratch(path, open_queue):
    """What is recorded is in the file, not beside it."""
    open_queue(max_message_bytes=1000, max_bytes=200_000_000).close()
    shutil.rmtree(scratch(path))
    with pytest.raises(weclaw.MessageTooLargeError):
        open_queue(codec="raw").put(bytes(1001))


@pytest.mark.parametrize("size", [0, 1, 65535, 32768, 3 * 65536, -65536, 2**20 + 1])
def test_segment_bytes_is_a_power_of_two_from_64_kib(path, size):
    """Any other `segment_bytes` is `ValueError`, and no file is made."""
    with pytest.raises(ValueError, match="segment_bytes"):
        weclaw.Queue(path, segment_bytes=size)
    assert list(path.parent.iterdir()) == []


def test_segment_bytes_is_the_files(path, open_queue):
    """Another `segment_bytes` than the file's is `ValueError`."""
    open_queue(segment_bytes=65536).close()
    with pytest.raises(ValueError, match="segment_bytes"):
        open_queue(segment_bytes=2**20)
    open_queue(segment_bytes=65536).close()
    q = open_queue()
    q.put("x" * 200_000)
    assert drain(q) == ["x" * 200_000]


BAD_OPTIONS = [
    {"flush": "sometimes"},
    {"flush": None},
    {"flush_interval_ms": -5},
    {"retention": -1},
    {"retention": float("nan")},
    {"retention": "for ever"},
    {"retention_bytes": -1},
    {"max_bytes": -1},
    {"max_message_bytes": 0},
    {"max_message_bytes": "16 MB"},
    {"codec": "xml"},
    {"codec": 5},
    {"replica_timeout": -1},
    {"maxsize": 1.5},
    {"visibility_timeout": -1},
    {"visibility_timeout": float("nan")},
    {"visibility_timeout": "60"},
    {"retry": 3},
    {"start": "middle"},
    {"on_dead": "not callable"},
    {"topic": 5},
    {"group": None},
    {"no_such_option": 1},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_arguments_make_no_file(path, options):
    """A bad argument is `ValueError` or `TypeError`, and no file is made."""
    with pytest.raises((ValueError, TypeError)):
        weclaw.Queue(path, **options)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"backoff": -1.0},
        {"backoff": float("nan")},
        {"multiplier": -1.0},
        {"max_backoff": -1.0},
        {"jitter": 2.0},
        {"jitter": -0.1},
        {"max_crashes": -1},
        {"max_retries": "3"},
    ],
    ids=str,
)
def test_a_retry_policy_that_makes_no_sense_is_refused(options):
    """A `RetryPolicy` says at once what is wrong with it."""
    with pytest.raises((ValueError, TypeError)):
        weclaw.RetryPolicy(**options)


def test_the_default_retry_policy():
    """`RetryPolicy()` is as the contract writes it."""
    policy = weclaw.RetryPolicy()
    assert (policy.max_retries, policy.backoff, policy.multiplier) == (3, 5.0, 2.0)
    assert (policy.max_backoff, policy.jitter, policy.max_crashes) == (60.0, 0.0, 3)
    assert policy == weclaw.RetryPolicy(max_retries=3)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("retention", 100, 200),
        ("retention_bytes", 2**20, 2**21),
        ("max_bytes", 2**24, 2**25),
        ("max_message_bytes", 1000, 2000),
        ("segment_bytes", 2**16, 2**20),
    ],
)
def test_handles_of_a_process_may_not_disagree(path, open_store, name, one, other):
    """Two handles of a process with different values for the file: `ValueError` naming it."""
    store = open_store(**{name: one})
    with pytest.raises(ValueError, match=name):
        open_store(**{name: other})
    open_store(**{name: one}).queue().put("x")
    assert drain(open_store().queue()) == ["x"]
    store.queue().put("y")


def test_handles_may_differ_in_what_belongs_to_the_handle(open_queue):
    """Flush, retry, lease and codec are each handle's own."""
    one = open_queue(flush="sync", codec="json", visibility_timeout=1.0)
    two = open_queue(flush="os", codec="msgpack", visibility_timeout=None)
    one.put("a")
    two.put("b")
    assert drain(one) == ["a", "b"]


def test_env_values_do_not_conflict(path, open_queue, monkeypatch):
    """Only arguments conflict: the environment of the second handle gives way."""
    q = open_queue(retention=100)
    monkeypatch.setenv("WECLAW_RETENTION", "200")
    open_queue().put("x")
    assert drain(q) == ["x"]


def dies_after(q):
    """How many failed deliveries make a message dead with this handle."""
    q.put("x")
    for n in range(1, 20):
        q.get(timeout=5.0).nack(backoff=0)
        if q.stats().dead:
            q.dlq.purge()
            return n
    raise AssertionError


@pytest.mark.parametrize("prefix", ["WECLAW_", "WEBCLAW_"])
def test_the_environment_speaks_for_what_was_left_out(open_queue, monkeypatch, prefix):
    """Both spellings are read, arguments go before them, and defaults come after."""
    assert dies_after(open_queue()) == 4
    monkeypatch.setenv(prefix + "MAX_RETRIES", "1")
    assert dies_after(open_queue()) == 2
    assert dies_after(open_queue(retry=weclaw.RetryPolicy(max_retries=0))) == 1


def test_weclaw_wins_over_webclaw(open_queue, monkeypatch):
    """Of both spellings `WECLAW_` wins."""
    monkeypatch.setenv("WEBCLAW_MAX_RETRIES", "5")
    monkeypatch.setenv("WECLAW_MAX_RETRIES", "1")
    assert dies_after(open_queue()) == 2


@pytest.mark.parametrize(
    ("value", "least"), [("300ms", 0.3), ("0.3s", 0.3), ("0.3", 0.3), ("0", 0.0)]
)
def test_durations_in_the_environment(open_queue, monkeypatch, value, least):
    """Durations read as `5s`, `500ms`, or plain seconds."""
    import time

    monkeypatch.setenv("WECLAW_RETRY_BACKOFF", value)
    q = open_queue()
    q.put("x")
    begun = time.monotonic()
    q.get().nack()
    q.get(timeout=30.0).ack()  # as milliseconds were seconds: 300 s
    assert time.monotonic() - begun >= least - 0.01


GOOD_ENVIRONMENT = [
    ("FLUSH_MODE", "batch"),
    ("FLUSH_MODE", "os"),
    ("FLUSH_INTERVAL_MS", "250"),
    ("FLUSH_INTERVAL_MS", "1s"),
    ("FLUSH_INTERVAL_MS", "500ms"),
    ("FLUSH_MESSAGES", "10"),
    ("SYNC_REPLICA", "off"),
    ("SYNC_REPLICA", "yes"),
    ("MAX_RETRIES", "0"),
    ("RETRY_BACKOFF_MAX", "2s"),
    ("RETRY_BACKOFF_MULTIPLIER", "1.5"),
    ("RETENTION", "48h"),
    ("RETENTION", "3600"),
    ("RETENTION", "0"),
]


@pytest.mark.parametrize(("name", "value"), GOOD_ENVIRONMENT)
def test_good_values_in_the_environment(open_queue, monkeypatch, name, value):
    """What the contract says is read, is read."""
    monkeypatch.setenv("WECLAW_" + name, value)
    q = open_queue()
    q.put("x")
    assert drain(q) == ["x"]


BAD_ENVIRONMENT = [
    ("FLUSH_MODE", "sometimes"),
    ("FLUSH_MODE", "SYNC please"),
    ("FLUSH_INTERVAL_MS", "soon"),
    ("FLUSH_INTERVAL_MS", "-1"),
    ("FLUSH_MESSAGES", "many"),
    ("SYNC_REPLICA", "perhaps"),
    ("MAX_RETRIES", "-1"),
    ("MAX_RETRIES", "three"),
    ("MAX_RETRIES", "1.5"),
    ("RETRY_BACKOFF", "-5s"),
    ("RETRY_BACKOFF", "nan"),
    ("RETRY_BACKOFF_MAX", "5 parsecs"),
    ("RETRY_BACKOFF_MULTIPLIER", "x"),
    ("RETENTION", "48x"),
    ("RETENTION", "-1"),
]


@pytest.mark.parametrize("prefix", ["WECLAW_", "WEBCLAW_"])
@pytest.mark.parametrize(("name", "value"), BAD_ENVIRONMENT)
def test_bad_values_in_the_environment(path, monkeypatch, prefix, name, value):
    """A value that makes no sense is a `ValueError` with the name as spelled; no file is made."""
    monkeypatch.setenv(prefix + name, value)
    with pytest.raises(ValueError, match=r"\b" + prefix + name + r"\b"):
        weclaw.Queue(path)
    assert list(path.parent.iterdir()) == []


def test_closing_a_store_closes_its_queues(path):
    """Closing a store closes its queues; closing one of these leaves the others."""
    store = weclaw.open(path)
    one, two = store.queue("one"), store.queue("two")
    one.close()
    two.put("x")
    with pytest.raises(weclaw.ClosedError):
        one.put("x")
    store.close()
    for use in (
        lambda: two.put("x"),
        lambda: two.get(block=False),
        lambda: two.qsize(),
        lambda: two.stats(),
        lambda: store.queue("three"),
        lambda: store.groups(),
        lambda: store.flush(),
    ):
        with pytest.raises(weclaw.ClosedError):
            use()


def test_closing_one_of_two_handles(path):
    """Two handles on one file share a store, and each lives until it is closed itself."""
    one, two = weclaw.open(path), weclaw.open(path)
    q1, q2 = one.queue(), two.queue()
    one.close()
    q2.put("x")
    with pytest.raises(weclaw.ClosedError):
        q1.put("x")
    assert drain(q2) == ["x"]
    two.close()


def test_closing_twice_is_once(path):
    """`close()` may be called again."""
    q = weclaw.Queue(path)
    q.close()
    q.close()
    store = weclaw.open(path)
    with store, store.queue() as q:
        q.put("x")
    store.close()
    q.close()


def test_close_hands_leases_back_uncounted(path, open_queue):
    """What is held at `close()` is ready again at once, and no failure."""
    q = weclaw.Queue(path, visibility_timeout=None)
    task = q.put("x")
    held = q.get()
    q.close()
    q = open_queue()
    assert q.status(task) == "ready"
    msg = q.get(block=False)
    assert (msg.delivery_count, msg.retry_count, msg.crash_count) == (2, 0, 0)
    with pytest.raises((weclaw.LeaseLostError, weclaw.ClosedError)):
        held.ack()
    msg.ack()


def end_without_closing(pipe, path, how):
    q = weclaw.Queue(path, flush="batch", visibility_timeout=None)
    pipe.send(q.put("x"))
    q.get()
    if how == "exception":
        raise RuntimeError("expected by the test")
    if how == "exit":
        sys.exit(3)
    globals()["kept"] = q


@pytest.mark.parametrize("how", ["return", "exit", "exception"])
def test_a_normal_end_of_the_interpreter_hands_back_too(path, open_queue, how):
    """A process that ends normally without closing hands its leases back uncounted."""
    import subprocess

    with Child(end_without_closing, path, how, stderr=subprocess.DEVNULL) as child:
        task = child.hear()
        child.wait()
    q = open_queue()
    assert q.status(task) == "ready"
    msg = q.get(block=False)
    assert (msg.id, msg.delivery_count, msg.crash_count) == (task, 2, 0)


STARTED_PROCESSES = """
import concurrent.futures, multiprocessing, sys, threading, time
import weclaw_embedded as weclaw

def takes(q):
    assert q.get(timeout=10)

def opens(path):
    globals()["kept"] = weclaw.Queue(path)
    takes(kept)

def in_a_thread(q):
    def work():
        msg = q.get(timeout=10)
        time.sleep(0.2)
        msg.extend()
    threading.Thread(target=work).start()

def in_a_pool(q):
    globals()["pool"] = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(takes, q)

if __name__ == "__main__":
    start, path = sys.argv[1:]
    context = multiprocessing.get_context(start)
    q = weclaw.Queue(path)
    q.put("x")
    for work in (takes, opens, in_a_thread, in_a_pool):
        child = context.Process(target=work, args=(path if work is opens else q,))
        child.start()
        child.join()
        msg = q.get(block=False)
        print(child.exitcode, msg.crash_count)
        msg.release()
    q.close()
"""


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_so_does_a_normal_end_of_a_process_of_multiprocessing(path, tmp_path, start):
    """However multiprocessing started it, and though threads hold the leases."""
    import subprocess

    script = tmp_path / "started.py"
    script.write_text(STARTED_PROCESSES)
    done = subprocess.run(
        [sys.executable, str(script), start, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split("\n") == ["0 0"] * 4 + [""], done.stderr


def test_dropped_open_it_warns(path):
    """A queue or store dropped open is a `ResourceWarning`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = weclaw.Queue(path)
        q.put("x")
        del q
        gc.collect()
    assert any(issubclass(w.category, ResourceWarning) for w in caught)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = weclaw.open(path)
        del store
        gc.collect()
    assert any(issubclass(w.category, ResourceWarning) for w in caught)
    with weclaw.Queue(path) as q:
        assert drain(q) == ["x"]


def test_closed_it_does_not_warn(path):
    """Closed properly, nothing warns and nothing is left open."""
    fds = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            with weclaw.Queue(path) as q:
                q.put("x")
                q.get().ack()
        del q
        gc.collect()
    assert [w for w in caught if issubclass(w.category, ResourceWarning)] == []
    if fds is not None:
        assert len(os.listdir("/proc/self/fd")) <= fds + 1


def test_flush_is_there_on_both(path):
    """`flush()` on store and queue returns when all written so far is on stable storage."""
    with weclaw.open(path, flush="os") as store:
        q = store.queue()
        q.put("x")
        assert q.flush() is None
        assert store.flush() is None


@pytest.mark.parametrize("flush", ["sync", "batch", "os"])
def test_all_flush_policies_survive_kill(path, open_queue, flush):
    """What put returned for survives kill -9 under every policy."""
    with Child(put_and_hold_on, path, flush) as child:
        ids = child.hear()
        child.kill()
    q = open_queue()
    assert [m.id for m in take(q)] == ids


def put_and_hold_on(pipe, path, flush):
    q = weclaw.Queue(path, flush=flush)
    ids = [q.put(n) for n in range(50)]
    ids += q.put_many(list(range(50)))
    pipe.send(ids)
    pipe.recv()


def test_a_queue_pickles_as_path_and_options(path, open_queue):
    """A `Queue` pickles; what comes out is the same queue with the same options."""
    q = open_queue("jobs", group="g", maxsize=3, codec="raw", visibility_timeout=None)
    q.put(b"x")
    other = pickle.loads(pickle.dumps(q))
    try:
        assert other.maxsize == 3
        other.put(b"y")
        with pytest.raises(weclaw.SerializationError):
            other.put("text under codec raw")
        assert [m.body for m in take(q)] == [b"x", b"y"]
    finally:
        other.close()


def _in_a_pool(q):
    msg = q.get(timeout=10)
    msg.ack(result=os.getpid())
    return msg.body


def test_a_queue_goes_to_spawned_processes(path, open_queue):
    """A `Queue` can be handed to a process pool that spawns."""
    q = open_queue()
    ids = q.put_many(list(range(6)))
    import tests.contract.test_opening as myself  # The pool imports this module by its name.

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sorted(pool.map(myself._in_a_pool, [q] * 6)) == list(range(6))
        pool.close()
        pool.join()
    assert all(q.result(task) != os.getpid() for task in ids)


def open_close(pipe, path, n):
    for _ in range(n):
        with weclaw.Queue(path) as q:
            q.put("x")
    pipe.send("done")


def test_opening_and_closing_at_the_same_time(path, open_queue):
    """Processes that open and close all the time do not get in each other's way."""
    children = [Child(open_close, path, 40) for _ in range(3)]
    try:
        for child in children:
            child.end()
    finally:
        for child in children:
            child.close()
    assert open_queue().qsize() == 120


def reopen_in_two_threads(q, report):
    opened = q._store._open

    def slowly():
        time.sleep(0.2)  # the other thread comes meanwhile
        return opened()

    q._store._open = slowly
    threads = [threading.Thread(target=q.qsize) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(report, bytes([q._engine.handles]))


def test_threads_of_a_child_reopen_a_queue_once(path, open_queue):
    """However many come first at once, one handle is counted, so that its end is the file's."""
    q = open_queue()
    hear, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            reopen_in_two_threads(q, report)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(report)
    assert os.read(hear, 10) == bytes([1])
    os.close(hear)


def open_with_few_descriptors(pipe, path):
    weclaw.Queue(path).close()
    spent = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # noqa: F821
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, limit[1]))  # noqa: F821
    told = []
    for free in range(40):
        try:
            while True:
                spent.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(free):
            os.close(spent.pop())
        try:
            q = weclaw.Queue(path)
            q.put("x")
            q.close()
            told.append(None)
        except weclaw.WeclawError as error:
            told.append((type(error).__name__, str(error)))
        while spent:
            os.close(spent.pop())
        if told[-1] is None:
            break
    pipe.send(told)


def test_who_has_no_descriptors_left_is_told_so_wherever_the_opening_was(path):
    """It is no word of the disk, and opening goes on as soon as there are enough again."""
    with Child(open_with_few_descriptors, path) as child:
        *refused, opened = child.hear()
    assert opened is None
    assert len(refused) > 5
    for kind, message in refused:
        assert kind == "StorageError", message
        assert "Too many open files" in message
    with weclaw.Queue(path) as q:
        assert q.get(block=False).body == "x"

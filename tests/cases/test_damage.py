"""Files that were cut, flipped, mutated, half made; scratch folders that went missing or bad."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, drain, scratch

import weclaw_embedded as weclaw

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")  # LMDB's, too


def put_bodies(pipe, path, bodies, close):
    q = weclaw.Queue(path)
    pipe.send([q.put(body) for body in bodies])
    if close:
        q.close()
        return
    pipe.recv()


def bodies_of(n, size=120, seed=0):
    """Bodies that stand in the file as they are and nowhere else."""
    rng = random.Random(seed)
    return [f"{k:06d}".encode() + rng.randbytes(size) for k in range(n)]


def make_image(path, bodies, *, close):
    """A file with `bodies` put one by one; its writer was killed, or closed it."""
    with Child(put_bodies, path, bodies, close) as child:
        child.hear()
        if close:
            child.end()
        else:
            child.kill()


def data_end(path: Path, last: bytes) -> int:
    """Where the last message's record ends: its body is the end of it."""
    return path.read_bytes().rindex(last) + len(last)


def usable_after_all(path, expected):
    """What comes out is `expected`; three more puts survive the next reopen too."""
    q = weclaw.Queue(path, retry=NO_WAIT)
    try:
        assert drain(q) == expected
        more = [b"more 1", b"more 2", b"more 3"]
        for body in more:
            q.put(body)
    finally:
        q.close()
    for expected in (more, []):
        q = weclaw.Queue(path)
        try:
            assert drain(q) == expected
            assert q.stats()[:4] == (0, 0, 0, 0)
        finally:
            q.close()


BODIES = bodies_of(8)


@pytest.fixture(scope="module")
def killed_image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "tasks.wq"
    make_image(path, BODIES, close=False)
    return path


@pytest.mark.parametrize("cut", [*range(1, 65)])
def test_case_13_cut_at_the_end_of_the_file(killed_image, path, cut):
    """Case 13: with 1 to 64 bytes of its end gone the file opens, and all records are there."""
    shutil.copy(killed_image, path)
    os.truncate(path, path.stat().st_size - cut)
    usable_after_all(path, BODIES)


@pytest.mark.parametrize("cut", [*range(1, 65)])
def test_case_13_cut_into_the_last_record(killed_image, path, cut):
    """Case 13: with 1 to 64 bytes of its last record gone it alone is missing."""
    shutil.copy(killed_image, path)
    os.truncate(path, data_end(path, BODIES[-1]) - cut)
    usable_after_all(path, BODIES[:-1])


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("cut", [1, 7, 24, 33, 64])
def test_case_13_cut_in_place_with_its_scratch_beside_it(path, cut, close):
    """Case 13: the same where the scratch folder still describes the uncut file."""
    make_image(path, BODIES, close=close)
    size = path.stat().st_size
    os.truncate(path, data_end(path, BODIES[-1]) - cut)
    os.truncate(path, size)
    q = weclaw.Queue(path)
    got = drain(q)
    q.close()
    assert got == BODIES[:-1]
    usable_after_all(path, [])


def test_case_13_zeros_at_the_end(killed_image, path):
    """Case 13: 4 KB of zeros appended change nothing."""
    shutil.copy(killed_image, path)
    with open(path, "ab") as file:
        file.write(bytes(4096))
    usable_after_all(path, BODIES)


def test_case_13_a_torn_tail_is_reported_once(killed_image, path, caplog):
    """Case 13: a torn tail is cut and told of at the first open, not at the second."""
    shutil.copy(killed_image, path)
    os.truncate(path, data_end(path, BODIES[-1]) - 5)
    with caplog.at_level("INFO", logger="weclaw_embedded"):
        weclaw.Queue(path).close()
        assert [r for r in caplog.records if r.name.startswith("weclaw_embedded")]
        caplog.clear()
        q = weclaw.Queue(path)
        assert q.stats().damaged == 0
        q.close()
        assert not caplog.records


@pytest.mark.parametrize("what", ["copied", "in place", "in place, closed", "scratch deleted"])
def test_case_14_one_byte_flipped_hits_one_message(path, tmp_path, what):
    """Case 14: all but what the flip hit comes; it is reported with its offset."""
    bodies = bodies_of(30, 200, seed=14)
    make_image(path, bodies, close=what == "in place, closed")
    if what == "copied":
        shutil.copy(path, tmp_path / "copy.wq")
        path = tmp_path / "copy.wq"
    if what == "scratch deleted":
        shutil.rmtree(scratch(path))
    at = path.read_bytes().index(bodies[15]) + 100
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    q = weclaw.Queue(path)
    try:
        got, offsets = [], []
        while True:
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                break
            got.append(msg.body)
            offsets.append(msg.offset)
            msg.ack()
        assert got == bodies[:15] + bodies[16:]
        assert q.stats().damaged >= 1
    finally:
        q.close()
    with weclaw.open(path) as store:
        damage = store.verify()
    assert len(damage) >= 1
    assert all(offsets[14] < offset < offsets[15] and reason for offset, reason in damage)
    usable_after_all(path, [])


def open_and_use(pipe):
    """Open each file it is told of, use it, and say how it went and how long opening took."""
    q = None
    while True:
        path = pipe.recv()
        if path is None:
            return
        begun = time.monotonic()
        opened = None
        try:
            q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0))
            opened = time.monotonic() - begun
            for _ in range(200):
                msg = q.get(block=False)
                try:
                    msg.body
                except weclaw.SerializationError:
                    pass
                msg.ack()
            how = "full of messages"
        except weclaw.Empty:
            how = "works"
        except weclaw.WeclawError as error:
            how = type(error).__name__
        # weclaw: anything else ends this child, which is the failure.
        opened = time.monotonic() - begun if opened is None else opened
        if how == "works":
            q.put("still here")
            assert q.get(block=False).body == "still here"
            q.stats()
        if q is not None:
            q.close()
            q = None
        pipe.send((how, opened))


def mutate(data: bytearray, rng: random.Random, interesting: int) -> str:
    """One of the ways in which files go bad; `interesting` is where the data ends."""
    kind = rng.choice(["flip", "flips", "zero", "noise", "copy", "cut", "grow", "word", "word"])

    def place():
        return rng.randrange(len(data) if rng.random() < 0.2 else min(interesting, len(data)))

    if kind == "flip":
        data[place()] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for _ in range(rng.randrange(2, 200)):
            data[place()] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        at, n = place(), rng.choice([1, 16, 512, 4096])
        data[at : at + n] = bytes(len(data[at : at + n]))
    elif kind == "noise":
        at, n = place(), rng.choice([4, 64, 512, 4096, 70_000])
        data[at : at + n] = rng.randbytes(len(data[at : at + n]))
    elif kind == "copy":
        source, target, n = place(), place(), rng.choice([8, 64, 512, 4096, 66_000])
        piece = bytes(data[source : source + n])
        data[target : target + len(piece)] = piece
    elif kind == "cut":
        del data[max(1, place()) :]
    elif kind == "grow":
        data += rng.randbytes(rng.randrange(1, 5000))
    else:  # A word that means much: a length, a count, an offset.
        at = place()
        word = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFF00, rng.randrange(2**32)])
        data[at : at + 4] = word.to_bytes(4, "little")
    return kind


def varied_work(pipe, path):
    """A file that has seen everything: several segments, big frames, acks, letters, groups."""
    store = weclaw.open(path, segment_bytes=65536, flush="os", retention=0)
    q = store.queue(retry=weclaw.RetryPolicy(max_retries=0))
    for n in range(40):
        q.put({"n": n}, priority=n % 3, key=["a", "b", None][n % 3])
    q.put_many([f"many {n}" for n in range(30)])
    q.put(bytes(150_000))
    q.put("later", delay=3600, id="mine", headers={"h": 1})
    for n in range(30):
        msg = q.get(block=False)
        if n % 5 == 0:
            msg.nack(reason="bad")
        else:
            msg.ack(result=n)
    other = store.queue("other", group="g", start="earliest")
    other.put("x", ttl=100)
    other.pause(3600)
    store.flush()
    pipe.send("ready")
    pipe.recv()


@pytest.mark.parametrize("seed", range(6))
def test_case_15_mutated_files_open_or_raise_typed_errors(tmp_path, seed):
    """Case 15: each of 300 mutated files opens within 5 s and works or raises a typed error."""
    rng = random.Random(f"mutations {seed}")
    image = tmp_path / "image.wq"
    with Child(varied_work, image) as child:
        child.hear()
        child.kill()
    good = image.read_bytes()
    end = len(good.rstrip(b"\0"))
    outcomes = {}
    child = Child(open_and_use)
    try:
        for turn in range(50):
            data = bytearray(good)
            kinds = [mutate(data, rng, end) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
            path = tmp_path / f"{turn}.wq"
            path.write_bytes(data)
            child.say(path)
            how, took = child.hear(timeout=20.0)
            assert took < 5.0, f"mutation {turn} ({kinds}) took {took:.1f} s to open"
            outcomes[how] = outcomes.get(how, 0) + 1
            path.unlink()
            shutil.rmtree(scratch(path), ignore_errors=True)
    finally:
        child.close()
    assert outcomes.get("works", 0) > 10, outcomes


def open_again_and_again(pipe, image, directory):
    """Open fresh copies of a bad file until Ctrl-C comes."""
    with open(image, "rb") as file:
        data = file.read()
    pipe.send("begun")
    n = 0
    try:
        while True:
            n += 1
            path = os.path.join(directory, f"{n}.wq")
            with open(path, "wb") as file:
                file.write(data)
            try:
                weclaw.Queue(path).close()
            except weclaw.WeclawError:
                pass
            os.unlink(path)
    except KeyboardInterrupt:
        pipe.send("interrupted")


def test_case_15_ctrl_c_works_while_a_bad_file_is_opened(tmp_path):
    """Case 15: Ctrl-C ends the opening of a bad file."""
    image = tmp_path / "image.wq"
    with Child(varied_work, image) as child:
        child.hear()
        child.kill()
    data = bytearray(image.read_bytes())
    rng = random.Random(15)
    for _ in range(100):
        data[rng.randrange(4200, len(data))] ^= 0xFF
    image.write_bytes(data)
    for turn in range(5):
        with Child(open_again_and_again, image, tmp_path) as child:
            child.hear()
            time.sleep(0.1 + 0.05 * turn)
            child.signal(signal.SIGINT)
            # It opens again and again: it hears nothing else that would end it.
            assert child.hear(timeout=20.0) == "interrupted"


def create_and_be_killed(pipe, directory, delays, what):
    """Fork a child for each delay; it makes a new queue and is killed `delay` seconds later."""
    for n, delay in enumerate(delays):
        path = os.path.join(directory, f"{n}.wq")
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            q = weclaw.Queue(path)
            if what == "put":
                q.put("first")
                os.write(tell, b"p")
                q.get().ack()
                os.write(tell, b"a")
            signal.pause()
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(tell)
        said = os.read(told, 2).decode()
        os.close(told)
        pipe.send((path, said))


@pytest.mark.parametrize("what", ["nothing", "put"])
def test_case_16_killed_while_creating(tmp_path, what):
    """Case 16: killed at any moment of its creation a queue opens, with what was promised."""
    rng = random.Random(16)
    delays = [rng.uniform(0.0, 0.02) for _ in range(40)]
    with Child(create_and_be_killed, tmp_path, delays, what) as child:
        images = child.end()
    assert len(images) == 40
    for path, said in images:
        q = weclaw.Queue(path, retry=NO_WAIT)
        try:
            bodies = drain(q)
            if said == "":
                assert bodies in ([], ["first"])
            elif said == "p":
                # The ack may have been written when the kill came, or not.
                assert bodies in ([], ["first"])
                assert q.stats().settled == 1
            else:
                assert bodies == []
            q.put("next")
            assert drain(q) == ["next"]
        finally:
            q.close()


def just_open(pipe, path):
    weclaw.Queue(path)
    pipe.send("open")
    pipe.recv()


def test_case_16_killed_while_empty(path):
    """Case 16: a queue that never held anything opens after kill -9."""
    with Child(just_open, path) as child:
        child.hear()
        child.kill()
    usable_after_all(path, [])


def drain_and_wait(pipe, path):
    q = weclaw.Queue(path)
    q.put_many(list("abc"))
    for _ in range(3):
        q.get().ack()
    pipe.send("drained")
    pipe.recv()


def test_case_16_killed_just_after_the_last_ack(path):
    """Case 16: killed just after the last ack it opens, and is empty."""
    with Child(drain_and_wait, path) as child:
        child.hear()
        child.kill()
    usable_after_all(path, [])


def first_half(pipe, path):
    store = weclaw.open(path, retention=3600)
    q = store.queue(retry=weclaw.RetryPolicy(max_retries=1, backoff=0.0))
    ids = [q.put(f"task {n}", priority=n % 2) for n in range(12)]
    q.get().ack(result="one")
    q.get().fail("broken")
    pipe.send(ids)
    store.close()


def second_half(pipe, path, close):
    store = weclaw.open(path)
    q = store.queue(retry=weclaw.RetryPolicy(max_retries=1, backoff=0.0), visibility_timeout=None)
    ids = [
        q.put("keyed 1", key="k", delay=3600),
        q.put("keyed 2", key="k"),
        q.put("with id", id="mine"),
        q.put("urgent", priority=9),
        q.put("cancelled"),
    ]
    assert q.cancel(ids[-1])
    q.get().ack(result={"two": 2})
    q.get().nack(backoff=3600, reason="later")
    q.get().nack(backoff=0)
    again = q.get()
    assert again.retry_count == 1
    again.nack(reason="twice")
    other = store.queue("elsewhere", group="g", start="earliest")
    other.put("x")
    other.pause(3600, reason="holiday")
    q.get()  # held at the end, by a process that dies
    pipe.send(ids)
    if close:
        store.close()
    else:
        pipe.recv()


def answers(path, ids):
    """Everything a user can ask, then everything drained."""
    store = weclaw.open(path)
    try:
        q = store.queue(retry=NO_WAIT)
        stats = q.stats()
        told = {
            "stats": stats[:5],
            "statuses": [q.status(task) for task in ids],
            "peek": [m.body for m in q.peek(100)],
            "offset": q.offset,
            "letters": [
                (x.id, x.body, x.reason, x.retry_count, x.delivery_count, len(x.failures))
                for x in q.dlq
            ],
            "groups": sorted(g[:2] for g in store.groups()),
            "results": [q.result(t) for t in ids if q.status(t) == "done"],
            "other": store.queue("elsewhere", group="g").stats()[:5],
        }
        with pytest.raises(weclaw.Empty):  # it is paused
            store.queue("elsewhere", group="g").get(block=False)
        drained = []
        while True:
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                break
            drained.append((msg.id, msg.body, msg.delivery_count, msg.retry_count, msg.crash_count))
            msg.ack()
        told["drained"] = drained
        told["same id"] = q.put("again", id="mine")
        told["after"] = q.stats()[:5]
        return told
    finally:
        store.close()


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_case_17_the_scratch_folder_does_not_matter(tmp_path, close):
    """Case 17: scratch deleted, from before, or random bytes: the same answers as with it."""
    rng = random.Random(17)
    told = {}
    for variant in (
        "as is",
        "deleted",
        "from before",
        "random bytes",
        "random bytes inside the index",
        "emptied",
        "copied file",
    ):
        directory = tmp_path / variant
        directory.mkdir()
        path = directory / "tasks.wq"
        with Child(first_half, path) as child:
            ids = child.hear()
            child.end()
        shutil.copytree(scratch(path), directory / "before", symlinks=True)
        with Child(second_half, path, close) as child:
            ids += child.hear()
            if close:
                child.end()
            else:
                child.kill()
        folder = scratch(path)
        if variant == "deleted":
            shutil.rmtree(folder)
        elif variant == "from before":
            shutil.rmtree(folder)
            (directory / "before").rename(folder)
        elif variant == "copied file":
            shutil.rmtree(folder)
            path.rename(directory / "old.wq")
            shutil.copy(directory / "old.wq", path)
        elif variant == "random bytes inside the index":
            with open(folder / "index" / "index.mdb", "r+b") as out:
                pages = out.seek(0, os.SEEK_END) - 2 * PAGE_BYTES
                out.seek(2 * PAGE_BYTES)  # the first two say that it is one
                out.write(rng.randbytes(pages))
        elif variant in ("random bytes", "emptied"):
            for file in folder.rglob("*"):
                if file.is_file():
                    size = file.stat().st_size if variant == "random bytes" else 0
                    # In place, sparse files not blown up past what a disk holds.
                    with open(file, "r+b") as out:
                        out.truncate(0)
                        out.write(rng.randbytes(min(size, 2**20)))
        told[variant] = answers(path, ids)
        # Ids made by the library differ from file to file: compare by place.
        names = {task: n for n, task in enumerate(ids)}
        answer = told[variant]
        answer["letters"] = [(names[x[0]], *x[1:]) for x in answer["letters"]]
        answer["drained"] = [(names[x[0]], *x[1:]) for x in answer["drained"]]
    assert told["as is"]["statuses"].count("dead") == 2
    assert len(told["as is"]["letters"]) == 2
    for variant, answer in told.items():
        assert answer == told["as is"], variant


def test_the_index_of_a_killed_process_is_gone_on_with(path, tmp_path):
    """An opening after kill -9 takes no longer than one after a close: nothing is folded anew."""
    with Child(first_half, path) as child:
        child.hear()
        child.end()
    with Child(second_half, path, False) as child:
        child.hear()
        child.kill()
    index = scratch(path) / "index" / "index.mdb"
    os.link(index, tmp_path / "kept")  # so that no other file gets its inode
    with weclaw.open(path) as store:
        store.queue().get().release()
    assert index.samefile(tmp_path / "kept")


def test_what_a_recovery_kept_is_missed_when_it_rots(path: Path, tmp_path: Path) -> None:
    """Also the last message, and before anything was written behind it: it is no torn end."""
    killed, recovered = tmp_path / "killed.wq", tmp_path / "recovered.wq"
    with weclaw.Queue(path) as q:
        q.put("first")
        q.put("last" * 10)
        shutil.copy(path, killed)
    with weclaw.open(killed):
        shutil.copy(killed, recovered)
    data = bytearray(recovered.read_bytes())
    data[data.rindex(b"lastlast")] ^= 1
    recovered.write_bytes(data)
    with weclaw.Queue(recovered) as q:
        assert q.store.verify()
        assert q.stats().damaged == 1
        assert q.get(block=False).body == "first"

"""Power fails at any moment: every state a disk may be left in keeps what was promised by then."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.crash import power, workload
from tests.crash.ledger import check

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _paths

pytestmark = pytest.mark.crash

SCRATCHES = ("as is", "missing")


def busy(worker: workload.Worker, steps: int) -> None:
    """Everything a worker can do, in random order."""
    worker.open()
    for _ in range(steps):
        chance = worker.rng.random()
        if chance < 0.30:
            worker.put()
        elif chance < 0.38:
            worker.put_many(worker.rng.choice((2, 3, 10)))
        elif chance < 0.42:
            worker.put(delay=0.005, key=None)
        elif chance < 0.60:
            worker.get(worker.rng.choice((1, 1, 3)), timeout=0.0)
        elif chance < 0.74:
            worker.ack()
        elif chance < 0.79:
            worker.nack()
        elif chance < 0.82:
            worker.fail()
        elif chance < 0.85:
            worker.release()
        elif chance < 0.91:
            worker.transaction()
        elif chance < 0.93:
            worker.cancel()
        elif chance < 0.95:
            worker.redrive()
        elif chance < 0.97:
            worker.flush()
        else:
            worker.reopen()
    worker.close()


def record(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: str,
    options: dict[str, Any],
    *,
    steps: int,
    workers: int = 1,
    snapshots: float = 0.2,
) -> power.Recorder:
    """Work on a file in `directory`, written down."""
    directory.mkdir()
    with monkeypatch.context() as patch:
        recorder = power.Recorder(directory, patch, seed)
        recorder.share_of_snapshots = snapshots
        path = str(directory / "tasks.wq")
        workload.fixed(recorder.say("fixed"), path, options, "fixed", seed)
        threads = [
            threading.Thread(
                target=busy,
                args=(
                    workload.Worker(recorder.say(name), path, options, name, f"{seed}/{name}"),
                    steps,
                ),
            )
            for name in (f"busy{n}" for n in range(workers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return recorder


def check_states(
    recorder: power.Recorder,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    seed: str,
    options: dict[str, Any],
    *,
    states: int,
    moments: list[int] | None = None,
    alone: bool = True,
) -> int:
    """Cut the power at moments of the history; hold each state against the ledger of then."""
    rng = random.Random(f"{seed} cuts")
    torn = 0
    snapped = sorted(recorder.snapshots)
    for n in range(states):
        scratch = SCRATCHES[n % 2]
        if moments is not None:
            k = moments[n % len(moments)]
        elif scratch == "as is" and snapped:
            k = rng.choice(snapped)
        else:
            k = rng.randrange(len(recorder.events) + 1)
        disk = power.Disk(recorder, k)
        torn += disk.unsynced() > 0
        place = directory / f"state {n}"
        power.put_in_place(disk.state(rng), recorder, k, scratch, place, rng)
        where = f"seed {seed}, power cut at event {k} of {len(recorder.events)}, state {n}"
        with power.next_boot(monkeypatch, rng):
            check(
                place / "tasks.wq",
                power.promised(recorder, k, options["flush"], alone=alone),
                options,
                f"{where}, scratch {scratch}",
            )
        shutil.rmtree(place)
    return torn


OPTIONS = [
    {"flush": "sync", "segment_bytes": 65536, "retention": 3600},
    {"flush": "sync", "segment_bytes": 65536, "retention": 0},
    {"flush": "batch", "flush_interval_ms": 20, "segment_bytes": 65536, "retention": 0},
    {"flush": "os", "segment_bytes": 65536, "retention": 3600},
]
NAMES = ["sync", "sync freeing", "batch freeing", "os"]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_after_a_power_cut_every_promise_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Unsynced sectors, sizes and names are lost at random: the ledger of that moment holds."""
    seed = f"ci {options['flush']} {options['retention']}"
    recorder = record(tmp_path / "disk", monkeypatch, seed, options, steps=60)
    torn = check_states(recorder, monkeypatch, tmp_path / "states", seed, options, states=10)
    assert torn > 0


def test_after_a_power_cut_the_promises_to_threads_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads share writes and syncs: what each was promised is there."""
    options = OPTIONS[1]
    recorder = record(
        tmp_path / "disk", monkeypatch, "threads", options, steps=40, workers=3, snapshots=0.05
    )
    check_states(
        recorder, monkeypatch, tmp_path / "states", "threads", options, states=10, alone=False
    )


def test_power_fails_while_a_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of making a file there is none, or a whole one, and nothing but that."""
    options = OPTIONS[0]
    recorder = record(tmp_path / "disk", monkeypatch, "making", options, steps=0, snapshots=1.0)
    first = next(
        n for n, event in enumerate(recorder.events) if event[0] == "said" and event[2] == "put"
    )
    moments = list(range(first + 1))
    check_states(
        recorder,
        monkeypatch,
        tmp_path / "states",
        "making",
        options,
        states=len(moments),
        moments=moments,
    )


@pytest.mark.parametrize("flush", ["batch", "os"])
def test_what_a_power_cut_takes_is_a_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    """Of unsynced puts the first so many are there, all that were flushed, and none in between."""
    directory = tmp_path / "disk"
    directory.mkdir()
    rng = random.Random(f"suffix {flush}")
    said: list[tuple[int, str, int]] = []
    with monkeypatch.context() as patch:
        recorder = power.Recorder(directory, patch, flush)
        with weclaw.Queue(
            directory / "tasks.wq", flush=flush, flush_interval_ms=10_000, segment_bytes=65536
        ) as q:
            for n in range(60):
                q.put([n, "z" * rng.choice((10, 3000, 30_000))])
                said.append((len(recorder.events), "put", n))
                if n % 17 == 16:
                    q.flush()
                    said.append((len(recorder.events), "flush", n))
    for n in range(25):
        at, _, _ = rng.choice(said)
        k = at + rng.randrange(3)
        flushed = max((m for where, what, m in said if what == "flush" and where <= k), default=-1)
        place = tmp_path / f"state {n}"
        state = power.Disk(recorder, k).state(rng)
        power.put_in_place(state, recorder, k, "missing", place, rng)
        with power.next_boot(monkeypatch, rng), weclaw.Queue(place / "tasks.wq") as q:
            there = [msg.body[0] for msg in q.peek(1000)]
            assert there == list(range(len(there)))
            assert len(there) > flushed
            assert q.stats().damaged == 0
        shutil.rmtree(place)


def test_a_sync_is_what_makes_it_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test tests: with syncs that do nothing, cut power breaks promises."""
    options = OPTIONS[0]
    real = _files.sync_data
    monkeypatch.setattr(_files, "sync_data", lambda fd: None)
    recorder = record(tmp_path / "disk", monkeypatch, "no sync", options, steps=30, snapshots=0.0)
    monkeypatch.setattr(_files, "sync_data", real)
    with pytest.raises(AssertionError):
        check_states(recorder, monkeypatch, tmp_path / "states", "no sync", options, states=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_many_power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int
) -> None:
    """The same with longer histories and many states of each."""
    name = f"slow {seed} {options['flush']} {options['retention']}"
    recorder = record(
        tmp_path / "disk", monkeypatch, name, options, steps=150, workers=1 + seed % 2
    )
    check_states(
        recorder,
        monkeypatch,
        tmp_path / "states",
        name,
        options,
        states=60,
        alone=seed % 2 == 0,
    )


def test_a_name_is_on_the_disk_before_anything_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose maker died before its name was durable is there all the same after a put."""
    directory = tmp_path / "disk"
    directory.mkdir()
    with monkeypatch.context() as patch:
        recorder = power.Recorder(directory, patch, "name")
        with monkeypatch.context() as dying:
            dying.setattr(_files, "sync_dir", lambda path: None)
            _paths.create(str(directory / "tasks.wq"), 65536)
        with weclaw.Queue(directory / "tasks.wq") as q:
            q.put("kept")
            promised = len(recorder.events)
    for n in range(10):
        rng = random.Random(f"name {n}")
        disk = power.Disk(recorder, promised)
        place = tmp_path / f"state {n}"
        power.put_in_place(disk.state(rng), recorder, promised, "missing", place, rng)
        with power.next_boot(monkeypatch, rng), weclaw.Queue(place / "tasks.wq") as q:
            assert q.get(block=False).body == "kept"

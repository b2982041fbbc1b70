"""Files of each format version as they were written once, and what must be seen in them.

    python tests/compat/golden.py             writes tests/compat/v1/, if it is not there
    python tests/compat/golden.py expect      writes down anew what is seen in the files

What stands there is what old releases left behind, and is never made again to please a newer one.
Files are kept packed; what must be seen in them stands beside them as JSON, and each line of it
that changes is a change of what users see in their own old files: to be looked at by eye.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import weclaw_embedded as weclaw

HERE = Path(__file__).resolve().parent
V1 = HERE / "v1"
SEGMENT = 65536
NAMES = ("healthy", "reclaimed", "torn", "flipped", "zeroed", "headless", "old_scratch")
YEARS = 50 * 365 * 86400.0
RETRY = weclaw.RetryPolicy(max_retries=1, backoff=0.0)


# Looking ------------------------------------------------------------------------------------


def unpack(name: str, directory: Path) -> Path:
    """Put a golden file, and what lies beside it, into a directory."""
    for packed in sorted(V1.rglob(f"*{name}.wq*.gz")):
        target = directory / packed.relative_to(V1).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.decompress(packed.read_bytes()))
        target.chmod(0o600)
    return directory / f"{name}.wq"


def look(path: Path) -> dict[str, Any]:
    """Everything a user sees, nothing of which is changed."""
    seen: dict[str, Any] = {"groups": [], "damage": []}
    with weclaw.open(path) as store:
        for info in store.groups():
            q = store.queue(info.topic, group=info.group, retry=RETRY)
            stats = q.stats()
            letters = [
                {
                    "id": letter.id,
                    "body": repr(letter.body),
                    "reason": letter.reason,
                    "counts": [
                        letter.retry_count,
                        letter.delivery_count,
                        letter.crash_count,
                        letter.redrive_count,
                    ],
                    "failures": [[f.reason, f.consumer] for f in letter.failures],
                }
                for letter in q.dlq
            ]
            waiting = [
                {
                    "id": msg.id,
                    "body": repr(msg.body)[:200],
                    "size": len(repr(msg.body)),
                    "key": msg.key,
                    "priority": msg.priority,
                    "headers": repr(msg.headers),
                    "counts": [msg.delivery_count, msg.retry_count, msg.crash_count],
                }
                for msg in q.peek(1000)
            ]
            seen["groups"].append(
                {
                    "topic": info.topic,
                    "group": info.group,
                    "paused": info.paused,
                    "stats": [
                        *(stats.ready, stats.delayed, stats.leased, stats.dead),
                        *(stats.settled, stats.retries, stats.damaged),
                    ],
                    "ready": waiting,
                    "letters": letters,
                }
            )
        seen["damage"] = [list(spot) for spot in store.verify()]
    return seen


def settled(path: Path, ids: list[str]) -> dict[str, list[Any]]:
    """Status and result of messages of the default topic and group."""
    told = {}
    with weclaw.Queue(path) as q:
        for one in ids:
            status = q.status(one)
            told[one] = [status, repr(q.result(one)) if status == "done" else None]
    return told


def drained(path: Path) -> list[list[Any]]:
    """What comes out of the default topic and group, in order; all of it is acknowledged."""
    found = []
    with weclaw.Queue(path, retry=RETRY) as q:
        while True:
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                return found
            counts = [msg.delivery_count, msg.retry_count, msg.crash_count]
            found.append([msg.id, repr(msg.body)[:60], counts])
            msg.ack()


# Writing ------------------------------------------------------------------------------------


def write_healthy(path: Path) -> None:
    """A bit of everything, then a process that dies with two leases."""
    store = weclaw.open(
        path, segment_bytes=SEGMENT, retention=None, retention_bytes=None, consumer="golden"
    )
    q = store.queue(retry=RETRY)
    when = datetime(2024, 2, 29, 12, 30, 15, 123456, timezone(timedelta(hours=5, minutes=30)))
    q.put({"prompt": "plain"})
    q.put({"t": (1, (2,)), "b": b"\0\xff", "when": when, None: 1, 2**63: -(2**63)}, id="types")
    q.put("first of a key", key="k")
    q.put("second of a key", key="k")
    q.put("urgent", priority=9, headers={"trace": "abc", "n": (1, 2)})
    q.put("later", delay=0.01)
    q.put("much later", delay=YEARS)
    q.put("expires", ttl=YEARS)
    q.put("gone", id="gone")
    q.cancel("gone")
    q.put("x" * 100_000, id="large")
    q.put_many(["one of three", weclaw.Put("two of three", priority=3), "three of three"])
    store.queue("mail", group="audit").pause(YEARS, reason="a holiday")
    store.queue("mail").put("a letter")
    with q.transaction() as tx:
        tx.ack(q.get(), result={"answer": (42,)})  # urgent
        tx.put("by a transaction", topic="mail", id="tx")
    q.get().ack(result=None)  # two of three
    for _ in range(2):
        q.get().nack(reason="not today")  # plain: dead
    assert q.get().body["t"] == (1, (2,))
    held = q.get()
    assert held.key == "k"
    held.fail(reason="blocked by policy")
    q.dlq.redrive(limit=1)
    json_ = weclaw.open(path, codec="json", segment_bytes=SEGMENT)
    json_.queue().put({"as": ["json", 1.5]})
    raw = weclaw.open(path, codec="raw")
    raw.queue().put(b"raw bytes")
    store.flush()


def write_reclaimed(path: Path) -> None:
    """A file whose first segments were freed: carried messages, a checkpoint, used slots."""
    import time

    store = weclaw.open(path, segment_bytes=SEGMENT, retention=0, retention_bytes=0)
    q = store.queue(retry=RETRY)
    q.put("a dead letter", id="dead")
    q.get().fail("no use")
    q.put("delayed for long", delay=YEARS, key="k", id="delayed")
    q.put("behind it", key="k", id="behind")
    q.put("held", id="held", priority=9)
    assert q.get().body == "held"
    store.queue(group="other", start="earliest").pause(1e-6)
    store.drop_group("other")
    for n in range(40):
        q.put([n, "y" * 20_000])
        q.get().ack(result=n)
    for _ in range(100):
        if q.stats().file_bytes < 6 * SEGMENT:
            break
        time.sleep(0.05)
    q.put("after that")
    store.flush()


def in_a_process(write: Any, path: Path) -> None:
    """Run it in a process that kills itself at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            write(path)
        except BaseException:  # noqa: BLE001  told, and then the process ends
            import traceback

            traceback.print_exc()
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"{write.__name__} failed"


def pack(path: Path, *, scratch: bool = False) -> None:
    """Keep a file (with the scratch folder, without its pipes) among the golden ones."""
    files = [path, *(Path(f"{path}.d").rglob("*") if scratch else ())]
    for file in files:
        if file.is_file() and "lock" not in file.name:
            target = V1 / f"{file.relative_to(path.parent)}.gz"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(gzip.compress(file.read_bytes(), 9, mtime=0))


def changed(path: Path, to: Path, at: int, data: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    to.write_bytes(content)
    return to


def main() -> None:
    if V1.exists():
        sys.exit(f"{V1} is there already; version 1 is not written a second time")
    V1.mkdir()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        healthy = directory / "healthy.wq"
        in_a_process(write_healthy, healthy)
        pack(healthy)
        reclaimed = directory / "reclaimed.wq"
        in_a_process(write_reclaimed, reclaimed)
        pack(reclaimed)
        data = healthy.read_bytes()
        # The last frame is the last put's.
        last = data.rindex(b"raw bytes")
        pack(changed(healthy, directory / "torn.wq", last + 4, bytes(5)))
        at = data.index(b"first of a key")
        pack(changed(healthy, directory / "flipped.wq", at, b"G"))
        sector = (data.index(b"x" * 2000) // 512 + 2) * 512
        pack(changed(healthy, directory / "zeroed.wq", sector, bytes(512)))
        pack(changed(healthy, directory / "headless.wq", 0, bytes(512)))
        # A scratch folder of an hour ago: of the file before its last process went on.
        old = directory / "old_scratch.wq"
        with weclaw.Queue(old, segment_bytes=SEGMENT, retention=None) as q:
            q.put_many(["a", "b", "c"])
            q.get().ack(result="done")
        shutil.copytree(f"{old}.d", directory / "before")
        with weclaw.Queue(old) as q:
            q.put("d")
            q.get().ack(result="done too")
        shutil.rmtree(f"{old}.d")
        shutil.copytree(directory / "before", f"{old}.d")
        pack(old, scratch=True)
        # Killed in the middle of being made: a name without bytes, and half a temporary file.
        half = directory / "half_created.wq"
        half.write_bytes(b"")
        pack(half)
        temporary = directory / ".half_created.wq.0123456789abcdef.tmp"
        temporary.write_bytes(bytes(4096 + SEGMENT + 100))
        pack(temporary)
    expect()


def expect() -> None:
    """Write down what is seen in each file."""
    for name in NAMES:
        with tempfile.TemporaryDirectory() as directory_name:
            path = unpack(name, Path(directory_name))
            seen = look(path)
            ids = [message["id"] for group in seen["groups"] for message in group["ready"]]
            ids += ["types", "large", "gone", "dead", "delayed", "behind", "held"]
            expected = {
                "seen": seen,
                "settled": settled(path, sorted(set(ids))),
                "drained": drained(path),
            }
            text = json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True)
            (V1 / f"{name}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    expect() if sys.argv[1:] == ["expect"] else main()

"""What was promised, and the checker that holds a recovered queue against it."""

from __future__ import annotations

import itertools
import random
import shutil
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.crash.workload import ENDLESS, SECOND

import weclaw_embedded as weclaw

SCRATCH = ("as is", "deleted", "from before", "random bytes")


class Violation(AssertionError):
    """A promise was broken."""


def spoil_scratch(path: Path, how: str, rng: random.Random, before: Path | None) -> None:
    """Leave the scratch folder as it is, delete it, put an older one there, or fill it."""
    folder = Path(str(path) + ".d")
    if how == "as is" or not folder.exists():
        return
    if how == "random bytes":
        for file in folder.rglob("*"):
            if file.is_file():
                size = min(file.stat().st_size, 2**20)
                with open(file, "r+b") as out:
                    out.write(rng.randbytes(size))
        return
    shutil.rmtree(folder)
    if how == "from before" and before is not None and before.exists():
        shutil.copytree(before, folder)


class Ledger:
    """Everything the children said, in the order it was heard."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def hear(self, child: str, event: tuple[Any, ...]) -> None:
        self.events.append((child, *event))

    def text(self) -> str:
        return "\n".join(map(repr, self.events))


class History:
    """The ledger, sorted by message."""

    def __init__(self, ledger: Ledger) -> None:
        self.put: dict[str, str] = {}  # token -> id, confirmed
        self.announced: list[list[str]] = []  # batches and single puts, confirmed or not
        self.options: dict[str, dict[str, Any]] = {}
        self.order: dict[str, int] = {}  # token -> when announced, to compare within a child
        self.maker: dict[str, str] = {}
        self.got: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # token -> counters
        self.id_of: dict[str, str] = {}
        self.acked: dict[str, int] = {}  # id -> delivery that was acknowledged
        self.ack_doubt: dict[str, set[int]] = defaultdict(set)
        self.failed: dict[str, int] = {}
        self.fail_doubt: dict[str, set[int]] = defaultdict(set)
        self.cancelled: set[str] = set()
        self.cancel_doubt: set[str] = set()
        self.again: set[str] = set()
        self.transactions: list[tuple[str, int, list[str], bool]] = []
        self.topic: dict[str, str] = {}
        self.redrives = 0
        open_calls: dict[str, tuple[Any, ...]] = {}
        for number, (child, what, *rest) in enumerate(ledger.events):
            if what == "error":
                raise Violation(f"{child} raised {rest[0]}\n{rest[1]}")
            if what.endswith("?"):
                open_calls[child] = (what, *rest)
                self._announced(number, child, what, rest)
            else:
                open_calls.pop(child, None)
                self._confirmed(what, rest)
        for what, *rest in open_calls.values():
            self._left_open(what, rest)

    def _announced(self, number: int, child: str, what: str, rest: list[Any]) -> None:
        if what == "put?":
            self.announced.append(rest[0])
            for n, (token, options) in enumerate(zip(rest[0], rest[1], strict=True)):
                self.options[token] = options
                self.order[token] = number * 1000 + n
                self.maker[token] = child
                if "topic" in options:
                    self.topic[token] = options["topic"]
        elif what == "tx?":
            for n, (token, topic) in enumerate(zip(rest[2], rest[3], strict=True)):
                self.options[token] = {}
                self.order[token] = number * 1000 + n
                self.maker[token] = child
                self.topic[token] = topic or "default"
        elif what == "redrive?":
            self.redrives += 1
        elif what == "again?":
            self.again.add(rest[0])

    def _confirmed(self, what: str, rest: list[Any]) -> None:
        if what == "put":
            for token, task in zip(rest[0], rest[1], strict=True):
                self.put[token] = task
                self.id_of[token] = task
        elif what == "is":
            self.id_of[rest[0]] = rest[1]  # known, whatever became of it
        elif what == "got":
            token, task, counters = rest
            if self.id_of.setdefault(token, task) != task:
                raise Violation(f"{token} was {self.id_of[token]} and came as {task}")
            self.got[token].append(counters)
        elif what == "ack":
            self.acked[rest[0]] = rest[1]
        elif what == "fail":
            self.failed[rest[0]] = rest[1]
        elif what == "tx":
            self.acked[rest[0]] = rest[1]
            self.transactions.append((rest[0], rest[1], rest[2], True))
        elif what == "cancel" and rest[1]:
            self.cancelled.add(rest[0])

    def _left_open(self, what: str, rest: list[Any]) -> None:
        """A call that never returned: it happened or it did not."""
        if what == "ack?":
            self.ack_doubt[rest[0]].add(rest[1])
        elif what == "fail?":
            self.fail_doubt[rest[0]].add(rest[1])
        elif what == "tx?":
            self.ack_doubt[rest[0]].add(rest[1])
            self.transactions.append((rest[0], rest[1], rest[2], False))
        elif what == "cancel?":
            self.cancel_doubt.add(rest[0])


def _require(truth: object, text: str) -> None:
    if not truth:
        raise Violation(text)


class Found:
    """What a recovered queue holds, taken out of it piece by piece."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        keep = {k: v for k, v in options.items() if k == "flush"}
        store = weclaw.open(path, **keep)
        try:
            damage = store.verify()
            _require(damage == [], f"a kill left damage: {damage}")
            q = store.queue(retry=ENDLESS)
            _require(q.stats().damaged == 0, f"damaged: {q.stats()}")
            self.letters = list(q.dlq)
            self.stats = q.stats()
            _require(self.stats.leased == 0, f"leased by nobody: {self.stats}")
            _require(self.stats.dead == len(self.letters), f"letters: {self.stats}")
            self.drained = self._drain(q)
            self.second = self._drain(store.queue(SECOND, retry=ENDLESS))
            self.after = q.stats()
            _require(self.after[:3] == (0, 0, 0), f"not empty after draining: {self.after}")
            expected = self.stats.ready + self.stats.delayed
            _require(
                len(self.drained) == expected,
                f"{self.stats} but {len(self.drained)} came out",
            )
            _require(
                self.after.settled == self.stats.settled + len(self.drained),
                f"settled: {self.stats} {self.after} {len(self.drained)}",
            )
            self.letters_after = [x.id for x in q.dlq]
        finally:
            store.close()

    def _drain(self, q: Any) -> list[Any]:
        messages = []
        while True:
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                if q.stats().delayed == 0:
                    return messages
                msg = q.get(timeout=5.0)
            messages.append(msg)
            msg.body
            msg.ack(result=["drained", msg.delivery_count])


def check(
    path: Path, ledger: Ledger, options: dict[str, Any], where: str, *, forgets: bool = False
) -> dict[str, int]:
    """Hold the file at `path` against the ledger. Returns a few numbers, or raises `Violation`.

    `forgets`: deliveries that nobody settled may be missing, as in a copy whose primary is lost.
    """
    try:
        history = History(ledger)
        return _check(path, history, options, forgets)
    except Violation as violation:
        raise Violation(f"{where}: {violation}") from None
    except Exception as error:
        raise Violation(f"{where}: {traceback.format_exc()}") from error


def _check(path: Path, h: History, options: dict[str, Any], forgets: bool) -> dict[str, int]:
    time.sleep(0.02)  # What waits after a nack is due by now, and takes its old place.
    found = Found(path, options)
    kept = options.get("retention", 3600) > 0
    come: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for msg in found.drained + found.second:
        token = msg.body["t"]
        _require(
            h.id_of.setdefault(token, msg.id) == msg.id,
            f"{token} was {h.id_of[token]} and came as {msg.id}",
        )
        come[token].append((msg.delivery_count, msg.retry_count, msg.crash_count))
        size = set(msg.body["pad"])
        _require(size <= {len(token) % 251}, f"the body of {token} is not what was put")
    letters = {letter.body["t"]: letter for letter in found.letters}
    _require(len(letters) == len(found.letters), "a letter is there twice")
    for token, letter in letters.items():
        h.id_of.setdefault(token, letter.id)
        _require(h.id_of[token] == letter.id, f"letter {token} has another id")
    _check_each(h, come, letters, kept, forgets)
    _check_whole(h, come, letters, forgets)
    _check_order(h, found)
    _check_states(path, h, come, letters, kept)
    _check_afterwards(path)
    return {"drained": len(found.drained), "letters": len(letters), "known": len(h.id_of)}


def _check_each(h: History, come: Any, letters: Any, kept: bool, forgets: bool) -> None:
    for token in set(h.got) | set(come) | set(letters) | set(h.put):
        task = h.id_of[token]
        freed = not kept or task in h.cancelled or task in h.cancel_doubt
        if task in h.again and freed:
            continue  # The id was free again, and was put anew: two lives under one name.
        # What was only handed out counts for nothing where that may be forgotten.
        got = [] if forgets else h.got.get(token, [])
        deliveries = got + come.get(token, [])
        counts = [d[0] for d in deliveries]
        _require(len(counts) == len(set(counts)), f"{token}: a delivery happened twice: {counts}")
        if come.get(token):
            _require(len(come[token]) == 1, f"{token} was drained twice")
            last = max((d[0] for d in got), default=0)
            _require(come[token][0][0] > last, f"{token}: counter went back: {deliveries}")
        in_order = sorted(deliveries)
        if not h.redrives:
            for one, other in itertools.pairwise(in_order):
                _require(
                    one[1] <= other[1] and one[2] <= other[2],
                    f"{token}: counters went back: {in_order}",
                )
        for d in in_order:
            _require(d[1] + d[2] < d[0], f"{token}: counters disagree: {in_order}")
        if task in h.acked:
            late = [c for c in counts if c > h.acked[task] or forgets]
            _require(not late, f"{token} was acknowledged at {h.acked[task]} and came again {late}")
            _require(token not in letters, f"{token} was acknowledged and is a dead letter")
        if task in h.failed and not h.redrives:
            _require(token in letters, f"{token} was failed and is no dead letter")
        if token in letters:
            _require(token not in come, f"{token} is in two places")
            letter = letters[token]
            _require(letter.reason == f"failed {token}", f"{token}: reason {letter.reason!r}")
            known = task in h.failed or task in h.fail_doubt
            _require(known, f"{token} is a dead letter and nobody failed it")
        if task in h.cancelled and task not in h.again:
            _require(token not in come and token not in letters, f"{token} was cancelled and came")
            # Who held it when it was cancelled made that impossible, and nobody could get it later.
            settled = task in h.acked or (task in h.failed and not h.redrives)
            _require(not settled, f"{token} was cancelled, and settled by who had it")
        if token in h.put and not come.get(token) and token not in letters:
            excused = (
                task in h.acked
                or task in h.ack_doubt
                or task in h.cancelled
                or task in h.cancel_doubt
            )
            _require(excused, f"{token} was put, never settled, and is lost")


def _check_whole(h: History, come: Any, letters: Any, forgets: bool) -> None:
    def seen(token: str) -> bool:
        return token in h.got or token in come or token in letters

    for tokens in h.announced:
        if tokens[0] not in h.put:
            there = [seen(token) for token in tokens]
            _require(all(there) or not any(there), f"batch {tokens} is there in part: {there}")
    for task, delivery, tokens, confirmed in h.transactions:
        token = next((t for t, i in h.id_of.items() if i == task), None)
        later = [d[0] for d in h.got.get(token, []) if d[0] > delivery] + [
            d[0] for d in come.get(token, []) if d[0] > delivery or forgets
        ]
        if token in letters:
            later.append(0)
        there = [seen(t) for t in tokens]
        if confirmed:
            _require(all(there), f"transaction of {task}: its puts {tokens} are not all there")
        else:
            _require(all(there) or not any(there), f"transaction of {task} is there in part")
            said = f"transaction of {task}: puts {there}, the message delivered again {later}"
            _require(not (all(there) and later), said)
            # What it did not settle may have been cancelled before anybody got it again.
            cancelled = task in h.cancelled or task in h.cancel_doubt
            _require(all(there) or later or cancelled, said)


def _check_order(h: History, found: Found) -> None:
    """Within a maker and priority, what was never redriven or delayed is drained as it was put."""
    last: dict[tuple[str, Any], int] = {}
    for msg in found.drained:
        token = msg.body["t"]
        options = h.options.get(token, {})
        redriven = token in h.id_of and (
            h.id_of[token] in h.failed or h.id_of[token] in h.fail_doubt
        )
        if redriven or "delay" in options or h.id_of[token] in h.again:
            continue
        if options.get("key") is not None:
            place = (h.maker[token], options["key"])
        else:
            place = (h.maker[token], options.get("priority", 0))
        order = h.order[token]
        _require(
            order > last.get(place, -1),
            f"{token} came behind what was put after it ({place})",
        )
        last[place] = order


def _check_states(path: Path, h: History, come: Any, letters: Any, kept: bool) -> None:
    done = 0
    with weclaw.open(path) as store:
        q, second = store.queue(), store.queue(SECOND)
        for token, task in h.id_of.items():
            home = second if h.topic.get(token) == SECOND else q
            status = home.status(task)
            if token in letters:
                _require(status == "dead", f"letter {token} is {status}")
            elif task in h.acked or token in come or token in h.got:
                wanted = ("done",) if kept else ("done", "unknown")
                if task in h.cancelled or task in h.cancel_doubt:
                    wanted = (*wanted, "unknown")
                _require(status in wanted, f"{token} is {status} in the end, not done")
            if status == "done" and home is q:
                done += 1
            if status == "done" and kept:
                token_, delivery = home.result(task)
                if token in come:
                    _require(token_ == "drained", f"{token} has the result {token_}")
                elif task in h.acked:
                    _require(
                        (token_, delivery) == (token, h.acked[task]),
                        f"{token} has the result {(token_, delivery)}",
                    )
                else:
                    _require(
                        delivery in h.ack_doubt[task],
                        f"{token} has the result {(token_, delivery)} of nobody",
                    )
        if kept:
            _require(
                done == q.stats().settled,
                f"{done} messages are done but the stats say {q.stats().settled}",
            )


def _check_afterwards(path: Path) -> None:
    """Three more puts, reopen, drain, reopen, empty."""
    more = [{"t": f"after {n}", "pad": b""} for n in range(3)]
    with weclaw.Queue(path) as q:
        for body in more:
            q.put(body)
    with weclaw.Queue(path) as q:
        got = []
        for _ in range(4):
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                break
            got.append(msg.body)
            msg.ack()
        _require(got == more, f"of three more puts came {got}")
    with weclaw.Queue(path) as q:
        _require(q.stats()[:3] == (0, 0, 0), f"not empty in the end: {q.stats()}")
        try:
            q.get(block=False)
        except weclaw.Empty:
            pass
        else:
            raise Violation("something came out of an empty queue")

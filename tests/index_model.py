"""A plain model of what the index must answer, and a log of records that both are told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weclaw_embedded import _format
from weclaw_embedded import _records as rec
from weclaw_embedded._index import Index, Picks, Tx
from weclaw_embedded._index_rows import DELIVERED, RESULT, U64

NEVER = rec.NEVER
ALL = 2**60
TOPICS = [(0, "default"), (77, "other")]
GROUPS = ["one", "two", "three"]


def joined(record: rec.Record) -> bytes:
    """Return a record's bytes."""
    return b"".join(record)


def tell(tx: Tx, offset: int, time_us: int, record: bytes) -> None:
    """Fold one record."""
    tx.apply([(offset, time_us, (record,))])


@dataclass
class Standing:
    """One message in one group."""

    order: int
    due: int
    expiry: int
    status: str = "open"  # open, leased, dead, done, purged
    delivery: int = 0
    retry: int = 0
    crash: int = 0
    redrive: int = 0
    reason: str = ""
    failures: list[Any] = field(default_factory=list)
    result: int | None = None  # where it stands in the log
    owner: int = 0
    deadline: int = 0


@dataclass
class Sent:
    """One message."""

    tid: int
    priority: int
    key: str | None
    id: str | None
    due: int
    expiry: int
    put: bytes
    time_us: int
    location: int
    for_new: bool = True
    cancelled: bool = False


@dataclass
class GroupModel:
    """One group."""

    tid: int
    name: str
    start: int
    created: int
    has: dict[int, Standing] = field(default_factory=dict)
    settled: int = 0
    retries: int = 0
    picks: int = 0
    paused: int = 0


class Model:
    """Topics, groups and messages as the records so far leave them, and the records."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, bytes]] = []
        self.end = 64
        self.head = 64
        self.now = 1_000_000
        self.sent: dict[int, Sent] = {}
        self.groups: dict[int, GroupModel] = {}
        self.ids: dict[tuple[int, str], int] = {}  # what was last put with an id
        self.options: dict[str, Any] = {}
        self.checkpoint: tuple[int, bytes] | None = None
        self.puts = dict.fromkeys((tid for tid, _ in TOPICS), 0)

    def say(self, record: rec.Record) -> int:
        """Append a record; return its offset."""
        data = joined(record)
        offset = self.end
        self.log.append((offset, self.now, data))
        self.end += len(data) + 32
        return offset

    # What is so

    def of_topic(self, tid: int) -> list[GroupModel]:
        """Return the groups of a topic."""
        return [group for group in self.groups.values() if group.tid == tid]

    def unfinished(self, group: GroupModel) -> list[int]:
        """Return what is open or leased."""
        return [o for o, s in group.has.items() if s.status in ("open", "leased")]

    def parked(self, group: GroupModel) -> set[int]:
        """Return what waits behind another message of its key."""
        by_key: dict[str, list[int]] = {}
        for offset in self.unfinished(group):
            key = self.sent[offset].key
            if key is not None:
                by_key.setdefault(key, []).append(offset)
        behind: set[int] = set()
        for offsets in by_key.values():
            leased = [o for o in offsets if group.has[o].status == "leased"]
            assert len(leased) <= 1
            active = leased[0] if leased else min(offsets, key=lambda o: group.has[o].order)
            behind.update(o for o in offsets if o != active)
        return behind

    def where(self, group: GroupModel, offset: int) -> str:
        """Return what `Tx.state` must say."""
        if self.sent[offset].cancelled:
            return "cancelled"
        standing = group.has.get(offset)
        if standing is None:
            return "done"
        if standing.status != "open":
            return standing.status
        if standing.due > self.now or offset in self.parked(group):
            return "delayed"
        return "ready"

    def ready(self, group: GroupModel) -> list[int]:
        """Return what may be delivered."""
        parked = self.parked(group)
        return [
            offset
            for offset, s in group.has.items()
            if s.status == "open" and s.due <= self.now and offset not in parked
        ]

    def picks(self, group: GroupModel, n: int, suspects: int, visible: int) -> list[int]:
        """Return what must be delivered next."""
        left = [
            offset
            for offset in self.ready(group)
            if not (group.has[offset].delivery == 0 and offset >= visible)
            and not (0 < group.has[offset].expiry <= self.now)
        ]
        picks: list[int] = []
        while len(picks) < n:
            held = suspects + sum(group.has[o].crash > 0 for o in picks)
            candidates = [o for o in left if not (group.has[o].crash and held)]
            if not candidates:
                break
            if (group.picks + len(picks)) % 16 == 15:
                best = min(candidates, key=lambda o: group.has[o].order)
            else:
                best = min(candidates, key=lambda o: (-self.sent[o].priority, group.has[o].order))
            left.remove(best)
            picks.append(best)
        return picks

    def is_live(self, offset: int) -> bool:
        """Whether a message is still needed."""
        sent = self.sent[offset]
        groups = self.of_topic(sent.tid)
        if not groups:
            return sent.for_new and not sent.cancelled
        standings = [group.has[offset] for group in groups if offset in group.has]
        return any(s.status in ("open", "leased", "dead") for s in standings)

    # What is done

    def put(
        self, tid: int, priority: int, key: str | None, given: str | None, delay: int, ttl: int
    ) -> int:
        """Put a message."""
        due = self.now + delay if delay else 0
        expiry = self.now + ttl if ttl else 0
        meta = rec.pack_meta(key=key, id=given, due_us=due, expiry_us=expiry)
        record = rec.pack_put(priority, 0, tid, meta, b"body")
        offset = self.say(record)
        self.sent[offset] = Sent(
            tid, priority, key, given, due, expiry, joined(record), self.now, offset
        )
        self.puts[tid] += 1
        if given is not None:
            self.ids[tid, given] = offset
        for group in self.of_topic(tid):
            group.has[offset] = Standing(offset, due, expiry)
        return offset

    def begin(self, gid: int, tid: int, name: str, start: str | int) -> None:
        """Begin a group."""
        offset = self.say(rec.pack_group(tid, gid, name, start))
        first = 0 if start == "earliest" else offset if start == "latest" else int(start)
        group = self.groups[gid] = GroupModel(tid, name, first, offset)
        for message, sent in self.sent.items():
            if sent.tid == tid and sent.for_new and not sent.cancelled and message >= first:
                group.has[message] = Standing(message, sent.due, sent.expiry)
        for message, sent in self.sent.items():
            if sent.tid == tid and sent.location != message:
                sent.for_new = False

    def drop(self, gid: int) -> None:
        """Drop a group."""
        self.say(rec.pack_group_drop(gid))
        del self.groups[gid]

    def deliver(self, gid: int, picks: Picks, owner: int, deadline: int) -> None:
        """Lease what the index picked."""
        group = self.groups[gid]
        self.say(rec.pack_deliver(group.tid, gid, owner, deadline, *picks[:2]))
        for offset in picks.offsets:
            standing = group.has[offset]
            standing.status = "leased"
            standing.delivery += 1
            standing.owner, standing.deadline = owner, deadline
        group.picks += len(picks.offsets)

    def ack(self, gid: int, offset: int, result: bytes) -> None:
        """Settle a lease."""
        group = self.groups[gid]
        at = self.say(rec.pack_ack(group.tid, gid, offset, result))
        standing = group.has[offset]
        standing.status = "done"
        standing.result = at if result else None
        group.settled += 1

    def give_back(self, gid: int, offset: int, kind: int, due: int) -> None:
        """End a lease."""
        group = self.groups[gid]
        s = group.has[offset]
        failure = (self.now, "why", "who") if kind in (rec.NACK, rec.LAPSED, rec.DIED) else None
        if kind == rec.UNDO:
            s.delivery -= 1
        if kind in (rec.NACK, rec.LAPSED):
            s.retry += 1
            group.retries += 1
        if kind == rec.DIED:
            s.crash += 1
        if failure:
            s.failures = [*s.failures, failure][-20:]
        self.say(
            rec.pack_return(
                gid,
                offset,
                kind,
                due_us=due,
                delivery=s.delivery,
                retry=s.retry,
                crash=s.crash,
                failure=failure,
            )
        )
        s.status, s.due, s.owner = "open", due, 0

    def die(self, gid: int, offset: int, reason: str) -> None:
        """Move a message to the dead letters."""
        s = self.groups[gid].has[offset]
        self.say(rec.pack_dead(gid, offset, reason, self.now, retry=s.retry, crash=s.crash))
        s.status, s.reason, s.owner = "dead", reason, 0

    def redrive(self, gid: int, offsets: list[int], ttl: int) -> None:
        """Redrive dead letters."""
        expiry = self.now + ttl if ttl else 0
        at = self.say(rec.pack_redrive(gid, [(offset, expiry) for offset in offsets]))
        for place, offset in enumerate(offsets):
            s = self.groups[gid].has[offset]
            s.status, s.order, s.expiry, s.due = "open", at + place, expiry, 0
            s.retry = s.crash = 0
            s.redrive += 1
            s.reason = ""

    def extend(self, gid: int, offset: int, deadline: int) -> None:
        """Extend a lease."""
        self.say(rec.pack_extend(gid, offset, deadline))
        self.groups[gid].has[offset].deadline = deadline

    def cancel(self, tid: int, offset: int) -> None:
        """Cancel a message that no group holds or settled."""
        self.say(rec.pack_cancel(tid, [offset]))
        self.sent[offset].cancelled = True
        for group in self.of_topic(tid):
            group.has.pop(offset, None)

    def void(self, offset: int) -> None:
        """Take a put back."""
        self.say(rec.pack_void([offset]))
        sent = self.sent[offset]
        sent.cancelled = True
        for group in self.of_topic(sent.tid):
            group.has.pop(offset, None)

    def purge(self, gid: int) -> None:
        """Purge a group."""
        self.say(rec.pack_purge(gid))
        for s in self.groups[gid].has.values():
            if s.status == "open":
                s.status = "purged"

    def purge_dead(self, gid: int, offsets: list[int]) -> None:
        """Purge dead letters."""
        self.say(rec.pack_purge_dead(gid, offsets))
        for offset in offsets:
            self.groups[gid].has[offset].status = "purged"

    def replay(self, gid: int, offsets: list[int]) -> None:
        """Have settled messages flow again."""
        group = self.groups[gid]
        items = []
        for offset in offsets:
            sent = self.sent[offset]
            keyhash = rec.key_hash(sent.key) if sent.key is not None else b""
            items.append((offset, sent.priority, keyhash, 0))
        self.say(rec.pack_replay(gid, items))
        for offset in offsets:
            had = group.has.get(offset)
            if had is None:  # before it began
                group.has[offset] = Standing(offset, 0, 0)
            elif had.status == "done":
                group.has[offset] = Standing(offset, 0, 0, delivery=had.delivery)

    def pause(self, gid: int, until: int) -> None:
        """Pause a group."""
        self.say(rec.pack_pause(gid, until, "because"))
        self.groups[gid].paused = until

    def option(self, name: str, value: Any) -> None:
        """Set an option of the file."""
        self.say(rec.pack_option({name: value}))
        self.options[name] = value
        if value is None:
            del self.options[name]

    # Reclaim

    def reclaim(self, tx: Tx, bound: int, applied: Any) -> None:
        """Free what stands below an offset, as a store would; `applied` folds what is new."""
        live = sorted(o for o, s in self.sent.items() if s.location < bound and self.is_live(o))
        assert sorted(tx.live_in(self.head, bound)) == live
        record = rec.pack_checkpoint(tx.checkpoint_state())
        self.checkpoint = (self.say(record), joined(record))
        applied()
        for offset in live:
            sent = self.sent[offset]
            told = tx.carried_state(
                offset, put=sent.put, salt=5, time_us=sent.time_us, result=lambda g, at: b"r"
            )
            sent.location = self.say(rec.pack_carry(told))
            applied()
            if self.of_topic(sent.tid):
                sent.for_new = False
            for group in self.of_topic(sent.tid):
                if offset in group.has and group.has[offset].result is not None:
                    group.has[offset].result = sent.location
        while not tx.drop_below(bound, 50):
            pass
        self.head = bound
        for offset in [o for o, s in self.sent.items() if s.location < bound]:
            del self.sent[offset]
            for group in self.groups.values():
                group.has.pop(offset, None)


def check(model: Model, tx: Tx) -> None:
    """Hold an index against the model."""
    assert tx.options == model.options
    for tid, _ in TOPICS:
        topic = tx.topic_by_id(tid)
        assert (topic.puts if topic else 0) == model.puts[tid]
    assert {group.gid for group in tx.groups()} == set(model.groups)
    for gid, expected in model.groups.items():
        group = tx.group(gid)
        assert group is not None
        assert (group.name, group.tid, group.start) == (
            expected.name,
            expected.tid,
            expected.start,
        )
        assert (group.settled, group.retries, group.picks, group.paused_until_us) == (
            expected.settled,
            expected.retries,
            expected.picks,
            expected.paused,
        )
        tx.move_due(group, model.now)
        counts = dict.fromkeys(("ready", "delayed", "leased", "dead"), 0)
        for offset, sent in model.sent.items():
            if sent.tid != expected.tid:
                continue
            state = model.where(expected, offset)
            assert tx.state(group, offset, lambda _, p=sent.priority: p) == state
            if state in counts:
                counts[state] += 1
            standing = expected.has.get(offset, Standing(0, 0, 0))
            assert tx.result_at(gid, offset) == standing.result
            row = tx.row(gid, offset)
            if row is not None:
                check_row(row, standing)
        assert tx.ready_count(group) == counts["ready"]
        assert group.n_wait + group.n_parked == counts["delayed"]
        assert group.n_leased == counts["leased"]
        assert group.n_dead == counts["dead"]
        for visible in (ALL, model.end // 2):
            for suspects in (0, 1):
                picks = tx.pick(group, 40, visible=visible, now_us=model.now, suspects=suspects)
                assert picks.offsets == model.picks(expected, 40, suspects, visible)
        unfinished = model.unfinished(expected)
        assert tx.oldest(group) == min(unfinished, default=None)
        dead = [(o, s.reason) for o, s in sorted(expected.has.items()) if s.status == "dead"]
        assert [(o, reason) for o, _, reason, _ in tx.dead(gid)] == dead
        check_times(model, expected, tx)
    check_ids(model, tx)
    for kind in (RESULT, DELIVERED):  # nothing is noted of what is kept no more
        for key, _ in tx._scan(kind):
            gid, offset = U64.unpack(key[1:9])[0], U64.unpack(key[9:])[0]
            assert gid in model.groups
            assert offset in model.sent
            assert model.groups[gid].has[offset].status == "done"


def check_row(row: Any, standing: Standing) -> None:
    """Hold a row against the model."""
    assert (row.order, row.delivery, row.retry, row.crash, row.redrive, row.expiry_us) == (
        standing.order,
        standing.delivery,
        standing.retry,
        standing.crash,
        standing.redrive,
        standing.expiry,
    )
    assert row.failures == standing.failures
    if standing.status == "leased":
        assert (row.owner, row.deadline) == (standing.owner, standing.deadline)


def check_times(model: Model, expected: GroupModel, tx: Tx) -> None:
    """Hold what is due, over and lapsed against the model."""
    gid = next(gid for gid, group in model.groups.items() if group is expected)
    group = tx.group(gid)
    assert group is not None
    open_ones = {o: s for o, s in expected.has.items() if s.status == "open"}
    over = {o for o, s in open_ones.items() if 0 < s.expiry <= model.now}
    assert {o for o, _ in tx.expired(group, model.now)} == over
    parked = model.parked(expected)
    times = [s.due for o, s in open_ones.items() if s.due > model.now and o not in parked]
    times += [s.expiry for s in open_ones.values() if s.expiry]
    assert tx.next_due(group) == min(times, default=None)
    leased = {o: s.deadline for o, s in expected.has.items() if s.status == "leased"}
    assert {o for o, _ in tx.leases(gid)} == set(leased)
    bound = tx.next_deadline(group)
    if min(leased.values(), default=NEVER) != NEVER:
        assert bound is not None
        assert bound <= min(leased.values())
    now_ns = random.Random(model.end).randrange(1, 3_000)
    tx._scanned.clear()
    assert {o for o, _ in tx.lapsed(group, now_ns)} == {o for o, d in leased.items() if d <= now_ns}


def check_ids(model: Model, tx: Tx) -> None:
    """Hold what is found by its id against the model."""
    for tid, _ in TOPICS:
        wanted: dict[str, int | None] = {f"id{n}": None for n in range(3)}
        for given in wanted:
            offset = model.ids.get((tid, given))
            if offset is None:
                continue
            if offset not in model.sent:  # freed; an earlier one may be kept that was purged
                wanted[given] = tx.find_id(tid, given)
                continue
            sent = model.sent[offset]
            groups = model.of_topic(tid)
            had = [group.has[offset].status for group in groups if offset in group.has]
            purged = bool(had) and all(status == "purged" for status in had)
            if not sent.cancelled and not purged:
                wanted[given] = offset
        for given, offset in wanted.items():
            assert tx.find_id(tid, given) == offset


def rebuild(model: Model, index: Index, *, seed: int = 0) -> Tx:
    """Fold the kept part of the log into an empty index, as a store would after losing it."""
    tx = index.write()
    if model.checkpoint is not None and model.head > 64:
        said = rec.unpack(model.checkpoint[1])
        assert isinstance(said, rec.Checkpoint)
        tx.seed(said, model.head)
    kept = [row for row in model.log if row[0] >= model.head]
    tx.apply_many(found(kept, random.Random(seed)))
    return tx


def found(kept: list[tuple[int, int, bytes]], numbers: random.Random) -> Iterator[Any]:
    """Yield records as a log would: stretches, of frames of one record or more, and frames."""
    while kept:
        n = numbers.choice((1, 2, 5, 20, 100, 3000))
        part, kept = kept[:n], kept[n:]
        if numbers.randrange(4):
            yield stretch(part, numbers)
        else:  # those of one frame share its time
            for offset, time_us, data in part:
                yield offset, offset + 1, time_us, 0, 0, [(offset, memoryview(data))]


def stretch(part: list[tuple[int, int, bytes]], numbers: random.Random) -> _format.Stretch:
    """Return these records as they would stand in a segment, some of the same time in one frame."""
    base = part[0][0] - numbers.randrange(_format.PART_BYTES, 100)
    data = bytearray(part[-1][0] + 8 + len(part[-1][2]) - base + 64)
    heads, places, ends = [], [], []
    begin, time_of_frame = 0, -1
    for offset, time_us, record in part:
        place = offset - base
        if time_us != time_of_frame or numbers.randrange(2):
            begin, time_of_frame = place - _format.PART_BYTES, time_us
            _format.PART.pack_into(data, begin, 0, 1, 3, time_us)
        _format.ENVELOPE.pack_into(data, place, len(record), place - begin)
        data[place + 8 : place + 8 + len(record)] = record
        heads.append(int.from_bytes(record[:8], "little") if len(record) >= 8 else -1)
        places.append(place)
        ends.append(place + 8 + len(record))
    return _format.Stretch(base, bytes(data), heads, places, ends, 0)


class Driver:
    """Turns numbers into records that are valid now, and applies them."""

    def __init__(self, index: Index) -> None:
        self.model = Model()
        self.index = index
        self.tx: Tx | None = None
        self.told = 0  # records applied

    def open(self) -> Tx:
        """Return a transaction with everything applied."""
        if self.tx is None:
            self.tx = self.index.write()
        self.tx.apply((at, time_us, (data,)) for at, time_us, data in self.model.log[self.told :])
        self.told = len(self.model.log)
        return self.tx

    def commit(self) -> None:
        """Commit what was applied."""
        self.open().commit(self.model.end, 1)
        self.tx = None

    def step(self, op: int, a: int, b: int) -> None:
        """Do one thing, chosen by numbers."""
        model = self.model
        model.now += 1 + a % 50
        act = _ACTS[op % len(_ACTS)]
        act(self, model, a, b)

    def _gid(self, a: int) -> int | None:
        gids = sorted(self.model.groups)
        return gids[a % len(gids)] if gids else None

    def _some(self, gid: int | None, status: str, a: int) -> int | None:
        if gid is None:
            return None
        found = [o for o, s in self.model.groups[gid].has.items() if s.status == status]
        return found[a % len(found)] if found else None


def _put(driver: Driver, model: Model, a: int, b: int) -> None:
    for n in range(1 + a % 3):
        tid = TOPICS[(b // 64) % 5 == 4][0]
        kind = (b + n) % 8
        free = [f"id{i}" for i in range(3) if driver.open().find_id(tid, f"id{i}") is None]
        model.put(
            tid,
            (0, 0, 5, 9)[(a // 3) % 4],
            "kl"[b % 2] if kind in (1, 2, 3) else None,
            free[0] if kind in (3, 4) and free else None,
            30 + b % 100 if kind in (2, 5) else 0,
            60 + a % 100 if kind in (2, 6) else 0,
        )


def counts(tx: Tx, group: Any, now: int) -> tuple[Any, ...]:
    """Return what a user sees of a group."""
    tx.move_due(group, now)
    return (
        tx.ready_count(group),
        group.n_wait + group.n_parked,
        (group.n_leased, group.n_dead, group.settled, group.retries),
        tx.peek(group, 1000, now),
        tx.oldest(group),
        tx.first_unsettled(group) if tx.oldest(group) is not None else None,
    )


def _plain(driver: Driver, model: Model, a: int, b: int) -> None:
    for _ in range(1 + a % 6):
        model.put(0, (0, 5)[b % 2], None, None, 0, 0)


def _begin(driver: Driver, model: Model, a: int, b: int) -> None:
    tid, topic = TOPICS[a % 4 == 3]
    name = GROUPS[b % 3]
    gid = rec.group_id(topic, name)
    if gid not in model.groups:
        starts: list[str | int] = ["earliest", "earliest", "latest", model.end // 2]
        start = starts[(b // 3) % 4]
        tx = driver.open()
        promised = counts(tx, tx.template(tid), model.now)
        model.begin(gid, tid, name, start)
        begun = driver.open().group(gid)
        assert begun is not None
        if start == "earliest":  # it gets what a handle showed before
            found = counts(driver.open(), begun, model.now)
            assert found == promised, (found, promised)


def _deliver(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is None:
        return
    tx = driver.open()
    group = tx.group(gid)
    assert group is not None
    tx.move_due(group, model.now)
    picks = tx.pick(group, 1 + b % 4, visible=ALL, now_us=model.now, suspects=0)
    if picks.offsets:
        model.deliver(gid, picks, 1 + a % 3, NEVER if b % 5 == 0 else 1 + (a * b) % 2000)


def _ack(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    offset = driver._some(gid, "leased", b)
    if gid is not None and offset is not None:
        model.ack(gid, offset, b"r" if b % 3 == 0 else b"")


def _return(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    offset = driver._some(gid, "leased", b)
    if gid is not None and offset is not None:
        model.give_back(gid, offset, a % 5, model.now + 40 if b % 2 else 0)


def _die(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    offset = driver._some(gid, "leased" if b % 2 else "open", b)
    if gid is not None and offset is not None:
        expiry = model.groups[gid].has[offset].expiry
        if b % 2 or 0 < expiry <= model.now:
            model.die(gid, offset, f"reason {a}")


def _redrive(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is None:
        return
    dead = [o for o, s in model.groups[gid].has.items() if s.status == "dead"]
    if dead:
        model.redrive(gid, dead[: 1 + b % 3], 50 if b % 4 == 0 else 0)


def _extend(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    offset = driver._some(gid, "leased", b)
    if gid is not None and offset is not None:
        model.extend(gid, offset, 1 + (a * b) % 3000)


def _cancel(driver: Driver, model: Model, a: int, b: int) -> None:
    offsets = sorted(model.sent)
    if not offsets:
        return
    offset = offsets[b % len(offsets)]
    sent = model.sent[offset]
    standings = [g.has[offset].status for g in model.of_topic(sent.tid) if offset in g.has]
    if sent.cancelled or any(s in ("leased", "done") for s in standings):
        return
    if offset == offsets[-1] and a % 2 and sent.location == offset:
        model.void(offset)
    else:
        model.cancel(sent.tid, offset)


def _purge(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is None:
        return
    if b % 2:
        dead = [o for o, s in model.groups[gid].has.items() if s.status == "dead"]
        if dead:
            model.purge_dead(gid, dead[:2])
    elif b % 3 == 0:
        model.purge(gid)


def _replay(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is None:
        return
    group = model.groups[gid]
    offsets = [
        offset
        for offset in sorted(model.sent)
        if model.sent[offset].tid == group.tid and not model.sent[offset].cancelled
    ]
    if offsets:
        model.replay(gid, offsets[b % len(offsets) :][:4])


def _drop(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is not None and b % 3 == 0:
        model.drop(gid)


def _settings(driver: Driver, model: Model, a: int, b: int) -> None:
    gid = driver._gid(a)
    if gid is not None:
        model.pause(gid, b % 100)
    model.option("abc"[a % 3], b if b % 4 or "abc"[a % 3] not in model.options else None)


def _time(driver: Driver, model: Model, a: int, b: int) -> None:
    model.now += b


def _reclaim(driver: Driver, model: Model, a: int, b: int) -> None:
    tx = driver.open()
    kept = [offset for offset, _, _ in model.log if offset >= model.head]
    if kept:
        model.reclaim(tx, kept[(b * len(kept)) // 300 % len(kept)], driver.open)


_ACTS = [
    _put,
    _put,
    _plain,
    _begin,
    _deliver,
    _deliver,
    _ack,
    _ack,
    _return,
    _return,
    _die,
    _redrive,
    _extend,
    _cancel,
    _purge,
    _replay,
    _drop,
    _settings,
    _time,
    _reclaim,
]

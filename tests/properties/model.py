"""What a queue is, in a few lists and no files: the model that the real one is held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_RETRIES = 2
MAX_CRASHES = 2


@dataclass
class State:
    """One message as one group sees it."""

    what: str = "ready"  # ready, waiting, leased, done, dead, gone
    order: int = 0
    dc: int = 0
    rc: int = 0
    cc: int = 0
    owner: int | None = None
    result: Any = None
    reason: str | None = None
    redrives: int = 0
    acks: int = 0  # all there ever were: a replay takes none back

    @property
    def open(self) -> bool:
        return self.what in ("ready", "waiting", "leased")

    def ack(self, result: Any) -> None:
        self.what, self.result = "done", result
        self.acks += 1


@dataclass
class Item:
    """One message."""

    id: str
    body: Any
    key: str | None
    priority: int
    headers: dict[str, Any]
    number: int
    groups: dict[str, State] = field(default_factory=dict)
    offset: int | None = None
    cancelled: bool = False


class Topic:
    def __init__(self) -> None:
        self.items: list[Item] = []
        self.groups: dict[str, bool] = {}  # name -> paused
        self.counter = 0
        self.purged = False
        self.latest: set[str] = set()

    def next(self) -> int:
        self.counter += 1
        return self.counter

    def kept(self, task: str) -> Item | None:
        """The message of that id, unless the id is free."""
        for item in reversed(self.items):
            if item.id == task and not item.cancelled:
                if all(s.what == "gone" for s in item.groups.values()):
                    return None
                return item
        return None

    def put(self, task: str, body: Any, options: dict[str, Any]) -> None:
        number = self.next()
        item = Item(
            task,
            body,
            options.get("key"),
            options.get("priority", 0),
            options.get("headers") or {},
            number,
        )
        for group in self.groups:
            what = "waiting" if options.get("delay") else "ready"
            item.groups[group] = State(what, order=number)
        self.items.append(item)

    def add_group(self, group: str, start: str) -> None:
        self.groups[group] = False
        if start == "latest":
            self.latest.add(group)
        for item in self.items:
            if not item.cancelled and start == "earliest":
                item.groups[group] = State("ready", order=item.number)

    def of(self, group: str) -> list[tuple[Item, State]]:
        return [(i, i.groups[group]) for i in self.items if group in i.groups and not i.cancelled]

    def parked(self, group: str, item: Item) -> bool:
        """Behind another of its key."""
        if item.key is None:
            return False
        mine = item.groups[group]
        for other, state in self.of(group):
            if other is item or other.key != item.key or not state.open:
                continue
            if state.what == "leased" or state.order < mine.order:
                return True
        return False

    def status(self, group: str, item: Item) -> str:
        state = item.groups.get(group)
        if item.cancelled or state is None or state.what == "gone":
            return "unknown"
        if state.what in ("done", "dead", "leased"):
            return state.what
        if state.what == "waiting" or self.parked(group, item):
            return "delayed"
        return "ready"

    def candidates(self, group: str, busy: bool) -> list[Item]:
        """What may be delivered to a process; `busy` if it has a suspect in hand already."""
        if self.groups[group]:
            return []
        return [
            item
            for item, state in self.of(group)
            if self.status(group, item) == "ready" and not (busy and state.cc)
        ]

    def picks(self, group: str, busy: bool) -> list[Item]:
        """The one that is next, or the oldest, whose turn comes once in sixteen."""
        ready = self.candidates(group, busy)
        if not ready:
            return []
        first = min(ready, key=lambda i: (-i.priority, i.groups[group].order))
        oldest = min(ready, key=lambda i: i.groups[group].order)
        oldest_put = min(ready, key=lambda i: i.number)
        return [first, oldest, oldest_put]

    def counts(self, group: str) -> tuple[int, int, int, int, int]:
        found = [self.status(group, item) for item, _ in self.of(group)]
        ready, delayed, leased, dead = map(found.count, ("ready", "delayed", "leased", "dead"))
        # Also of what was replayed since, and then cancelled or purged.
        acks = sum(item.groups[group].acks for item in self.items if group in item.groups)
        return ready, delayed, leased, dead, acks

    def end_of_owner(self, owner: int, *, crash: bool) -> None:
        for item in self.items:
            for state in item.groups.values():
                if state.what == "leased" and state.owner == owner:
                    state.owner = None
                    state.what = "ready"
                    if crash:
                        state.cc += 1
                        if state.cc > MAX_CRASHES:
                            state.what = "dead"
                            state.reason = "consumer died"

"""What a drop-in queue has handed out in this process, and whose it is.

Role: finds the item that a call of `task_done` means. An item is bare, and says nothing of itself,
so it is found by who calls: the task or thread that got it, or the context that inherited it.

Invariants:

* An item is out until it is settled. One that a `task_done` is at is not: so no two settle it.
* Calls that no item could be found for are counted. When as many have come as items are out, all of
  these are done, whoever had which; before that nothing says which of them are.
* Nothing that was got before a fork is in the child's hands: it stays the parent's.

It knows no file: `_dropin` settles.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any, TypeAlias

from ._delivery import Lease


class Item:
    """An item that was handed out, or will be: `lease` is None until then."""

    __slots__ = ("beside", "lease", "previous", "settled")

    def __init__(self, previous: Item | None) -> None:
        self.previous = previous
        self.lease: Lease | None = None
        self.beside: Items | None = None  # what is out of the same owner, if it has one
        self.settled = False


# The oldest first, which is found at once however many went before it; of a dict it is not.
Items: TypeAlias = OrderedDict[Item, None]


class Done:
    """A call of `task_done` by `owner`: the items that it takes off and is to settle."""

    def __init__(self, owner: Hashable | None) -> None:
        self.owner = owner
        self.items: list[Item] = []
        self.counted = 0  # what it has added to `HandedOut.counted`
        self.is_counted = False  # it had no item; said once, though its turn may be taken again

    @property
    def leases(self) -> list[Lease]:
        return [item.lease for item in self.items if item.lease is not None]


# The newest item that was asked for in this context. Child tasks and `to_thread` inherit it.
_newest: ContextVar[Item | None] = ContextVar("weclaw_item", default=None)


class HandedOut:
    """What one drop-in queue has handed out. Any thread may call."""

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self.counted = 0  # calls of task_done without an item
        self.out: dict[Item, None] = {}  # handed out, and no `task_done` is at it
        self._owned: weakref.WeakKeyDictionary[Any, Items] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def forget_parents(self) -> None:
        """In a forked child, whose only thread this is: what is out is the parent's."""
        for item in self.out:
            item.settled = True  # so that no context keeps it
        self._begin()

    def asked(self) -> Item:
        """Somebody asks for an item: noted in the context, filled in when he gets it."""
        previous = _newest.get()
        while previous is not None and previous.settled:
            previous = previous.previous
        if previous is not None:
            before = previous.previous
            while before is not None and before.settled:
                before = before.previous
            previous.previous = before
        item = Item(previous)
        _newest.set(item)
        return item

    def got(self, item: Item, lease: Lease, owner: Hashable | None) -> None:
        """He got it."""
        with self._lock:
            item.lease = lease
            if lease.engine.forked:
                item.settled = True  # it was taken before the fork, for the parent
                return
            self.out[item] = None
            if owner is not None:
                item.beside = self._owned.setdefault(owner, OrderedDict())
                item.beside[item] = None

    def unseen(self, leases: list[Lease]) -> None:
        """Nobody has seen the items with these leases."""
        with self._lock:
            for item in [item for item in self.out if item.lease in leases]:
                item.settled = True
                self._remove(item)

    def _remove(self, item: Item) -> None:
        self.out.pop(item, None)
        if item.beside is not None:
            item.beside.pop(item, None)

    def _own(self, owner: Hashable | None) -> Item | None:
        mine = None if owner is None else self._owned.get(owner)
        if mine:
            return next(iter(mine))
        inherited = _newest.get()
        while inherited is not None and inherited not in self.out:
            inherited = inherited.previous
        return inherited

    def choose(self, done: Done) -> None:
        """What this `task_done` settles; nothing when it has to be counted first."""
        with self._lock:
            item = self._own(done.owner)
            if item is not None:
                self._take_off(done, [item])
                self._take_all_off(done)

    def count(self, done: Done) -> None:
        """A `task_done` without an item, which the caller has found to be one of the unfinished."""
        with self._lock:
            done.is_counted = True
            self.counted += 1
            done.counted += 1
            self._take_all_off(done)

    def _take_all_off(self, done: Done) -> None:
        """All that are left, too, when as many calls have come as items are out."""
        if 0 < len(self.out) <= self.counted:
            others = list(self.out)
            self.counted -= len(others)
            done.counted -= len(others)
            self._take_off(done, others)

    def _take_off(self, done: Done, items: list[Item]) -> None:
        done.items += items
        for item in items:
            self._remove(item)

    def look_at_end(self, done: Done, failed: bool) -> None:
        """The turn of a `task_done` is over. What it has not settled, by what the leases say, is as
        it was before: the next call finds it again. A turn that fails after its write has settled.
        """
        with self._lock:
            if failed and all(not lease.over for lease in done.leases):
                self.counted -= done.counted
            for item in reversed(done.items):
                assert item.lease is not None, "it was got"
                if item.lease.over:
                    item.settled = True
                    continue
                self.out[item] = None
                if item.beside is not None:
                    item.beside[item] = None
                    item.beside.move_to_end(item, last=False)


_all: weakref.WeakSet[HandedOut] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for handed_out in list(_all):
        handed_out.forget_parents()


os.register_at_fork(after_in_child=_after_fork_in_child)

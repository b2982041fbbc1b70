"""What the parts of an engine share: the state that more than one of them looks at, made here.

Role: what each part of `Engine` inherits. It has the state that several parts, or those who are
given an engine, look at; what one part alone needs is made by that part. And it says what the parts
ask of each other, so that each can be read by itself.

Invariant: all that an engine consists of is there once it is made, whether it is to write or only
to look (`_readonly`): no part may make more of it later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import TypeVarTuple, Unpack

from . import _locks
from ._index import Index
from ._opening import WRITE, Opened
from ._options import StoreOptions
from ._session import Appended, Session, Several
from ._shared import SharedPage
from ._wake import Timer, Waker
from ._watch import asker_of
from .wal import Log

if TYPE_CHECKING:
    from ._engine import Engine
    from ._index import Tx
    from .errors import StoreFailedError

T = TypeVar("T")
What = TypeVar("What")
Args = TypeVarTuple("Args")


class Part:
    """See the module. Each part makes what is its own after `super().__init__(opened)`."""

    def __init__(self, opened: Opened) -> None:
        # The file, and what belongs to it.
        self.path = opened.path
        self.fd = opened.fd
        self.header = opened.header
        self.directory = opened.directory
        self.page: SharedPage = opened.page
        self.log: Log = opened.log
        self.index: Index = opened.index
        self.shift = opened.page.shift  # what is added to the clock for queue time
        # This process as one of its owners.
        self.slot = opened.slot
        self.token = opened.token
        self.consumer = ""  # its name, in failures and stats
        self.handles = 0
        self.forked = False
        self.closed = False
        # The options of its handles.
        self._adopted: list[StoreOptions] = []
        # What was damaged and made good when the file was opened.
        self.healed: list[tuple[int, str]] = []
        # Who works for it in threads of their own.
        self.waker = Waker(self.directory, self.slot, self.fd)
        self.timer = Timer("weclaw-timer")
        # Apart from the timer, whose thread may be busy with a slow disk.
        self.renewals = Timer("weclaw-renewals")
        self.io: Any = None  # what serves event loops, made by `_io` when first needed
        self.replication: Any = None  # this process's part in feeding the replica, if there is one
        # What a turn takes and looks at first.
        self._lock = threading.Lock()
        self._lock_file, self._unlock_file = _locks.bound_lock(self.fd, WRITE)
        self._has_moved = asker_of(-1)  # whether to look if the file is where it was opened
        self._failure: str | None = None  # why this process has stopped
        # Everything below is on stable storage, as this process knows; `is_late` while that may be
        # more than it has published.
        self.synced = 0
        self.is_late = False
        # What this process wrote last, from one offset to another, and is not in the index yet.
        self._written: list[Appended] = []
        self._written_from = self._written_to = -1
        self._written_until = -1  # beyond this it is too much to be kept
        self._look_at = 0  # from this offset on it is looked whether there is space enough
        self._upkeep_due = False  # upkeep is called soon
        # What is put with `batch` is forced to disk within the interval of each who puts so.
        self.flush_is_due = False
        # What puts know, so as not to look it up.
        self.last_ids = (-1, "")  # how the ids we make are written in a segment, the last one
        self.topics: dict[str, int] = {}  # whose TOPIC record is known to be in the log

    @property
    def whole(self) -> Engine:
        """All parts of it together, for who takes an engine."""
        return cast("Engine", self)

    if TYPE_CHECKING:
        # What a part asks of others; where it is said what these do, by the name of the module.

        # _engine
        def run(
            self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]
        ) -> T: ...
        def run_with(self, operation: Callable[[Session, What], T], what: What) -> T: ...
        def run_once(
            self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]
        ) -> T: ...

        # _durability
        def durable(self, until: int) -> None: ...
        def share_sync(self, until: int) -> bool: ...
        def await_anothers(self, until: int) -> None: ...
        def flush(self) -> None: ...
        def fail(self, what: str, why: int = ...) -> StoreFailedError: ...
        def _check_place(self) -> None: ...
        def check_content(self) -> None: ...
        def check_size(self) -> None: ...

        # _folding
        def catch_up(self, tx: Tx) -> None: ...
        def remember_written(
            self, start: int, tail: int, appended: list[Appended] | Several
        ) -> None: ...

        # _damage
        def heal_met(self) -> None: ...
        def damage_met(self) -> None: ...
        def tell_damage(self, place: int, reason: str) -> None: ...

        # _file_options
        def option(self, name: str) -> Any: ...
        def chose(self, name: str) -> bool: ...

        # _with_replica
        @property
        def replica_timeout(self) -> float: ...
        def on_replica(self, until: int, until_s: float) -> bool: ...
        def _configure_replica(self) -> None: ...

        # _waiting
        def wake(self, slots: Sequence[int], kind: bytes) -> None: ...

        # _upkeep
        def make_room(self, at_most: int = 0) -> int: ...
        @property
        def makes_room(self) -> bool: ...
        def _look_for_space(self, tail: int) -> None: ...
        def _upkeep_soon(self) -> None: ...

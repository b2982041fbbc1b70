"""What an engine has to do with its file's replica: what is promised it, and what it may heal.

Role: the part of the engine that knows whether there is a replica and how far it is, takes part in
feeding it, and asks it for what can't be read here. How it is fed is `_replication`'s, and what a
turn is in a file that has one is `_replicated`'s.

Invariant: no lock is held while the replica is waited for, or asked.

It must not know what travels between the two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from ._format import FENCED
from ._opening import Opened
from ._options import DEFAULTS, StoreOptions
from ._shared import (
    FENCED_BY,
    IS_COPY,
    IS_FENCED,
    REPLICA_AT,
    REPLICA_HIGH,
    REPLICATED,
    REPLICATION,
    SYNC_WANTED,
    WANTED,
    SharedPage,
)
from .errors import ReplicaUnavailableError
from .wal import COMMIT, TAIL

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")

# How long a replica that could not be asked to heal something is left alone.
HEAL_PAUSE_S: Final = 30.0


class WithReplica:
    """What `Engine` inherits for a file that has a replica, or is one."""

    path: str
    page: SharedPage
    closed: bool
    replication: Any
    making: threading.Lock
    option: Callable[[str], Any]
    _adopted: list[StoreOptions]
    _heal_again_s: float
    synced: int

    def replica_lag(self) -> int | None:
        """Bytes that the replica is behind; None without one."""
        words = self.page.words
        if not words[REPLICATION] & WANTED:
            return None
        return max(0, words[TAIL] - words[REPLICA_AT])

    @property
    def replica_timeout(self) -> float:
        """How many seconds a put waits for the replica."""
        for options in reversed(self._adopted):
            if "replica_timeout" in options.given:
                return options.replica_timeout
        return float(DEFAULTS["replica_timeout"])

    @property
    def replicates(self) -> bool:
        """Whether what is promised anything is promised the replica."""
        return bool(self.page.words[REPLICATION] & SYNC_WANTED)

    def is_durable(self, until: int) -> bool:
        """Whether everything below is on stable storage, and on the replica if that is wanted."""
        words = self.page.words
        if words[COMMIT] < until and self.synced < until:
            return False
        return not words[REPLICATION] & SYNC_WANTED or bool(words[REPLICATED] >= until)

    def on_replica(self, until: int, until_s: float) -> bool:
        """Wait until the replica has everything below; False when the time is over."""
        from ._replicated import wait

        return wait(cast("Engine", self), until, until_s)

    def take_back(self, until: int, puts: Sequence[int]) -> ReplicaUnavailableError | None:
        """Take back puts that the replica did not confirm; what to raise. None: it has them."""
        from ._replicated import take_back

        return take_back(cast("Engine", self), until, puts)

    def _configure_replica(self) -> None:
        words = self.page.words
        if self.option("replica") or words[REPLICATION] or words[REPLICA_HIGH]:
            from ._replicated import configure

            configure(cast("Engine", self))

    def heal(self, start: int, end: int, replica: object = None, *, insist: bool = False) -> bool:
        """Put what the replica has in the place of what can't be read between two offsets; True
        when something can be read again. Blocks while the replica is asked, and holds no lock then.

        One that can't be asked is not asked again for a while, except if `insist`: then that raises
        StorageError.
        """
        from ._feeder import normal
        from ._healing import UnreachableError, heal, patience_of, replica_of

        chosen = self._adopted[-1] if self._adopted else None
        address = normal(replica) or replica_of(self.path, chosen)
        if address is None or (time.monotonic() < self._heal_again_s and not insist):
            return False
        try:
            healed = heal(
                cast("Engine", self), address, start, end, patience_of(self.replica_timeout)
            )
        except UnreachableError as error:
            if insist:
                raise
            self._heal_again_s = time.monotonic() + HEAL_PAUSE_S
            logger.warning("%s: damage is not healed: %s", self.path, error)
            return False
        return bool(healed)

    def take_part(self, replication: Any) -> bool:
        """Keep this as the process's part in feeding the replica; False if it has one."""
        with self.making:
            if self.closed or self.replication is not None:
                return False
            self.replication = replication
            return True

    def _take_role(self, opened: Opened) -> None:
        """The file is a replica's copy, or its copy was promoted over it."""
        words = self.page.words
        if opened.role == FENCED:
            words[FENCED_BY] = opened.role_epoch
            words[REPLICATION] |= IS_FENCED
        else:
            words[REPLICATION] |= IS_COPY

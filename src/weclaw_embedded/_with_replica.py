"""What an engine has to do with its file's replica: what is promised it.

Role: the part of the engine that knows whether there is a replica and how far it is, and takes part
in feeding it. How it is fed is `_replication`'s, what a turn is in a file that has one is
`_replicated`'s, and asking it for what can't be read here is `_damage`'s.

Invariant: no lock is held while the replica is waited for.

It must not know what travels between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ._format import FENCED
from ._opening import Opened
from ._options import DEFAULTS
from ._part import Part
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
)
from .errors import ReplicaUnavailableError
from .wal import COMMIT, TAIL


class WithReplica(Part):
    """What `Engine` inherits for a file that has a replica, or is one."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._taking_part = threading.Lock()  # guards `replication`, while it is given

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

        return wait(self.whole, until, until_s)

    def take_back(self, until: int, puts: Sequence[int]) -> ReplicaUnavailableError | None:
        """Take back puts that the replica did not confirm; what to raise. None: it has them."""
        from ._replicated import take_back

        return take_back(self.whole, until, puts)

    def _configure_replica(self) -> None:
        words = self.page.words
        if self.option("replica") or words[REPLICATION] or words[REPLICA_HIGH]:
            from ._replicated import configure

            configure(self.whole)

    def take_part(self, replication: Any) -> bool:
        """Keep this as the process's part in feeding the replica; False if it has one."""
        with self._taking_part:
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

"""Options that belong to the file: recorded in the log, followed by every process.

Role: the part of the engine that records what handles were given and says what holds: argument
(which was recorded), environment, what the file records, default; in that order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

from . import _records
from ._channel import Address, normal
from ._format import FileHeader
from ._opening import Opened
from ._options import DEFAULTS, RECORDED_OPTIONS, StoreOptions, check_option
from ._part import Part
from ._session import SYNC, Session
from ._shared import OPTIONS_SEQ

logger = logging.getLogger("weclaw_embedded")

# What is recorded beside the replica: the store whose replica it is.
REPLICA_OF: Final = "replica_of"
# What the file records for "no limit"; nothing at all stands for the default.
_NO_LIMIT: Final = "none"


def _recorded(value: Any) -> Any:
    """An option as the log holds it."""
    if value is None:
        return _NO_LIMIT
    return list(value) if isinstance(value, tuple) else value


def _believed(name: str, value: Any) -> Any:
    """An option as the log holds it, for use; the default for what makes no sense."""
    if value == _NO_LIMIT:
        return None
    try:
        return check_option(name, value)
    except (ValueError, TypeError) as error:
        logger.warning("the file records an option that makes no sense: %s", error)
        return DEFAULTS[name]


def of_another(recorded: Mapping[str, Any], store_id: bytes) -> bool:
    """Whether the replica that is recorded is that of the file this one is a backup of."""
    whose = recorded.get(REPLICA_OF, store_id)
    return bool(recorded.get("replica")) and whose != store_id


def recorded_replica(recorded: Mapping[str, Any], header: FileHeader) -> Address | None:
    """Where a file records that its replica is; a backup has that of another store in it."""
    if of_another(recorded, header.store_id) or "replica" not in recorded:
        return None
    return normal(_believed("replica", recorded["replica"]))


class FileOptions(Part):
    """What `Engine` inherits to record options and to answer for them."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self.known_options: dict[str, Any] = {}  # what the file records
        self.effective: dict[str, Any] = {}  # what holds here
        self.options_seen = -1  # OPTIONS_SEQ as it was then

    def options(self) -> dict[str, Any]:
        """What the file records of its options, as last changed by any process."""
        if self.options_seen != self.page.words[OPTIONS_SEQ]:
            self.run(Session.options)
        return self.known_options

    def adopt(self, options: StoreOptions, consumer: str) -> None:
        """Take in a new handle's options: record those given for the file.

        Raises ValueError for arguments that contradict those of a handle that is open.
        """
        for other in self._adopted:
            names = options.conflicts(other)
            if names:
                raise ValueError(
                    f"{self.path} is open in this process with another {', '.join(names)}; nothing "
                    "was changed; give the same, or leave it out"
                )
        given: dict[str, Any] = {
            name: _recorded(getattr(options, name))
            for name in RECORDED_OPTIONS
            if name in options.given
        }
        if "replica" in given:
            # So that a backup, which is another store, does not take it for its own.
            given[REPLICA_OF] = self.header.store_id
        if given:
            self.change_options(given, SYNC)
        self._adopted.append(options)
        self.flush_is_due = False  # for this one it may be due too late
        try:
            self._follow_adopted(consumer)
        except BaseException:
            self.forsake(options)  # else the next handle is held against one that never was
            raise

    def _follow_adopted(self, consumer: str) -> None:
        """What holds by now, with the last handle that was adopted, and what comes of it."""
        self.know_options(self.known_options)
        if of_another(self.options(), self.header.store_id) and not self.option("replica"):
            logger.warning(
                "%s is a backup of a queue that had a replica, and has none itself: name a new "
                "place for it with replica=, where there is no file yet, or give replica=False",
                self.path,
            )
        self.consumer = self.consumer or consumer
        self.heal_met()  # it may be another replica than before; before its copy may be made anew
        self._configure_replica()

    def forsake(self, options: StoreOptions) -> None:
        """A handle that was adopted has closed."""
        with contextlib.suppress(ValueError):
            self._adopted.remove(options)
            self.know_options(self.known_options)

    def option(self, name: str) -> Any:
        """An option of the file as it holds for this process: argument (which was recorded),
        environment, what the file records, default; in that order.
        """
        if self.options_seen != self.page.words[OPTIONS_SEQ]:
            self.run(Session.options)
        return self.effective[name]

    def know_options(self, recorded: dict[str, Any], seen: int | None = None) -> None:
        """Take in what the file records, and with it what holds here."""
        self.known_options = recorded
        if seen is not None:
            self.options_seen = seen
        chosen = self._adopted[-1] if self._adopted else None
        effective: dict[str, Any] = {}
        if of_another(recorded, self.header.store_id):
            recorded = {name: value for name, value in recorded.items() if name != "replica"}
        for name in RECORDED_OPTIONS:
            if chosen is not None and name in chosen.environment:
                effective[name] = getattr(chosen, name)
            else:
                said = name in recorded
                effective[name] = _believed(name, recorded[name]) if said else DEFAULTS[name]
        self.effective = effective

    def change_options(self, values: Mapping[str, Any], policy: int) -> None:
        """Record options of the file."""

        def change(session: Session) -> None:
            known = session.options()
            new = {name: value for name, value in values.items() if known.get(name) != value}
            if new:
                session.append([_records.pack_option(new)], policy)
                session.must_sync |= policy >= SYNC
                session.page.words[OPTIONS_SEQ] += 1

        self.run(change)

    def chose(self, name: str) -> bool:
        """Whether a handle of this process gave the option, or its environment does."""
        return any(options.chosen(name) for options in self._adopted)

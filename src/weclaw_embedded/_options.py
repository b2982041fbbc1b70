"""Options: checked, filled from the environment and frozen, in one place, before any file is made.

An option's value is the argument, else the environment's, else what the file records (only for
FILE_OPTIONS), else the default.  Nothing here opens a file: `store_options` and `queue_options`
settle the first two and remember which option came from where; `_file_options` adds the third.

Every variable is read in two spellings, `WECLAW_…` and `WEBCLAW_…`; the first wins.  Only the
variables of options that the caller left out are looked at.  A bad value is a ValueError that
names the variable as it was spelled.
"""

from __future__ import annotations

import enum
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from . import _checks
from ._checks import check_count, check_name, check_seconds, check_timeout, parse_seconds
from ._codecs import AnyCodec

__all__ = [
    "DEFAULTS",
    "FILE_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "QUEUE_NAMES",
    "RECORDED_OPTIONS",
    "UNSET",
    "QueueOptions",
    "RetryPolicy",
    "StoreOptions",
    "Unset",
    "check_count",
    "check_name",
    "check_names",
    "check_option",
    "check_seconds",
    "check_timeout",
    "parse_seconds",
    "queue_options",
    "store_options",
]

MAX_MESSAGE_BYTES: Final = 2**30

FILE_OPTIONS: Final = (
    "retention",
    "retention_bytes",
    "max_bytes",
    "max_message_bytes",
    "segment_bytes",
    "replica",
    "sync_replica",
)
"""Options that belong to the file: recorded when given, inherited when left out."""

RECORDED_OPTIONS: Final = tuple(name for name in FILE_OPTIONS if name != "segment_bytes")
"""Those recorded in the log; the size of segments stands in the file's header."""


class Unset(enum.Enum):
    """The type of UNSET, which stands for an argument that was left out."""

    UNSET = "left out"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
_LEFT_OUT: Final[Any] = UNSET  # of a field, whose type is that of what it is filled with


def _retry(name: str, value: Any) -> RetryPolicy:
    if not isinstance(value, RetryPolicy):
        raise TypeError(f"{name} must be a RetryPolicy, not {value!r}")
    return value


# The tables.


class _Option(NamedTuple):
    name: str
    default: Any
    check: Callable[[str, Any], Any]
    variable: str | None = None  # without its prefix
    parse: Callable[[str], Any] = str
    none_is_left_out: bool = False  # elsewhere None is a choice, such as "no limit"


_RETRY: Final = (
    _Option("max_retries", 3, _checks.count_of(0), "MAX_RETRIES", _checks.parse_int),
    _Option("backoff", 5.0, check_seconds, "RETRY_BACKOFF", parse_seconds),
    _Option("multiplier", 2.0, _checks.factor, "RETRY_BACKOFF_MULTIPLIER", _checks.parse_float),
    _Option("max_backoff", 60.0, check_seconds, "RETRY_BACKOFF_MAX", parse_seconds),
    _Option("jitter", 0.0, _checks.share),
    _Option("max_crashes", 3, _checks.count_of(0)),
)

_STORE: Final = (
    _Option("flush", "sync", _checks.one_of("sync", "batch", "os"), "FLUSH_MODE", str.lower),
    _Option("flush_interval_ms", 500, _checks.interval_ms, "FLUSH_INTERVAL_MS", _checks.parse_ms),
    _Option("flush_messages", 1000, _checks.count_of(1), "FLUSH_MESSAGES", _checks.parse_int),
    _Option("retention", 48 * 3600.0, _checks.retention, "RETENTION", parse_seconds),
    _Option("retention_bytes", 256 * 2**20, _checks.optional(_checks.count_of(0, 2**63 - 1))),
    _Option("max_bytes", None, _checks.optional(_checks.count_of(1, 2**63 - 1))),
    _Option("max_message_bytes", 16 * 2**20, _checks.count_of(1, MAX_MESSAGE_BYTES)),
    _Option("segment_bytes", None, _checks.segment_bytes, none_is_left_out=True),
    _Option("codec", "msgpack", _checks.codec),
    _Option("replica", None, _checks.replica, "REPLICA", none_is_left_out=True),
    _Option("sync_replica", True, _checks.flag, "SYNC_REPLICA", _checks.parse_switch),
    _Option("replica_timeout", 5.0, _checks.positive_seconds),
    _Option("readonly", False, _checks.flag),
    _Option("consumer", None, _checks.optional(check_name)),
)

_QUEUE: Final = (
    _Option("topic", "default", check_name),
    _Option("group", "default", check_name),
    _Option("maxsize", 0, _checks.maxsize),
    _Option("visibility_timeout", 60.0, _checks.optional(_checks.positive_seconds)),
    _Option("retry", None, _retry),
    _Option("on_dead", None, _checks.optional(_checks.function)),
    _Option("start", "earliest", _checks.start),
)


DEFAULTS: Final = {option.name: option.default for option in _STORE}
"""What holds when neither caller nor environment nor file says anything."""


QUEUE_NAMES: Final = frozenset(option.name for option in _QUEUE)
"""The options of a queue."""


def check_names(
    caller: str, options: Mapping[str, Any], more: frozenset[str] = frozenset()
) -> None:
    """Refuse options that neither the store nor `more` has, in the name of what was called."""
    for name in options:
        if name not in DEFAULTS and name not in more:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


_CHECKS: Final = {option.name: option.check for option in _STORE}


def check_option(name: str, value: Any) -> Any:
    """A value of an option of the store, checked; raises ValueError or TypeError."""
    return _CHECKS[name](name, value)


def _variable(suffix: str) -> tuple[str, str] | None:
    """(name as spelled, text) of a variable that is set."""
    for prefix in ("WECLAW_", "WEBCLAW_"):
        text = os.environ.get(prefix + suffix)
        if text is not None:
            return prefix + suffix, text
    return None


def _from_environment(option: _Option) -> Any:
    found = None if option.variable is None else _variable(option.variable)
    if found is None:
        return UNSET
    spelled, text = found
    try:
        value = option.parse(text.strip())
    except ValueError as error:
        why = f"{error}"
    else:
        try:
            return option.check("it", value)
        except (ValueError, TypeError) as error:
            why = f"makes no sense: {error}"
    raise ValueError(
        f"the environment variable {spelled}={text!r} {why}; nothing was opened; correct or unset "
        "it"
    )


def _settle(
    table: tuple[_Option, ...], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str], frozenset[str]]:
    """(values, names given as arguments, names found in the environment)."""
    unknown = set(arguments).difference(option.name for option in table)
    if unknown:
        raise TypeError(f"unexpected option {', '.join(sorted(map(repr, unknown)))}")
    values: dict[str, Any] = {}
    given = set()
    environment = set()
    for option in table:
        value = arguments.get(option.name, UNSET)
        if value is not UNSET and not (value is None and option.none_is_left_out):
            values[option.name] = option.check(option.name, value)
            given.add(option.name)
            continue
        value = _from_environment(option)
        if value is not UNSET:
            values[option.name] = value
            environment.add(option.name)
        else:
            values[option.name] = option.default
    return values, frozenset(given), frozenset(environment)


@dataclass(frozen=True)
class RetryPolicy:
    """When a failed delivery is tried again, and when the message is given up.

    Attributes:
        max_retries: Deliveries that may fail after the first before the message is dead.
        backoff: Seconds to wait before the first retry.
        multiplier: By how much each further wait is longer, at least 1.
        max_backoff: The longest wait in seconds, before jitter. It holds for the first wait too: a
            `backoff` beyond it waits `max_backoff`, whichever of the two was left out.
        jitter: The share (0 to 1) by which a wait is lengthened or shortened at most.
        max_crashes: Deaths of its consumer that a message may be in before it is dead.

    What is left out is filled from the environment as it is then, and else is 3, 5.0, 2.0, 60.0,
    0.0 and 3.

    Raises ValueError or TypeError for values that make no sense.
    """

    max_retries: int = _LEFT_OUT
    backoff: float = _LEFT_OUT
    multiplier: float = _LEFT_OUT
    max_backoff: float = _LEFT_OUT
    jitter: float = _LEFT_OUT
    max_crashes: int = _LEFT_OUT

    def __post_init__(self) -> None:
        for option in _RETRY:
            value: Any = getattr(self, option.name)
            if value is UNSET:
                value = _from_environment(option)
                if value is UNSET:
                    value = option.default
            else:
                value = option.check(option.name, value)
            object.__setattr__(self, option.name, value)

    def delay(self, retry_number: int) -> float:
        """Seconds to wait before retry `retry_number` (1 is the first). Raises ValueError or
        TypeError for what is no such number.
        """
        return self._delay(check_count("retry_number", retry_number, 1))

    def _delay(self, retry_number: int) -> float:
        try:
            wait = self.backoff * self.multiplier ** (retry_number - 1)
        except OverflowError:
            wait = self.max_backoff if self.backoff else 0.0
        wait = min(wait, self.max_backoff)
        if self.jitter:
            wait *= random.uniform(1 - self.jitter, 1 + self.jitter)
        return wait


@dataclass(frozen=True)
class StoreOptions:
    """The options of one open file, as its caller and the environment want them."""

    flush: str
    flush_interval_ms: float
    flush_messages: int
    retention: float | None
    retention_bytes: int | None
    max_bytes: int | None
    max_message_bytes: int
    segment_bytes: int | None  # None: the file's, or the default for a new file
    codec: AnyCodec
    replica: str | tuple[str, ...] | bool | None  # False: forget the recorded one
    sync_replica: bool
    replica_timeout: float
    readonly: bool
    consumer: str | None
    given: frozenset[str]
    environment: frozenset[str]

    def chosen(self, name: str) -> bool:
        """Whether the option was given as an argument or by the environment."""
        return name in self.given or name in self.environment

    def conflicts(self, other: StoreOptions) -> list[str]:
        """Names of the file's options that both gave as arguments and gave differently."""
        both = self.given & other.given
        return [
            name
            for name in FILE_OPTIONS
            if name in both and getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class QueueOptions:
    """The options of one queue: a topic as one consumer group sees it."""

    topic: str
    group: str
    maxsize: int  # 0: no limit
    visibility_timeout: float | None  # None: until settled or the process dies
    retry: RetryPolicy
    on_dead: Callable[..., Any] | None
    start: str | int
    given: frozenset[str]


def store_options(arguments: Mapping[str, Any]) -> StoreOptions:
    """Check a caller's arguments (UNSET for what was left out) and fill from the environment.

    Raises ValueError or TypeError naming the argument, ValueError naming the variable.
    """
    values, given, environment = _settle(_STORE, arguments)
    return StoreOptions(**values, given=given, environment=environment)


def queue_options(arguments: Mapping[str, Any]) -> QueueOptions:
    """Check a caller's arguments (UNSET for what was left out) and fill from the environment.

    Raises ValueError or TypeError naming the argument, ValueError naming the variable.
    """
    values, given, _ = _settle(_QUEUE, arguments)
    if values["retry"] is None:
        values["retry"] = RetryPolicy()
    return QueueOptions(**values, given=given)

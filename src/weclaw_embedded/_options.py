"""Options: checked, filled from the environment and frozen, in one place, before any file is made.

An option's value is the argument, else the environment's, else what the file records (only for
FILE_OPTIONS), else the default.  Nothing here opens a file: `store_options` and `queue_options`
settle the first two and remember which option came from where, and `StoreOptions.with_recorded`
adds the third.

Every variable is read in two spellings, `WECLAW_…` and `WEBCLAW_…`; the first wins.  Only the
variables of options that the caller left out are looked at.  A bad value is a ValueError that
names the variable as it was spelled.
"""

from __future__ import annotations

import enum
import math
import numbers
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, cast

from weclaw_embedded._codecs import AnyCodec, check_codec

__all__ = [
    "DEFAULTS",
    "FILE_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_BYTES",
    "MAX_SECONDS",
    "MAX_SEGMENT_BYTES",
    "MIN_SEGMENT_BYTES",
    "RECORDED_OPTIONS",
    "UNSET",
    "QueueOptions",
    "RetryPolicy",
    "StoreOptions",
    "Unset",
    "check_count",
    "check_name",
    "check_option",
    "check_seconds",
    "check_timeout",
    "queue_options",
    "store_options",
]

MAX_SECONDS: Final = 100 * 365.25 * 86400
"""Longest wait, lease or age that can be asked for; a clock in nanoseconds holds 292 years."""

MAX_NAME_BYTES: Final = 255
"""Length of the name of a topic, a group or a consumer, in UTF-8."""

MAX_MESSAGE_BYTES: Final = 2**30
MIN_SEGMENT_BYTES: Final = 2**16
MAX_SEGMENT_BYTES: Final = 2**30

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


# Checks. Each takes the option's name and its value and returns the value to be used.


def check_seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """A duration in seconds: finite, not negative, at most MAX_SECONDS."""
    seconds = _real(name, value)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{name} must be 0 to {MAX_SECONDS:.0f} seconds, not {value!r}")
    if positive and seconds == 0:
        raise ValueError(f"{name} must be more than 0 seconds")
    return seconds


def check_timeout(name: str, value: Any) -> float | None:
    """How long to wait: None for ever (infinity too), else seconds, not negative."""
    if value is None:
        return None
    seconds = _real(name, value, infinite=True)
    if seconds < 0:
        raise ValueError(f"{name} must not be negative, not {value!r}")
    return seconds if seconds <= MAX_SECONDS else None


def check_count(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    count = int(value)
    if count < low or (high is not None and count > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} must be {bounds}, not {value!r}")
    return count


def check_name(name: str, value: Any) -> str:
    """The name of a topic, group or consumer: not empty, at most MAX_NAME_BYTES in UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{name} can't be written in UTF-8: {value!r}") from None
    if not 1 <= size <= MAX_NAME_BYTES or "\0" in value:
        raise ValueError(
            f"{name} must have 1 to {MAX_NAME_BYTES} bytes in UTF-8 and no NUL, not {value[:80]!r}"
        )
    return value


def _real(name: str, value: Any, *, infinite: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if cast(int, value) > 0 else -math.inf
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {value!r}")
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")
        return value

    return check


def _count(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    return lambda name, value: check_count(name, value, low, high)


def _positive_seconds(name: str, value: Any) -> float:
    return check_seconds(name, value, positive=True)


def _factor(name: str, value: Any) -> float:
    factor = _real(name, value)
    if factor < 1:
        raise ValueError(f"{name} must be at least 1, not {value!r}")
    return factor


def _share(name: str, value: Any) -> float:
    share = _real(name, value)
    if not 0 <= share <= 1:
        raise ValueError(f"{name} must be 0 to 1, not {value!r}")
    return share


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _interval_ms(name: str, value: Any) -> float:
    interval = _real(name, value)
    if not 0 < interval <= 86_400_000:
        raise ValueError(f"{name} must be more than 0 ms and at most a day, not {value!r}")
    return interval


def _retention(name: str, value: Any) -> float | None:
    seconds = check_timeout(name, value)
    return None if seconds is None else check_seconds(name, seconds)


def _segment_bytes(name: str, value: Any) -> int:
    size = check_count(name, value, MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES)
    if size & (size - 1):
        raise ValueError(
            f"{name} must be a power of two from {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES}, "
            f"not {value!r}"
        )
    return size


def _codec(name: str, value: Any) -> AnyCodec:
    return check_codec(value)


def _replica(name: str, value: Any) -> str | tuple[str, ...] | bool:
    if value is False:
        return False
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        if not path or "\0" in path:
            raise ValueError(f"{name} must name a file, not {value!r}")
        return os.path.abspath(path)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        if not value or not all(isinstance(word, str) and "\0" not in word for word in value):
            raise ValueError(f"{name} as a command must be one or more str, not {value!r}")
        if not value[0]:
            raise ValueError(f"{name} as a command must begin with a program, not {value!r}")
        return tuple(value)
    raise TypeError(f"{name} must be a path, a command as a list of str, or False, not {value!r}")


def _maxsize(name: str, value: Any) -> int:
    return max(0, check_count(name, value, -(2**63), 2**63 - 1))


def _retry(name: str, value: Any) -> RetryPolicy:
    if not isinstance(value, RetryPolicy):
        raise TypeError(f"{name} must be a RetryPolicy, not {value!r}")
    return value


def _callable(name: str, value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
    return cast("Callable[..., Any]", value)


def _start(name: str, value: Any) -> str | int:
    if isinstance(value, str):
        return _one_of("earliest", "latest")(name, value)
    return check_count(name, value, 0, 2**56 - 1)


# Texts of the environment. Each parser returns what the check takes, or raises ValueError.

_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")
_SWITCHES: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def parse_seconds(text: str, plain: float = 1.0) -> float:
    match = _DURATION.fullmatch(text.lower())
    unit = plain if match and not match[2] else match and _UNITS.get(match[2])
    if not match or not unit:
        raise ValueError("is not a duration; write 5s, 500ms, 48h or a plain number")
    # Division keeps 500ms at exactly 0.5, which 500 * 1e-3 would not for every number.
    return float(match[1]) * unit if unit >= 1 else float(match[1]) / round(1 / unit)


def _parse_ms(text: str) -> float:
    return parse_seconds(text, plain=1e-3) * 1000


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError("is not a whole number")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("is not a number") from None


def _parse_switch(text: str) -> bool:
    try:
        return _SWITCHES[text.lower()]
    except KeyError:
        raise ValueError(
            "is not a switch; write 1 or 0, true or false, yes or no, on or off"
        ) from None


# The tables.


class _Option(NamedTuple):
    name: str
    default: Any
    check: Callable[[str, Any], Any]
    variable: str | None = None  # without its prefix
    parse: Callable[[str], Any] = str
    none_is_left_out: bool = False  # elsewhere None is a choice, such as "no limit"


_RETRY: Final = (
    _Option("max_retries", 3, _count(0), "MAX_RETRIES", _parse_int),
    _Option("backoff", 5.0, check_seconds, "RETRY_BACKOFF", parse_seconds),
    _Option("multiplier", 2.0, _factor, "RETRY_BACKOFF_MULTIPLIER", _parse_float),
    _Option("max_backoff", 60.0, check_seconds, "RETRY_BACKOFF_MAX", parse_seconds),
    _Option("jitter", 0.0, _share),
    _Option("max_crashes", 3, _count(0)),
)

_STORE: Final = (
    _Option("flush", "sync", _one_of("sync", "batch", "os"), "FLUSH_MODE", str.lower),
    _Option("flush_interval_ms", 500, _interval_ms, "FLUSH_INTERVAL_MS", _parse_ms),
    _Option("flush_messages", 1000, _count(1), "FLUSH_MESSAGES", _parse_int),
    _Option("retention", 48 * 3600.0, _retention, "RETENTION", parse_seconds),
    _Option("retention_bytes", 256 * 2**20, _optional(_count(0, 2**63 - 1))),
    _Option("max_bytes", None, _optional(_count(1, 2**63 - 1))),
    _Option("max_message_bytes", 16 * 2**20, _count(1, MAX_MESSAGE_BYTES)),
    _Option("segment_bytes", None, _segment_bytes, none_is_left_out=True),
    _Option("codec", "msgpack", _codec),
    _Option("replica", None, _replica, "REPLICA", none_is_left_out=True),
    _Option("sync_replica", True, _flag, "SYNC_REPLICA", _parse_switch),
    _Option("replica_timeout", 5.0, _positive_seconds),
    _Option("readonly", False, _flag),
    _Option("consumer", None, _optional(check_name)),
)

_QUEUE: Final = (
    _Option("topic", "default", check_name),
    _Option("group", "default", check_name),
    _Option("maxsize", 0, _maxsize),
    _Option("visibility_timeout", 60.0, _optional(_positive_seconds)),
    _Option("retry", None, _retry),
    _Option("on_dead", None, _optional(_callable)),
    _Option("start", "earliest", _start),
)


DEFAULTS: Final = {option.name: option.default for option in _STORE}
"""What holds when neither caller nor environment nor file says anything."""


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
        return option.check(spelled, option.parse(text.strip()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the environment variable {spelled}={text!r}: {error}; nothing was opened; "
            "correct or unset it"
        ) from None


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
        max_backoff: The longest wait in seconds.
        jitter: The share (0 to 1) by which a wait is lengthened or shortened at most.
        max_crashes: Deaths of its consumer that a message may be in before it is dead.

    Raises ValueError or TypeError for values that make no sense.
    """

    max_retries: int = 3
    backoff: float = 5.0
    multiplier: float = 2.0
    max_backoff: float = 60.0
    jitter: float = 0.0
    max_crashes: int = 3

    def __post_init__(self) -> None:
        for option in _RETRY:
            value = option.check(option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)

    def delay(self, retry_number: int) -> float:
        """Seconds to wait before retry `retry_number` (1 is the first)."""
        try:
            wait = self.backoff * self.multiplier ** max(0, retry_number - 1)
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

    def with_recorded(self, recorded: Mapping[str, Any]) -> StoreOptions:
        """The same with what the file records, for what nobody chose.

        Raises ValueError for another `segment_bytes` than the file's.
        """
        size = recorded.get("segment_bytes")
        if size is not None and self.chosen("segment_bytes") and self.segment_bytes != size:
            raise ValueError(
                f"segment_bytes={self.segment_bytes} was asked for, but the file was made with "
                f"{size}, which can't be changed; leave it out"
            )
        changes = {
            name: recorded[name]
            for name in FILE_OPTIONS
            if name in recorded and not self.chosen(name)
        }
        return replace(self, **changes)

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

    def conflicts(self, other: QueueOptions) -> list[str]:
        """Names of the options that both gave as arguments and gave differently."""
        names = {field.name for field in fields(self)} - {"given"}
        both = self.given & other.given & names
        return sorted(name for name in both if getattr(self, name) != getattr(other, name))


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
        values["retry"] = RetryPolicy(**_settle(_RETRY, {})[0])
    return QueueOptions(**values, given=given)

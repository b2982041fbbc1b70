"""What an option may be: checks of values, and of texts what they stand for.

Each check takes the option's name and its value and returns the value to be used; it raises
ValueError or TypeError that names the option.  A parser makes of a text what the check takes.

This module must not know which options there are.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from ._codecs import AnyCodec, check_codec
from ._format import check_segment_bytes

MAX_SECONDS: Final = 100 * 365.25 * 86400
"""Longest wait, lease or age that can be asked for; a clock in nanoseconds holds 292 years."""

MAX_NAME_BYTES: Final = 255
"""Length of the name of a topic, a group or a consumer, in UTF-8."""


def check_seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """A duration in seconds: finite, not negative, at most MAX_SECONDS."""
    seconds = _real(name, value)
    if not 0 <= seconds <= MAX_SECONDS or (positive and seconds == 0):
        bounds = (
            f"more than 0 and at most {MAX_SECONDS:.0f}" if positive else f"0 to {MAX_SECONDS:.0f}"
        )
        raise ValueError(f"{name} must be {bounds} seconds, not {value!r}")
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


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that counts as one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def one_of(*choices: str) -> Callable[[str, Any], str]:
    """Return what checks that a text is one of these."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {value!r}")
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")
        return value

    return check


def count_of(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    """Return what checks a whole number within bounds."""
    return lambda name, value: check_count(name, value, low, high)


def positive_seconds(name: str, value: Any) -> float:
    """A duration that is more than none."""
    return check_seconds(name, value, positive=True)


def factor(name: str, value: Any) -> float:
    """By how much something grows: at least 1."""
    factor = _real(name, value)
    if factor < 1:
        raise ValueError(f"{name} must be at least 1, not {value!r}")
    return factor


def share(name: str, value: Any) -> float:
    """A part of a whole: 0 to 1."""
    share = _real(name, value)
    if not 0 <= share <= 1:
        raise ValueError(f"{name} must be 0 to 1, not {value!r}")
    return share


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return what lets None through and checks the rest."""
    return lambda name, value: None if value is None else check(name, value)


def interval_ms(name: str, value: Any) -> float:
    """Milliseconds between two flushes."""
    interval = _real(name, value)
    if not 0 < interval <= 86_400_000:
        raise ValueError(f"{name} must be more than 0 ms and at most a day, not {value!r}")
    return interval


def retention(name: str, value: Any) -> float | None:
    """How long something is kept, in seconds: None for ever."""
    seconds = check_timeout(name, value)
    return None if seconds is None else check_seconds(name, seconds)


def segment_bytes(name: str, value: Any) -> int:
    """The size of segments a file can have."""
    return check_segment_bytes(check_count(name, value, 0))


def codec(name: str, value: Any) -> AnyCodec:
    """What makes bytes of bodies."""
    return check_codec(value)


def replica(name: str, value: Any) -> str | tuple[str, ...] | bool:
    """Where the second copy is: a path, a command, or False for none."""
    if value is False:
        return False
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        if not path or "\0" in path:
            raise ValueError(f"{name} must name a file, not {value!r}")
        if os.path.basename(path) in ("", ".", ".."):
            raise ValueError(f"{name} must name a file, not the folder {value!r}")
        place = os.path.abspath(path)
        _must_be_recordable(name, place)
        return place
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        if not value or not all(isinstance(word, str) and "\0" not in word for word in value):
            raise ValueError(f"{name} as a command must be one or more str, not {value!r}")
        if not value[0]:
            raise ValueError(f"{name} as a command must begin with a program, not {value!r}")
        _must_be_recordable(name, *value)
        return tuple(value)
    raise TypeError(f"{name} must be a path, a command as a list of str, or False, not {value!r}")


def _must_be_recordable(name: str, *words: str) -> None:
    """Raise ValueError for what the log, whose text is UTF-8, can't hold: the name of a file may
    be any bytes.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is recorded and so must be UTF-8, not {word!r}") from None


def maxsize(name: str, value: Any) -> int:
    """How many messages may wait; less than 1 is no limit."""
    return max(0, check_count(name, value, -(2**63), 2**63 - 1))


def function(name: str, value: Any) -> Callable[..., Any]:
    """What can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {value!r}")
    return cast("Callable[..., Any]", value)


def start(name: str, value: Any) -> str | int:
    """Where a group begins."""
    told = f"{name} must be 'earliest', 'latest' or an offset, not {value!r}"
    if isinstance(value, str):
        if value not in ("earliest", "latest"):
            raise ValueError(told)
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(told)
    return check_count(name, value, 0, 2**56 - 1)


# Texts of the environment. Each parser returns what the check takes, or raises ValueError.

_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")
_SWITCHES: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def parse_seconds(text: str, plain: float = 1.0) -> float:
    """A duration in seconds, of a text with a unit; `plain`: what a number without one counts."""
    match = _DURATION.fullmatch(text.lower())
    unit = plain if match and not match[2] else match and _UNITS.get(match[2])
    if not match or not unit:
        raise ValueError("is not a duration; write 5s, 500ms, 48h or a plain number")
    # Division keeps 500ms at exactly 0.5, which 500 * 1e-3 would not for every number.
    return float(match[1]) * unit if unit >= 1 else float(match[1]) / round(1 / unit)


def parse_ms(text: str) -> float:
    """A duration in milliseconds."""
    return parse_seconds(text, plain=1e-3) * 1000


def parse_int(text: str) -> int:
    """A whole number."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError("is not a whole number of at most 18 digits")
    return int(text)


def parse_float(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("is not a number") from None


def parse_switch(text: str) -> bool:
    """A switch, by any of its names."""
    try:
        return _SWITCHES[text.lower()]
    except KeyError:
        raise ValueError(
            "is not a switch; write 1 or 0, true or false, yes or no, on or off"
        ) from None

"""The values that a message can hold, to bytes and back: what comes back is equal, or was refused.

The rules of msgpack here are stricter than those of the msgpack library, which packs some things
that it can't read back or that come back as something else:

- A tuple is an array whose first element is the extension (2, b""), which nothing else can be.
- An aware datetime is the extension (1, text), where text is its ISO 8601 form with UTC offset,
  followed by `[Zone/Name]` when it belongs to a named zone (as RFC 9557 writes it).  The zone
  matters: in the hour that a change of clocks repeats, Python holds a zone's time equal to none
  with a fixed offset.
- Keys of dicts are str, bytes, int, bool or None.
- A subclass of these types is written as the plain type if that is equal to it, else refused.
- Nesting is limited to MAX_NESTING, which every version of the decoder can read.

What is packed is checked by a walk over types, not by decoding it again, which would cost a fifth
of put_many.  This module knows nothing of messages, codecs, files or limits on size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, Final

import msgpack

from weclaw_embedded.errors import SerializationError

__all__ = [
    "MAX_NESTING",
    "faults",
    "int_fault",
    "pack_value",
    "pack_values",
    "refused_at",
    "str_fault",
    "type_name",
    "unpack_value",
    "words",
]

MAX_NESTING: Final = 500
"""Levels of containers in a body.  msgpack's packer gives up at 511 in some versions, its decoder
at 1024, and Python compares and prints nested values with recursion of about 1000."""

_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1
_KEPT_PACKER_BYTES: Final = 1 << 20
_MAX_DATETIME_BYTES: Final = 160

_EXT_DATETIME: Final = 1
_EXT_TUPLE: Final = 2


class _TupleMark:
    """What the extension (2, b"") is read as: the first element of what was a tuple."""

    __slots__ = ()


_MARK: Final = _TupleMark()
_MARK_EXT: Final = msgpack.ExtType(_EXT_TUPLE, b"")

_NONE: Final = type(None)
# What the packer writes as it is.  datetime is here because the packer has handed it to _plain.
_SCALARS: Final = frozenset((str, int, float, bool, bytes, _NONE, datetime))
_KEYS: Final = frozenset((str, bytes, int, bool, _NONE))
_KEY_BASES: Final = (str, bytes, int)
_DICTS: Final = frozenset((dict,))
_STRS: Final = frozenset((str,))
# What the packer raises for what it does not take.
_NOT_PACKED: Final = (TypeError, ValueError, OverflowError, RecursionError)


class _Refused(TypeError):
    """Raised inside the packer; _explain finds the place and the words."""


def _new_packer() -> Any:
    return msgpack.Packer(default=_plain, strict_types=True, use_bin_type=True)


# Packers not in use.  One is taken out while it works, so that neither another thread nor a put
# made from within (a signal handler, a finalizer) finds it in the middle of a value.
_packers: list[Any] = []


def pack_value(value: Any, what: str = "body") -> bytes:
    """Pack by the rules of msgpack; `what` names the value in an error."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = _new_packer()
    try:
        data: bytes = packer.pack(value)
    except _NOT_PACKED as error:
        raise _refusal(value, what, str(error)) from None
    # A packer keeps the memory of the largest value it has packed.
    if len(data) <= _KEPT_PACKER_BYTES:
        _packers.append(packer)
    if type(value) is dict:
        for key, child in value.items():
            if type(key) is not str or type(child) not in _SCALARS:
                break
        else:
            return data  # the usual task: a dict of scalars
    if not _are_sound((value,)):
        raise _refusal(value, what, "it does not come back equal")
    return data


def pack_values(values: Sequence[Any]) -> list[bytes]:
    """Pack bodies, each as `pack_value` does, in steps over all of them."""
    try:
        packed = [*map(_new_packer().pack, values)]
    except _NOT_PACKED:
        packed = []
    if len(packed) == len(values) and (_are_plain(values) or _are_sound(values)):
        return packed
    return [*map(pack_value, values)]  # which says what is wrong, and where


def unpack_value(data: bytes | memoryview) -> Any:
    """Unpack what `pack_value` made; SerializationError for anything else."""
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            ext_hook=_read_extension,
            list_hook=_read_list,
            timestamp=3,
        )
    except (
        ValueError,
        TypeError,  # an unhashable key
        OverflowError,
        RecursionError,
        msgpack.UnpackException,
    ) as error:
        raise _unreadable(error) from error
    except MemoryError as error:
        # The machine is short of it, which says nothing against the bytes; or arrays in arrays
        # announce what is not there, and memory is taken for each.
        if _is_whole(data):
            raise
        raise _unreadable(error) from error


def _unreadable(error: BaseException) -> SerializationError:
    return SerializationError(
        f"the bytes can't be read as msgpack ({words(error)}); the message is as it was; "
        "settle it (fail sets it aside), or read it with what wrote it"
    )


def _is_whole(data: bytes | memoryview) -> bool:
    """Whether all that the bytes announce is there; nothing is made of it. Raises MemoryError."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.UnpackException):
        return False
    return bool(unpacker.tell() == len(data))


def _are_plain(values: Sequence[Any]) -> bool:
    """Whether all are dicts of scalars with keys of str, in four looks at all that is in them.

    The union of the keys has one of each that are equal. No harm: of what the packer took, only
    what is a str itself is equal to one.
    """
    return (
        _DICTS.issuperset(map(type, values))
        and _STRS.issuperset(map(type, set().union(*values)))
        and _SCALARS.issuperset({type(child) for value in values for child in value.values()})
    )


def _are_sound(values: Sequence[Any]) -> bool:
    """Whether all that the packer took is among the types that come back as they are.

    The packer has been through the values already, so there are no cycles here.
    """
    level = values
    for _ in range(MAX_NESTING):
        deeper: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _SCALARS:
                continue
            if isinstance(item, dict):
                if not _KEYS.issuperset(map(type, item)) and not all(map(_is_key, item)):
                    return False
                children: Any = item.values()
            elif isinstance(item, (list, tuple)):
                if kind is msgpack.ExtType or kind is msgpack.Timestamp:
                    return False
                children = item
            elif isinstance(item, (str, int, float, bytes, datetime)):
                continue  # a subclass, which _plain found equal to the plain value
            else:
                return False  # bytearray, memoryview: they would come back as bytes
            if not _SCALARS.issuperset(map(type, children)):
                deeper.extend(child for child in children if type(child) not in _SCALARS)
        if not deeper:
            return True
        level = deeper
    return False  # nested too deeply


def _is_key(key: object) -> bool:
    return type(key) in _KEYS or isinstance(key, _KEY_BASES)


def _plain(value: Any) -> Any:
    """The packer's hook for whatever isn't exactly one of its own types."""
    if type(value) is tuple:
        return [_MARK_EXT, *value]
    if isinstance(value, datetime):
        return msgpack.ExtType(_EXT_DATETIME, _write_datetime(value))
    plain: Any
    if isinstance(value, str):
        plain = str.__str__(value)
    elif isinstance(value, int):
        plain = int.__int__(value)
    elif isinstance(value, float):
        plain = float.__float__(value)
    elif isinstance(value, bytes):
        plain = b"".join((value,))
    elif isinstance(value, dict):
        plain = dict(value)
    elif isinstance(value, list):
        plain = list(value)
    elif isinstance(value, tuple) and type(value) is not msgpack.ExtType:
        plain = tuple(value)
    else:
        raise _Refused
    if not _same(plain, value):
        raise _Refused
    return [_MARK_EXT, *plain] if type(plain) is tuple else plain


def _same(plain: Any, value: Any) -> bool:
    """Whether a subclass's value is equal to the plain one, as a key of a dict too."""
    try:
        if plain != plain:  # NaN
            return bool(value != value)
        if not (plain == value and value == plain):
            return False
        return isinstance(plain, (dict, list)) or hash(plain) == hash(value)
    except Exception:  # noqa: BLE001  it is the user's own __eq__ that runs here
        return isinstance(plain, tuple)  # a tuple of something unhashable


def _read_list(items: list[Any]) -> Any:
    if items and items[0] is _MARK:
        return tuple(items[1:])
    return items


def _read_extension(code: int, data: bytes) -> Any:
    if code == _EXT_TUPLE and not data:
        return _MARK
    if code == _EXT_DATETIME:
        return _read_datetime(data)
    raise ValueError(f"unknown extension {code}")


_DATETIME: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{6})?)"
    r"([+-])([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{6}))?)?"
    r"(?:\[([A-Za-z0-9_+\-/]+)\])?"
)


def _write_datetime(value: datetime) -> bytes:
    try:
        if value.utcoffset() is None:
            raise _Refused("naive")
        text = datetime.isoformat(value)
        zone = value.tzinfo
        if type(zone) is timezone and type(value) is datetime:
            return text.encode("ascii")
        key = getattr(zone, "key", None)
        if isinstance(key, str):
            text = f"{text}[{key}]"
        data = text.encode("ascii")
        if _read_datetime(data) == value:
            return data
    except _Refused:
        raise
    except Exception:  # noqa: BLE001  a tzinfo is the user's code
        pass
    raise _Refused("it does not come back equal")


def _read_datetime(data: bytes) -> datetime:
    match = None
    if len(data) <= _MAX_DATETIME_BYTES:
        match = _DATETIME.fullmatch(data.decode("ascii"))
    if match is None:
        raise ValueError("not a date and time with its UTC offset")
    local, sign, hours, minutes, seconds, micros, key = match.groups()
    # The offset is read here because fromisoformat takes one below a second for none at all.
    offset = timedelta(
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(seconds or 0),
        microseconds=int(micros or 0),
    )
    zone = timezone(-offset if sign == "-" else offset) if offset else timezone.utc
    value = datetime.fromisoformat(local).replace(tzinfo=zone)
    return value if key is None else _in_zone(value, key)


def _in_zone(value: datetime, key: str) -> datetime:
    """The same time in the named zone, or as it is where the zone isn't known or has changed."""
    from zoneinfo import ZoneInfo  # here, because it is slow to import and seldom needed

    try:
        zone = ZoneInfo(key)
    except (LookupError, ValueError, OSError):
        return value
    for fold in (0, 1):
        local = value.replace(tzinfo=zone, fold=fold)
        if local.utcoffset() == value.utcoffset():
            return local
    return value


# Words for a refusal.  This is slow and runs only when a value was refused.


def _refusal(value: Any, what: str, otherwise: str) -> SerializationError:
    for path, reason in faults(value, partial(_fault, what), partial(_key_fault, what)):
        return refused_at(what, path, reason)
    return SerializationError(f"{what} can't be written: {otherwise}; nothing was written")


def refused_at(what: str, path: str, reason: str) -> SerializationError:
    if len(path) > 200:
        path = f"{path[:120]} … {path[-60:]}"
    return SerializationError(f"{what}{path}: {reason}; nothing was written")


def faults(
    value: Any, fault: Callable[[Any], str | None], key_fault: Callable[[object], str | None]
) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of what `fault` and `key_fault` find in a value, depth first."""
    stack: list[tuple[Any, str, int]] = [(value, "", 0)]
    while stack:
        item, path, depth = stack.pop()
        reason = fault(item)
        if reason is not None:
            yield path, reason
        elif depth >= MAX_NESTING and isinstance(item, (dict, list, tuple)):
            yield path, f"it is nested more than {MAX_NESTING} levels deep, or contains itself"
        elif isinstance(item, dict):
            children = []
            for key, child in item.items():
                inner = f"{path}[{_short(key)}]"
                reason = key_fault(key)
                if reason is not None:
                    yield inner, reason
                children.append((child, inner, depth + 1))
            stack.extend(reversed(children))
        elif isinstance(item, (list, tuple)):
            numbered = [(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(item)]
            stack.extend(reversed(numbered))


def _fault(what: str, item: Any) -> str | None:
    kind = type(item)
    if kind is str:
        fault = str_fault(item)
        return fault and f"{fault}; give bytes, encoded with errors='surrogatepass'"
    if kind is int:
        return int_fault(item)
    if kind in (float, bool, bytes, _NONE, dict, list, tuple):
        return None
    if isinstance(item, datetime) and item.tzinfo is None:
        return "a datetime without a time zone can't be told from another; make it aware"
    try:
        plain = _plain(item)
    except _Refused:
        reason = (
            f"a value of type {type_name(item)} does not come back equal from msgpack; "
            "give what it is made of"
        )
        # The rest is msgpack whatever the codec of the handle.
        return f"{reason}, or open with codec='pickle'" if what == "body" else reason
    return None if isinstance(plain, (msgpack.ExtType, dict, list)) else _fault(what, plain)


def _key_fault(what: str, key: object) -> str | None:
    if not _is_key(key):
        return (
            f"a key of type {type_name(key)} does not come back; use str, bytes, int, bool or None"
        )
    return _fault(what, key)


def str_fault(item: str) -> str | None:
    try:
        item.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"the text has a lone surrogate at index {error.start}, which UTF-8 can't hold"
    return None


def int_fault(item: int) -> str | None:
    if _MIN_INT <= item <= _MAX_INT:
        return None
    return "an int outside -2**63 ... 2**64 - 1 does not fit; put it as a str"


def type_name(value: object) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001  the user's own __repr__
        text = f"<{type_name(key)}>"
    return text if len(text) <= 60 else f"{text[:57]}…"


def words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

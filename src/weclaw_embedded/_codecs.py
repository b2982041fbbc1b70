"""Bodies to bytes and back, in the way that the handle or the message says.

Each message says how its body was written (a small number, and a name for a codec of the user's
own), so that any handle can read it.  Reading runs nobody's code unless the handle asked for it:
pickle and an object's own decoder are used only by a handle opened with that same codec.

Headers and results follow the rules of msgpack, which are in `_values`, whatever the codec.  This
module knows nothing of messages, files or limits on size.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from weclaw_embedded._values import (
    MAX_NESTING,
    faults,
    int_fault,
    pack_value,
    pack_values,
    refused_at,
    str_fault,
    type_name,
    unpack_value,
    words,
)
from weclaw_embedded.errors import SerializationError

__all__ = [
    "CODEC_JSON",
    "CODEC_MSGPACK",
    "CODEC_OTHER",
    "CODEC_PICKLE",
    "CODEC_RAW",
    "MAX_NAME_BYTES",
    "MAX_NESTING",
    "Codec",
    "check_codec",
    "codec_name",
    "decode",
    "encode_many",
    "encoder",
    "pack_value",
    "pack_values",
    "unpack_value",
]

CODEC_MSGPACK: Final = 0
CODEC_JSON: Final = 1
CODEC_RAW: Final = 2
CODEC_PICKLE: Final = 3
CODEC_OTHER: Final = 4

MAX_NAME_BYTES: Final = 255
"""Length of the name of a codec of the user's own, in UTF-8."""


@runtime_checkable
class Codec(Protocol):
    """A codec of your own: `name` (optional, else the class's) is recorded with each message."""

    def encode(self, body: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


# What `codec=` takes.
AnyCodec = str | Codec
# What makes bytes of a body.
Encode = Callable[[Any], bytes]

_BUILT_IN: Final = {
    "msgpack": CODEC_MSGPACK,
    "json": CODEC_JSON,
    "raw": CODEC_RAW,
    "pickle": CODEC_PICKLE,
}


def check_codec(codec: object) -> AnyCodec:
    """Return `codec` if it is one, else raise ValueError (unknown name) or TypeError."""
    if isinstance(codec, str):
        if codec not in _BUILT_IN:
            raise ValueError(
                f"codec={codec!r} is not known; use one of {', '.join(map(repr, _BUILT_IN))} "
                "or an object with encode and decode"
            )
        return codec
    # A class satisfies the protocol as well as its instances do, but can't encode.
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise TypeError(f"codec must be a name or an object with encode and decode, not {codec!r}")
    codec_name(codec)
    return codec


def codec_name(codec: Codec) -> str:
    """The name recorded for a codec of the user's own."""
    name = getattr(codec, "name", None)
    if name is None:
        kind = type(codec)
        name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a codec must be a non-empty str, not {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise ValueError(f"the name of a codec may have {MAX_NAME_BYTES} bytes, not more")
    return name


def encoder(codec: AnyCodec) -> tuple[int, str | None, Encode]:
    """How a handle encodes bodies: (number of the codec, its name if it is the user's own, what
    makes bytes of a body).

    That raises SerializationError, which says what can't be written and where in the body it is.
    """
    if codec == "msgpack":
        return CODEC_MSGPACK, None, pack_value
    if codec == "json":
        return CODEC_JSON, None, _encode_json
    if codec == "raw":
        return CODEC_RAW, None, _encode_raw
    if codec == "pickle":
        return CODEC_PICKLE, None, _encode_pickle
    if isinstance(codec, str):
        raise ValueError(f"codec={codec!r} is not known")
    return CODEC_OTHER, codec_name(codec), partial(_encode_other, codec)


def encode_many(encode: Encode, bodies: Sequence[Any]) -> list[bytes]:
    """What `encode`, from `encoder`, makes of each of several bodies."""
    return pack_values(bodies) if encode is pack_value else [*map(encode, bodies)]


def decode(number: int, name: str | None, data: bytes | memoryview, *, codec: AnyCodec) -> Any:
    """Decode what an `encoder` made, for a handle opened with `codec`.

    Raises SerializationError for bytes that can't be decoded, and for pickle and codecs of the
    user's own when the handle wasn't opened with them.
    """
    if number == CODEC_MSGPACK:
        return unpack_value(data)
    if number == CODEC_JSON:
        return _decode_json(data)
    if number == CODEC_RAW:
        return bytes(data)
    if number == CODEC_PICKLE:
        if codec != "pickle":
            raise SerializationError(
                "the body was written with codec 'pickle', which can run any code when it is "
                "read; the message is as it was; open with codec='pickle' if you trust its origin"
            )
        return _decode_pickle(data)
    if number == CODEC_OTHER:
        if isinstance(codec, str) or codec_name(codec) != name:
            raise SerializationError(
                f"the body was written with the codec {name!r}; the message is as it was; open "
                "with that codec to read it"
            )
        return _decode_other(codec, data)
    raise SerializationError(
        f"the body was written with a codec of number {number}, which this version does not know; "
        "the message is as it was; read it with the version that wrote it"
    )


# JSON: only what its decoder gives back as it was.


def _encode_json(body: Any) -> bytes:
    for path, reason in faults(body, _json_fault, _json_key_fault):
        raise refused_at("body", path, reason)
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(
            f"the body can't be written as JSON ({words(error)}); nothing was written"
        ) from error


def _json_fault(item: Any) -> str | None:
    kind = type(item)
    if kind is str:
        fault = str_fault(item)
        return fault and f"{fault}; leave it out, or open with codec='pickle'"
    if kind is int:
        return int_fault(item)
    if kind is float:
        if item - item == 0:
            return None
        return f"{item} is not a number of JSON; use codec='msgpack'"
    if item is None or kind in (bool, dict, list):
        return None
    return (
        f"a value of type {type_name(item)} does not come back equal from JSON; give what it is "
        "made of, or open with codec='msgpack' or 'pickle'"
    )


def _json_key_fault(key: object) -> str | None:
    return None if type(key) is str else "JSON has only str keys; use codec='msgpack'"


def _decode_json(data: bytes | memoryview) -> Any:
    try:
        return json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise SerializationError(
            f"the bytes can't be read as JSON ({words(error)}); the message is as it was; "
            "settle it (fail sets it aside), or read it with what wrote it"
        ) from error


def _encode_raw(body: Any) -> bytes:
    if not isinstance(body, bytes):
        raise SerializationError(
            f"codec 'raw' takes bytes, not {type_name(body)}; nothing was written"
        )
    return b"".join((body,))


# Code that isn't ours may raise anything; whatever it is, it is the body that can't be encoded.


def _encode_pickle(body: Any) -> bytes:
    try:
        return pickle.dumps(body, protocol=4)
    except Exception as error:
        raise SerializationError(
            f"the body can't be pickled ({words(error)}); nothing was written"
        ) from error


def _decode_pickle(data: bytes | memoryview) -> Any:
    try:
        return pickle.loads(data)
    except MemoryError:
        raise  # the machine's, which says nothing against the bytes
    except Exception as error:
        raise SerializationError(
            f"the bytes can't be unpickled ({words(error)}); the message is as it was; is the "
            "code that its classes come from installed?"
        ) from error


def _encode_other(codec: Codec, body: Any) -> bytes:
    try:
        data = codec.encode(body)
    except Exception as error:
        raise SerializationError(
            f"the codec {codec_name(codec)!r} refused the body ({words(error)}); "
            "nothing was written"
        ) from error
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise SerializationError(
            f"the codec {codec_name(codec)!r} gave {type_name(data)}, not bytes; "
            "nothing was written"
        )
    return bytes(data)


def _decode_other(codec: Codec, data: bytes | memoryview) -> Any:
    try:
        return codec.decode(bytes(data))
    except MemoryError:
        raise  # the machine's, which says nothing against the bytes
    except Exception as error:
        raise SerializationError(
            f"the codec {codec_name(codec)!r} can't read the body ({words(error)}); "
            "the message is as it was"
        ) from error

"""What is given to a put, made ready: bodies encoded, and what is said of them checked.

Role: all of a put that needs neither the lock nor the log. Nothing is refused later for what it is,
but for its size.

It must not know topics and groups, nor how it is put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from . import _codecs, _putting, _values
from ._delivery import Encoded, Terms
from ._handle import check_text, us_until
from ._message import Bodied
from ._options import check_count, check_seconds
from .errors import MessageTooLargeError, SerializationError

if TYPE_CHECKING:
    from ._store import Store

MAX_ID_BYTES: Final = 1024
MAX_KEY_BYTES: Final = 65536


class Put:
    """A message for `Queue.put_many`, with what `Queue.put` takes besides the body. What it says is
    checked when it is put.
    """

    __module__ = "weclaw_embedded.queue"  # where users find it, and where pickles look for it
    __slots__ = ("body", "delay", "eta", "headers", "id", "key", "priority", "ttl")

    def __init__(
        self,
        body: Any,
        *,
        id: str | None = None,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        eta: datetime | None = None,
        ttl: float | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        self.body = body
        self.id = id
        self.key = key
        self.priority = priority
        self.delay = delay
        self.eta = eta
        self.ttl = ttl
        self.headers = headers

    def __repr__(self) -> str:
        given = (
            f", {name}={getattr(self, name)!r}"
            for name in ("id", "key", "priority", "delay", "eta", "ttl", "headers")
            if getattr(self, name) not in (None, 0)
        )
        return f"Put({self.body!r}{''.join(given)})"


class Encoder:
    """Makes messages ready as a store says, by its codec and limits. Any thread may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        number, name, self._body = _codecs.encoder(store._options.codec)
        self._plain = Terms(number, name)  # of all of which nothing is said

    def one(
        self,
        body: Any,
        id: str | None = None,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        eta: datetime | None = None,
        ttl: float | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> tuple[bytes, Terms]:
        """A body and what is said of it, as `Queue.put` takes it."""
        if isinstance(body, Put):  # pickle would take it, and what it says would not be done
            raise SerializationError(
                "a Put is no body; nothing was put; give it to put_many in a list, or give put "
                "its body and what else it says"
            )
        data = self._body(body)
        if (
            (id is None and key is None and eta is None and ttl is None and headers is None)
            and (delay == 0 and priority == 0)
            and (type(priority) is int and type(delay) is not bool)
        ):
            return data, self._plain
        terms = Terms(self._plain.codec, self._plain.codec_name)
        terms.plain = False
        if id is not None:
            terms.id = check_text("id", id, MAX_ID_BYTES)
        if key is not None:
            terms.key = check_text("key", key, MAX_KEY_BYTES)
        if priority != 0 or type(priority) is not int:
            terms.priority = check_count("priority", priority, 0, 9)
        if delay != 0 or delay is False:
            terms.delay_us = int(check_seconds("delay", delay) * 1e6)
        if eta is not None:
            if terms.delay_us:
                raise ValueError("give either delay or eta; nothing was put")
            terms.delay_us = us_until(eta)
        if ttl is not None:
            terms.ttl_us = int(check_seconds("ttl", ttl, positive=True) * 1e6)
        if headers is not None:
            if not isinstance(headers, Mapping):
                raise TypeError(f"headers must be a dict, not {headers!r}; nothing was put")
            terms.headers = _values.pack_value(dict(headers), "headers") if headers else None
            _putting.check_headers(terms.headers, self._store._engine.option("max_message_bytes"))
        return data, terms

    def many(self, bodies: Iterable[Any]) -> Sequence[Encoded]:
        """Bodies and `Put` objects, made ready to be put; nothing if there are none."""
        encode, plain = self._body, self._plain
        if type(bodies) is list or type(bodies) is tuple:
            many = [*bodies]  # whoever has the list may change it meanwhile
            if not any(issubclass(kind, Put) for kind in {*map(type, many)}):
                try:
                    return [(_codecs.encode_many(encode, many), plain)] if many else []
                except SerializationError as error:
                    which = [n for n, one in enumerate(many) if _fails(encode, one)]
                    if which:  # a codec of the user's own may not fail again
                        _say_which(error, which[0])
                    raise
        else:
            check_many(bodies)
        # One after the other: whoever makes them may make each out of the one before.
        messages: list[tuple[list[bytes], Terms]] = []
        before: Terms | None = None
        for n, one in enumerate(bodies):
            try:
                if isinstance(one, Put):
                    data, terms = self.one(
                        *(one.body, one.id, one.key, one.priority, one.delay, one.eta, one.ttl),
                        one.headers,
                    )
                else:
                    data, terms = encode(one), plain
            except (ValueError, TypeError, MessageTooLargeError) as error:
                _say_which(error, n)
                raise
            if terms is before:
                messages[-1][0].append(data)
            else:
                messages.append(([data], terms))
                before = terms
        return messages


# What can be iterated and is not meant to be, when several bodies are asked for.
_NOT_MANY: Final = (str, bytes, bytearray, memoryview, Mapping, Put, Bodied)


def _say_which(error: Exception, n: int) -> None:
    """Of several messages, which one the error is about."""
    error.args = (f"message {n} (the first is 0): {error}",)


def _fails(encode: Callable[[Any], bytes], body: Any) -> bool:
    try:
        encode(body)
    except SerializationError:
        return True
    return False


def check_many(bodies: Any) -> None:
    """Refuse what is not several bodies."""
    if isinstance(bodies, _NOT_MANY) or not isinstance(bodies, Iterable):
        raise TypeError(
            f"put_many takes several bodies, not one {type(bodies).__name__}; nothing was put; "
            "put a list of them, or use put"
        )

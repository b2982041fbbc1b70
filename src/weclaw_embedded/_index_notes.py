"""What the index notes besides messages: names of owners, and places that could not be read.

Both are for people: a failure names the consumer that had the message, `stats` and `verify` name
the damage. Neither decides anything.
"""

from __future__ import annotations

from typing import Final

from ._index_change import Change
from ._index_rows import DAMAGE, LEASED, OWNER_AT, OWNER_NAME, OWNER_OF, U64, Row, key_u64
from ._records import Damaged, Owner

# How a note begins of what whoever folded the log has met; the others are what records say.
_MET: Final = b"\0"


class Notes(Change):
    """Folds OWNER and DAMAGED, and answers for them."""

    def _name_owner(self, said: Owner, offset: int, time_us: int) -> None:
        self._must_commit()
        self._put(key_u64(OWNER_NAME, said.token), said.name.encode())
        self._put(key_u64(OWNER_AT, said.token), U64.pack(offset))
        self._put(key_u64(OWNER_OF, offset), U64.pack(said.token))

    def owner_name(self, token: int) -> str:
        """Return the name of the consumer that leased under this token; "" when it is not known."""
        name = self._get(key_u64(OWNER_NAME, token))
        return bytes(name).decode() if name is not None else ""

    def names_below(self, offset: int) -> list[tuple[int, str]]:
        """Return (token, name) of the owners who were named last below an offset and have leases:
        what is known of them has to outlive that part of the log.
        """
        named = [token for _, token in self._named_below(offset)]
        return [(token, self.owner_name(token)) for token in self._lessees(named)]

    def _named_below(self, offset: int) -> list[tuple[int, int]]:
        """Return (offset of an OWNER, token) of those that no later one says again."""
        return [
            (U64.unpack(key[1:])[0], U64.unpack(value)[0])
            for key, value in self._scan(OWNER_OF, None, key_u64(OWNER_OF, offset))
            if self._get(OWNER_AT + value) == key[1:]
        ]

    def _lessees(self, tokens: list[int]) -> set[int]:
        """Return those of these owners who have leases, if only ones that nobody judged yet."""
        if not tokens:
            return set()  # all leases are looked at, which costs
        holding = (Row.unpack(value).owner for _, value in self._scan(LEASED))
        return set(tokens).intersection(holding)

    def _set_aside(self, said: Damaged, offset: int, time_us: int) -> None:
        for message, reason in said.items:
            if reason or self._get(key_u64(DAMAGE, message)) is None:
                self.note_damage(message, reason)
            for topic in self.topics():
                if self._cancel(topic, message, time_us):
                    break
        # What was met itself is not what a repair was done with: it was hit again.
        self.forget_damage(
            [one for one in said.repaired if not self._get_damage(one).startswith(_MET)]
        )

    def note_damage(self, offset: int, reason: str, *, met: bool = False) -> None:
        """Remember a place of the log that could not be read. `met`: by whoever folds the log; what
        a record says of it changes nothing then.
        """
        if met or not self._get_damage(offset).startswith(_MET):
            self._must_commit()
            self._put(key_u64(DAMAGE, offset), (_MET if met else b"") + reason.encode())

    def _get_damage(self, offset: int) -> bytes:
        return bytes(self._get(key_u64(DAMAGE, offset)) or b"")

    def damage(self) -> list[tuple[int, str]]:
        """Return the places that could not be read: (offset, reason), in order."""
        return [
            (U64.unpack(key[1:])[0], bytes(value).removeprefix(_MET).decode())
            for key, value in self._scan(DAMAGE)
            if value
        ]

    def aside(self) -> list[int]:
        """Return the offsets of all that is noted: places, and messages that stood in them."""
        return [U64.unpack(key[1:])[0] for key, _ in self._scan(DAMAGE)]

    def is_aside(self, offset: int) -> bool:
        """Whether this is noted as a place, or a message, that can't be read."""
        return self._get(key_u64(DAMAGE, offset)) is not None

    def forget_damage(self, offsets: list[int]) -> None:
        """Forget places that a repair is done with."""
        for offset in offsets:
            self._must_commit()
            self._delete(key_u64(DAMAGE, offset))

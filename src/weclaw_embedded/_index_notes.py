"""What the index notes besides messages: names of owners, and places that could not be read.

Both are for people: a failure names the consumer that had the message, `stats` and `verify` name
the damage. Neither decides anything.
"""

from __future__ import annotations

from ._index_change import Change
from ._index_rows import DAMAGE, OWNER_NAME, U64, key_u64
from ._records import Damaged, Owner


class Notes(Change):
    """Folds OWNER and DAMAGED, and answers for them."""

    def _name_owner(self, said: Owner, offset: int, time_us: int) -> None:
        self._must_commit()
        self._put(key_u64(OWNER_NAME, said.token), said.name.encode())

    def owner_name(self, token: int) -> str:
        """Return the name of the consumer that leased under this token; "" when it is not known."""
        name = self._get(key_u64(OWNER_NAME, token))
        return bytes(name).decode() if name is not None else ""

    def _set_aside(self, said: Damaged, offset: int, time_us: int) -> None:
        for message, reason in said.items:
            if reason or self._get(key_u64(DAMAGE, message)) is None:
                self.note_damage(message, reason)
            for topic in self.topics():
                if self._cancel(topic, message, time_us):
                    break
        self.forget_damage(said.repaired)

    def note_damage(self, offset: int, reason: str) -> None:
        """Remember a place of the log that could not be read."""
        self._must_commit()
        self._put(key_u64(DAMAGE, offset), reason.encode())

    def damage(self) -> list[tuple[int, str]]:
        """Return the places that could not be read: (offset, reason), in order."""
        return [
            (U64.unpack(key[1:])[0], bytes(value).decode())
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

"""The shared page: what the processes with one file open tell each other.

Role: one small mapped file in the scratch folder. It holds the words of the log (tail, commit
point, segments), the clock's shift, a failure once there is one, and one slot for each owner:
its random token and what it waits for.

Invariants: every word is changed only by the holder of the write lock; a word is eight aligned
bytes, so a reader without the lock sees the old or the new value, never a mixture. The page is
derived: the first opener of a boot makes it anew, and the first opener of any later round takes
nothing from it that the log does not confirm.

It knows nothing of messages, and nothing of what the words mean to the log.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
import struct
from bisect import bisect_left
from typing import Final

from . import _files, _locks, _names
from .wal import COMMIT, LAST, TAIL, LogState

PAGE_VERSION: Final = 2
MAX_OWNERS: Final = 1024
FEED_PIPE: Final = MAX_OWNERS  # the pipe of whoever feeds the replica, named like the owners'
SLOTS_STEP: Final = 1024

# Words after those of the log (wal.py owns 0 to 15).
MAGIC = 16
STORE_ID = 17  # two words
BOOT_ID = 19  # two words
SHIFT = 21  # queue time = boot time + SHIFT, microseconds, signed
FAILED = 22  # not 0 once nothing is promised any more: why, one of these
SYNC_HIGH = 23  # end of the last frame that was promised a sync and holds a Put
FIRST_SYNC = 24  # start of the first such frame not yet below the commit point
DEAD_SEQ = 25  # changes whenever an owner is found dead
WAITERS = 26  # owners that wait for messages, and `FOR_SETTLED` times those for what is settled
OWNERS_HIGH = 27  # slots ever used
LOG_DEVICE = 29
LOG_INODE = 30
LOG_BIRTH = 31
DISK = 32  # diskseq or mount id of the file's disk
CHECKED = 33  # 1 once the page is complete
OPTIONS_SEQ = 35  # changes with every option recorded
CLEAN_AT = 34  # the tail just after the last frame that vouches
REPLICATION = 36  # bits: what holds for this file's replica; 0: it has none and is none
REPLICATED = 37  # everything below is on the replica's disk; a frame's end
REPLICA_AT = 38  # how far the replica is, wherever that is
REPLICA_HIGH = 39  # end of the last frame that was promised the replica and holds a Put
FIRST_REPLICA = 40  # start of the first such frame not yet below REPLICATED
REPLICA_PIN = 41  # the segment that the replica reads next, + 1
FEEDER_SLEEPS = 42  # slot + 1 of the owner that feeds the replica and wants to be woken
REPLICA_WAIT_HIGH = 43  # the highest offset that an owner waits for to be on the replica
VOIDS = 44  # how many puts were taken back
FENCED_BY = 45  # the epoch of the copy that was promoted over this file
UNSEEN = 46  # topics with puts that are written and not yet visible
UNSEEN_PUTS = 47  # how many those are, at least
NEXT_WOKEN = 48  # the slot at which the search for somebody to wake begins
LEASES_SEQ = 49  # changes whenever leases of living processes were taken away
INDEX_SEQ = 50  # changes before each commit of the index
OWNERS_SEQ = 51  # changes whenever a slot gets or loses its owner
INDEX_SYNCED = 52  # 1 when the index was on stable storage as it was found; commits come after it
SYNC_WAIT_HIGH = 53  # the highest offset for which an owner waits for another one's sync
INDEX_TIME = 54  # when the file of the index was changed last, ns; 0 while it is being changed
INDEX_BYTES = 55  # how large it was then; the word behind the other
# Why nothing is promised any more.
DISK_FAILED, FILE_MOVED, SCRATCH_MOVED, FILE_CUT = 1, 2, 3, 4
WORDS_BYTES: Final = 4096
UNREAD = 320  # how many places of the file the opening could not read; begin and end of each follow
_MOST_UNREAD: Final = 95
# What must outlive a page that is being made anew by one who dies over it: a magic, store id, boot
# id, and the words of `replica_words`.
_KEPT_AT: Final = 2048
_KEPT: Final = struct.Struct("<8s16s16s4Q")
_KEPT_MAGIC: Final = b"wqkept\0\1"

# Bits of REPLICATION.
WANTED, SYNC_WANTED, IS_FENCED, IS_COPY = 1, 2, 4, 8
# Beyond this many bytes a replica that is behind no longer keeps segments from being freed.
PIN_BYTES: Final = 512 << 20

# Locked, shared, by each process that works with the page; far past its end.
_IN_USE: Final = 1 << 62
# Token, ready mask, settled mask, pinned segment + 1, replica, group, another's sync.
_OWNER_WORDS: Final = 8
# As many puts as there may be waiters.
EVERYBODY: Final = 1 << 32
_OWNERS_BYTES: Final = MAX_OWNERS * _OWNER_WORDS * 8
_SLOTS_AT: Final = WORDS_BYTES + _OWNERS_BYTES
_MAGIC_WORD: Final = int.from_bytes(b"wqpage" + PAGE_VERSION.to_bytes(2, "little"), "little")
_MASK64: Final = (1 << 64) - 1

FOR_SETTLED: Final = 1 << 32  # in WAITERS, each that waits for messages counting 1
TOKEN, READY, SETTLED, PINNED, AWAITED, GROUP, SHARED = range(7)


class SharedPage(LogState):
    """The words of one store, mapped. Also the `LogState` its `Log` works on."""

    def __init__(self, path: str, *, writable: bool = True) -> None:
        self.path = path
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._fd = _files.open_rw(path) if writable else _files.open_ro(path)
        # What closes it, also where Ctrl-C comes before anybody has the page, which says of the
        # file that it is in use until then.
        self._file = io.FileIO(self._fd, "r+" if writable else "r")
        try:
            size = os.fstat(self._fd).st_size
            if size < _SLOTS_AT + 8 * SLOTS_STEP or (size - _SLOTS_AT) % 8:
                raise ValueError("the shared page has a wrong size")
            # (A mapping goes with the last view of it.)
            self.words = memoryview(mmap.mmap(self._fd, _SLOTS_AT, access=self._access)).cast("Q")
            self.slots = memoryview(b"").cast("Q")
            self.refresh_slots()
        except BaseException:
            self._file.close()
            raise
        found = os.fstat(self._fd)
        self.identity = (found.st_dev, found.st_ino)
        self._owners_at = WORDS_BYTES // 8

    @staticmethod
    def create(path: str, like_fd: int, kept: bytes = b"") -> SharedPage:
        """Make the page anew, empty but for what is to be `kept`; the caller has the file for
        itself.

        An old one is overwritten where it is, so that a full disk can be opened; nobody has it
        mapped any more.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = max(_files.size(fd), _SLOTS_AT + 8 * SLOTS_STEP)
            size = _SLOTS_AT + (size - _SLOTS_AT) // 8 * 8
            # It is there before the old words go.
            _files.write_at(fd, [kept.ljust(_KEPT.size, b"\0")], _KEPT_AT)
            _files.zero_fill(fd, 0, _KEPT_AT)
            after = _KEPT_AT + _KEPT.size
            _files.zero_fill(fd, after, size - after)
            _files.truncate(fd, size)
            _names.match_owner_and_mode(path, like_fd)
        finally:
            _files.close(fd)
        page = SharedPage(path)
        page.hold()
        return page

    def hold(self) -> None:
        """Have others see that it is in use, until it is closed."""
        _locks.lock(self._fd, _IN_USE, False)

    @staticmethod
    def user_of(path: str) -> tuple[int, ...] | None:
        """The identity of the file that the page at `path` is of, if processes work with both now;
        else None, also while the page is being made.
        """
        try:
            fd = _files.open_ro(path)
        except OSError:
            return None
        try:
            if not _locks.is_locked(fd, _IN_USE):
                return None
            words = _files.read_at(fd, WORDS_BYTES, 0)
        finally:
            _files.close(fd)
        if len(words) < WORDS_BYTES or not struct.unpack_from("<Q", words, 8 * CHECKED)[0]:
            return None
        return struct.unpack_from("<3Q", words, 8 * LOG_DEVICE)

    @staticmethod
    def store_id_at(path: str) -> bytes | None:
        """Of which store the page at `path` is, whatever became of that, and in whatever boot."""
        try:
            fd = _files.open_ro(path)
        except OSError:
            return None
        try:
            words = _files.read_at(fd, WORDS_BYTES, 0)
        finally:
            _files.close(fd)
        if len(words) < WORDS_BYTES:
            return None
        if struct.unpack_from("<Q", words, 8 * MAGIC)[0] != _MAGIC_WORD:
            return None
        return words[8 * STORE_ID : 8 * STORE_ID + 16]

    def stamp(
        self, store_id: bytes, boot_id: bytes, identity: tuple[int, int, int], disk: int
    ) -> None:
        """Say whose page this is."""
        words = self.words
        words[MAGIC] = _MAGIC_WORD
        words[STORE_ID], words[STORE_ID + 1] = struct.unpack("<QQ", store_id)
        words[BOOT_ID], words[BOOT_ID + 1] = struct.unpack("<QQ", boot_id)
        words[LOG_DEVICE], words[LOG_INODE], words[LOG_BIRTH] = (n & _MASK64 for n in identity)
        words[DISK] = disk & _MASK64
        words[DEAD_SEQ] = secrets.randbits(62)
        words[CHECKED] = 1

    def share_unread(self, places: list[tuple[int, int]]) -> None:
        """Say to all who open the file what could not be read at rest. Where it is too much to note
        it is as if one place went up to the last.
        """
        words = self.words
        places = sorted(places)
        if len(places) > _MOST_UNREAD:
            places = [*places[: _MOST_UNREAD - 1], (places[_MOST_UNREAD - 1][0], places[-1][1])]
        for n, place in enumerate(places):
            words[UNREAD + 1 + 2 * n], words[UNREAD + 2 + 2 * n] = place
        words[UNREAD] = len(places)

    def unread(self) -> list[tuple[int, int]]:
        found = self.words[UNREAD + 1 : UNREAD + 1 + 2 * self.words[UNREAD]].tolist()
        return list(zip(found[::2], found[1::2], strict=True))

    def belongs_to(
        self, store_id: bytes, boot_id: bytes, identity: tuple[int, int, int], disk: int
    ) -> bool:
        """True when this page was made in this boot for this very file."""
        words = self.words
        return (
            words[MAGIC] == _MAGIC_WORD
            and words[CHECKED] == 1
            and struct.pack("<QQ", words[STORE_ID], words[STORE_ID + 1]) == store_id
            and struct.pack("<QQ", words[BOOT_ID], words[BOOT_ID + 1]) == boot_id
            and (words[LOG_DEVICE], words[LOG_INODE], words[LOG_BIRTH])
            == tuple(n & _MASK64 for n in identity)
            and words[DISK] == disk & _MASK64
            and words[OWNERS_HIGH] <= MAX_OWNERS
        )

    # -- the slot table, which grows with the file -------------------------------------------

    def refresh_slots(self) -> None:
        """Map what the slot table has grown to."""
        n_bytes = os.fstat(self._fd).st_size - _SLOTS_AT
        if n_bytes == len(self.slots) * 8:
            return
        # From the beginning of the file on: where else a mapping may begin is each system's own.
        whole = memoryview(mmap.mmap(self._fd, _SLOTS_AT + n_bytes, access=self._access))
        self.slots = whole[_SLOTS_AT:].cast("Q")

    def grow_slots(self, n: int) -> None:
        """Make room for at least `n` slots. The caller holds the write lock."""
        if n <= len(self.slots):
            return
        rounded = -(-n // SLOTS_STEP) * SLOTS_STEP
        have = _SLOTS_AT + len(self.slots) * 8
        _files.zero_fill(self._fd, have, _SLOTS_AT + rounded * 8 - have)
        self.refresh_slots()

    # -- the visible point ---------------------------------------------------------------------

    @property
    def shift(self) -> int:
        value = self.words[SHIFT]
        return value - (1 << 64) if value >> 63 else value

    @shift.setter
    def shift(self, value: int) -> None:
        self.words[SHIFT] = value & _MASK64

    def promise_sync(self, start: int, end: int) -> None:
        """Note a frame with Puts that was promised a sync. The caller holds the write lock."""
        words = self.words
        if words[COMMIT] >= words[SYNC_HIGH]:
            words[FIRST_SYNC] = start
        words[SYNC_HIGH] = end

    def forget_promises(self) -> None:
        """Take back what was promised to frames that were not written after all. The caller holds
        the write lock.
        """
        words = self.words
        for word in (SYNC_HIGH, REPLICA_HIGH):
            words[word] = min(words[word], words[TAIL])

    def visible(self, tail: int) -> int:
        """Puts below this offset may be delivered: each is as durable as it was promised."""
        words = self.words
        commit = words[COMMIT]
        if commit < words[SYNC_HIGH]:
            tail = max(commit, words[FIRST_SYNC])
        if words[REPLICATED] < words[REPLICA_HIGH]:
            tail = min(tail, max(words[REPLICATED], words[FIRST_REPLICA]))
        return tail

    def note_puts(self, mask: int, n: int) -> list[int]:
        """`n` messages were put to these topics and written. Slots to be woken for them now, those
        whose getters wait; none while the puts are not visible, then whoever makes them visible
        calls `take_seen`. The caller holds the write lock.
        """
        words = self.words
        if words[COMMIT] >= words[SYNC_HIGH] and words[REPLICATED] >= words[REPLICA_HIGH]:
            return self.take_getters(mask, n) if words[WAITERS] else []
        words[UNSEEN] |= mask
        words[UNSEEN_PUTS] = min(words[UNSEEN_PUTS] + n, EVERYBODY)
        return []

    def take_seen(self) -> list[int]:
        """Slots to be woken for puts that have become visible just now. The caller holds the write
        lock.
        """
        words = self.words
        mask, n = words[UNSEEN], words[UNSEEN_PUTS]
        commit = words[COMMIT]
        if not mask:
            return []
        if commit >= words[SYNC_HIGH]:
            if words[REPLICATED] >= words[REPLICA_HIGH]:  # no more are to become visible
                words[UNSEEN] = words[UNSEEN_PUTS] = 0
        elif commit <= words[FIRST_SYNC]:
            return []
        return self.take_getters(mask, n) if words[WAITERS] else []

    def share_sync(self, slot: int, until: int) -> None:
        """Note that the owner of `slot` waits for another one's sync of everything below `until`.
        The caller holds the write lock.
        """
        words = self.words
        words[self._owners_at + slot * _OWNER_WORDS + SHARED] = until
        words[SYNC_WAIT_HIGH] = until

    def take_sharing(self, before: int) -> list[int]:
        """Owners for whom this sync was made, too, the commit point having been `before`; they are
        no longer marked. The caller holds the write lock.
        """
        words = self.words
        if words[SYNC_WAIT_HIGH] <= before:
            return []
        commit = words[COMMIT]
        found = [slot for slot, until in enumerate(self._of_each(SHARED)) if 0 < until <= commit]
        for slot in found:
            words[self._owners_at + slot * _OWNER_WORDS + SHARED] = 0
        return found

    # -- the replica -----------------------------------------------------------------------------

    def promise_replica(self, start: int, end: int) -> None:
        """Note a frame with Puts that was promised the replica. The caller holds the write lock."""
        words = self.words
        if words[REPLICATED] >= words[REPLICA_HIGH]:
            words[FIRST_REPLICA] = start
        words[REPLICA_HIGH] = end

    def replica_words(self) -> list[int]:
        """What is known of the replica, for the page that follows this one in the same boot. The
        mode does not matter: who made this page may have died before he had set it.
        """
        words = self.words
        return [words[word] for word in (REPLICATED, REPLICA_AT, REPLICA_HIGH, FIRST_REPLICA)]

    @staticmethod
    def pack_kept(store_id: bytes, boot_id: bytes, known: list[int]) -> bytes:
        """What `create` is to keep of `replica_words`."""
        return _KEPT.pack(_KEPT_MAGIC, store_id, boot_id, *known) if any(known) else b""

    @staticmethod
    def read_kept(path: str, store_id: bytes, boot_id: bytes) -> list[int]:
        """What a page that was never finished has kept of `replica_words`; nothing if none of this
        file and boot is there.
        """
        try:
            fd = _files.open_ro(path)
        except OSError:
            return []
        try:
            data = _files.read_at(fd, _KEPT.size, _KEPT_AT)
        finally:
            _files.close(fd)
        if len(data) < _KEPT.size:
            return []
        magic, store, boot, *known = _KEPT.unpack(data)
        return known if (magic, store, boot) == (_KEPT_MAGIC, store_id, boot_id) else []

    def keep_replica_words(self, known: list[int]) -> None:
        """Take over what `replica_words` gave, as far as the log goes."""
        words = self.words
        for word, value in zip(
            (REPLICATED, REPLICA_AT, REPLICA_HIGH, FIRST_REPLICA), known, strict=False
        ):
            words[word] = min(value, words[TAIL])

    def await_replica(self, slot: int, until: int) -> None:
        """Note that the owner of `slot` waits until the replica has everything below `until`. The
        caller holds the write lock.
        """
        words = self.words
        words[self._owners_at + slot * _OWNER_WORDS + AWAITED] = until
        words[REPLICA_WAIT_HIGH] = until

    def take_replica_waiting(self, before: int) -> list[int]:
        """Owners that wait for more than `before`, the point known until now; those who have what
        they wait for are no longer marked. The caller holds the write lock.
        """
        words = self.words
        if words[REPLICA_WAIT_HIGH] <= before:
            return []
        found = []
        for slot, _ in self.owners():
            at = self._owners_at + slot * _OWNER_WORDS + AWAITED
            if words[at]:
                found.append(slot)
                if words[at] <= words[REPLICATED]:
                    words[at] = 0
        return found

    # -- owners ----------------------------------------------------------------------------------

    def _of_each(self, word: int) -> list[int]:
        """That word of every slot, the token with 0, as far as there are owners."""
        words = self.words
        at = self._owners_at
        return words[at + word : at + words[OWNERS_HIGH] * _OWNER_WORDS : _OWNER_WORDS].tolist()

    def owners(self) -> list[tuple[int, int]]:
        """(slot, token) of every owner that has a token, living or dead."""
        return [(slot, token) for slot, token in enumerate(self._of_each(0)) if token]

    def others(self, slot: int) -> list[int]:
        """The slots of every owner, living or dead, but for one."""
        return [n for n, token in enumerate(self._of_each(0)) if token and n != slot]

    def token(self, slot: int) -> int:
        return self.words[self._owners_at + slot * _OWNER_WORDS]

    def set_token(self, slot: int, token: int) -> None:
        """Give or clear the token of a slot. The caller holds the write lock."""
        at = self._owners_at + slot * _OWNER_WORDS
        words = self.words
        for kind in (READY, SETTLED):
            if words[at + kind]:
                self.wait_no_more(slot, kind)
        words[at + PINNED] = words[at + AWAITED] = words[at + SHARED] = 0
        words[at] = token
        words[OWNERS_SEQ] += 1
        if token and slot >= words[OWNERS_HIGH]:
            words[OWNERS_HIGH] = slot + 1

    def wait_for(self, slot: int, kind: int, mask: int, gid: int = 0) -> None:
        """Note that the owner of `slot` waits, for what comes to the group `gid` or, if that is 0,
        to several. The caller holds the write lock.
        """
        at = self._owners_at + slot * _OWNER_WORDS
        words = self.words
        waited = words[at + kind]
        if not waited:
            words[WAITERS] += 1 if kind == READY else FOR_SETTLED
        if kind == READY:
            words[at + GROUP] = gid if waited == 0 or words[at + GROUP] == gid else 0
        words[at + kind] = waited | mask

    def waits(self, slot: int, kind: int) -> bool:
        """Whether the owner of `slot` is noted as one that waits."""
        return self.words[self._owners_at + slot * _OWNER_WORDS + kind] != 0

    def wait_no_more(self, slot: int, kind: int) -> None:
        """Take back a `wait_for`. The caller holds the write lock."""
        at = self._owners_at + slot * _OWNER_WORDS
        words = self.words
        words[at + kind] = 0
        # After the mark: whoever dies in between leaves a number that is too high, not one that is
        # below 0 when the mark is taken again.
        words[WAITERS] -= 1 if kind == READY else FOR_SETTLED

    def take_waiting(self, kind: int, mask: int) -> list[int]:
        """Slots that wait for this; they are no longer marked. The caller holds the write lock."""
        found = [slot for slot, waits in enumerate(self._of_each(kind)) if waits & mask]
        for slot in found:
            self.wait_no_more(slot, kind)
        return found

    def take_getters(self, mask: int, n: int) -> list[int]:
        """Slots to be woken for `n` messages put to these topics: of each group as many as there
        are messages, beginning with another one each time; they are no longer marked. Others would
        look in vain. The caller holds the write lock.
        """
        words = self.words
        waiting = [slot for slot, waits in enumerate(self._of_each(READY)) if waits & mask]
        if len(waiting) > 1:
            first = bisect_left(waiting, words[NEXT_WOKEN] % words[OWNERS_HIGH])
            waiting = waiting[first:] + waiting[:first]
        found = []
        woken: dict[int, int] = {}
        for slot in waiting:
            gid = words[self._owners_at + slot * _OWNER_WORDS + GROUP]
            if gid:
                if woken.get(gid, 0) >= n:
                    continue
                woken[gid] = woken.get(gid, 0) + 1
            self.wait_no_more(slot, READY)
            words[NEXT_WOKEN] = slot + 1
            found.append(slot)
        return found

    def pin(self, slot: int, segment: int | None) -> None:
        """Keep this segment and all later ones from being freed (None: no more), for as long as
        the owner of `slot` lives. The caller holds the write lock.
        """
        self.words[self._owners_at + slot * _OWNER_WORDS + PINNED] = (
            0 if segment is None else segment + 1
        )

    def pinned(self, segment_bytes: int, *, replica: bool = True) -> int:
        """The first segment that some owner, or the replica within its bound, still reads; past
        all segments when none does.
        """
        words = self.words
        pins = self._of_each(PINNED)
        pin = words[REPLICA_PIN]
        if replica and pin and (words[LAST] - pin) * segment_bytes <= PIN_BYTES:
            pins.append(pin)
        return min((pin for pin in pins if pin), default=(1 << 63) + 1) - 1

    def is_in_place(self) -> bool:
        """False once the scratch folder was deleted, moved or replaced."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def close(self) -> None:
        """Let go of it. Whoever still looks, in a thread that is on its way out, sees the last
        state, and what he holds of it goes with him.
        """
        self.words = memoryview(bytearray(self.words)).cast("Q")
        self.slots = memoryview(bytearray(self.slots)).cast("Q")
        self._file.close()


def mask_of(tid: int) -> int:
    """The bit of a topic in a waiting mask; two topics may share one, which only wakes in vain."""
    return 1 << (tid & 63)

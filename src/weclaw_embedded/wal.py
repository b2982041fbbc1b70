"""The log: checksummed frames of byte records in the segments of one file.

    append(records) ─► pending ── write() ─► in the file, TAIL moved ── sync() ─► on the disk
                          └─ discard()                                    (the caller then
                                                                           raises COMMIT)

Role: everything between "these records belong together" and the bytes of the file.  Offsets are
positions in the log for ever: segment number * segment size + position in the segment.

Invariants:

* One append is one frame, there whole or not at all.
* TAIL is moved after the bytes are in the file, so that nobody reads what isn't there; WRITING
  says that somebody is between the two, and who finds it set without its holder calls `heal`.
* Nothing shared is touched before `write`: an append that fails, or is discarded, leaves no
  trace but perhaps a free slot more.
* Every read is checked against the salt of the segment's present life.

Who may do what: `append`, `write`, `discard`, `heal`, `free`, `trim`, `prepare_spare` only under
the one write lock of all processes, which the caller holds.  Reading needs no lock; a segment
may be freed under a reader, who then gets LookupError.  A `Log` itself is not thread-safe.

It knows nothing of queues, nor of what is in a record.
"""

from __future__ import annotations

from collections.abc import Callable

from . import _clock, _files, _names
from ._appending import Appending, new_salt
from ._finding import HEADER_HEALED, HEADER_REBUILT
from ._format import (
    HEAD_RECORD_AT,
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    SLOT_BYTES,
    FileHeader,
    SlotHeader,
    check_segment_bytes,
    pack_head,
    pack_header,
    pack_slot,
    unpack_header,
)
from ._layout import Alike, Record, bytes_of
from ._log_end import Follow, Recovery, last_checkpoint, verify
from ._lost_end import SEGMENT_LABELLED
from ._recovery import heal, recover
from ._scan import Frame, OnDamage
from ._segments import (
    ANNOUNCED,
    CHECKPOINT,
    COMMIT,
    HEAD,
    LAST,
    LAST_FRAME,
    READ_AGAIN,
    RESERVE,
    RESERVE_EACH,
    SLOTS,
    SPARES,
    TAIL,
    WORDS,
    WRITING,
    LogState,
)
from .errors import StorageError

__all__ = [
    "ANNOUNCED",
    "CHECKPOINT",
    "COMMIT",
    "HEAD",
    "HEADER_HEALED",
    "HEADER_REBUILT",
    "LAST",
    "LAST_FRAME",
    "READ_AGAIN",
    "RESERVE",
    "RESERVE_EACH",
    "SEGMENT_LABELLED",
    "SLOTS",
    "SPARES",
    "TAIL",
    "WORDS",
    "WRITING",
    "Alike",
    "Frame",
    "Log",
    "LogState",
    "OnDamage",
    "Record",
    "Recovery",
    "bytes_of",
    "new_salt",
    "read_file_header",
]


def read_file_header(fd: int, name: str = "the file") -> FileHeader:
    """Read the header block; raises what `unpack_header` does."""
    return unpack_header(_files.read_at(fd, HEADER_BYTES, 0), name)


class Log(Appending):
    """One process's hands on the log of one open file.  See the module for who may call what."""

    @staticmethod
    def create(
        path: str,
        *,
        segment_bytes: int,
        store_id: bytes,
        epoch: int = 1,
        created_us: int,
    ) -> None:
        """Make a new file with an empty log and one spare slot, whole or not at all.

        A file of no bytes is replaced; FileExistsError when there is any other.
        """
        check_segment_bytes(segment_bytes)
        header = FileHeader(segment_bytes, store_id, epoch, 1, created_us)
        slot = SlotHeader(0, new_salt(), 0, 0, 0, epoch, 0, created_us)

        def write(fd: int) -> None:
            _files.zero_fill(fd, 0, HEADER_BYTES + 2 * segment_bytes)
            block = bytearray(pack_header(header))
            record = pack_head(0, store_id)
            block[HEAD_RECORD_AT : HEAD_RECORD_AT + len(record)] = record
            _files.write_at(fd, [bytes(block)], 0)
            packed = pack_slot(slot, store_id)
            _files.write_at(fd, [packed], HEADER_BYTES)
            _files.write_at(fd, [packed], HEADER_BYTES + segment_bytes - SLOT_BYTES)

        _names.create_whole(path, write, replace_empty=True)

    def write_header(self, *, epoch: int) -> FileHeader:
        """Rewrite the header block with another epoch, durably, one copy after the other."""
        header = self.header._replace(epoch=epoch, generation=self.header.generation + 1)
        block = pack_header(header)
        for at in (0, HEADER_BYTES // 2):
            _files.write_at(self.fd, [block[at : at + HEADER_COPY_BYTES]], at)
            _files.sync_data(self.fd)
        self.header = header
        return header

    def holds_another(self) -> bool:
        """Whether somebody else has written another file over this one. The caller has the write
        lock. What can't be read is damage, and says nothing by itself.
        """
        last = self.state.words[LAST]
        try:
            is_ours = read_file_header(self.fd).store_id == self.header.store_id
        except (OSError, StorageError):
            is_ours = False
        else:
            if not is_ours:
                return True
        try:
            slot = self.read_slot(self.slot_of(last))
        except (OSError, StorageError, LookupError):
            return False
        return not is_ours if slot is None else slot.segment != last

    # Syncing, and giving back -------------------------------------------------------------

    def sync(self) -> None:
        """Return when everything written before the call is on stable storage; needs no lock.

        Raises OSError when the disk refuses, after which nothing more may be promised.
        """
        _files.sync_data(self.fd)

    def begin_sync(self) -> None:
        """Have the disk begin with what the next `sync` is for; promises nothing, needs no lock."""
        _files.begin_sync(self.fd)

    def free(self, segment: int, needs: int | None = None) -> None:
        """Let go of every segment up to this one, for reasons found in the log up to now.

        Their slots are used again once `needs` (what is written or pending, if not given) is on
        stable storage.
        """
        super().free(segment, self.pending_tail if needs is None else needs)

    # After a crash -----------------------------------------------------------------------

    def heal(self) -> None:
        """Finish or undo a write whose writer died or was interrupted; WRITING was found set.

        Frames that are whole in the file are taken, anything after them is zeroed.
        """
        self.discard()
        heal(self)
        self._last = (-1, 0, 0)

    def recover(
        self,
        commit: int = 0,
        *,
        cache_is_true: bool = False,
        whole: bool = True,
        failed: bool = False,
        near: int = 0,
        complete: Callable[[], bool] | None = None,
        follow: Follow | None = None,
    ) -> Recovery:
        """Find the state of the log from the file alone; the caller has the file for itself.

        `commit` is a commit point known from before (0: none): what is bad below it is damage.
        `cache_is_true`: nothing but processes died since the file was written, so what the
        cache says is what there is.  Otherwise the file is synced and read from the disk.
        `whole=False`: the end is enough, if it can be found from `near`, where the last frame was
        said to begin, or from `commit`.  `failed`: a sync failed at that commit point; what lies
        above it is written again first.  `complete()` is asked to write what the file lacks at its
        end, if it may lack something; True when it has.  `follow` is handed what is found from the
        head on up to the first that is bad, if all that is kept is looked at: these frames stay.

        Raises CorruptError when there is no log to be found, OSError when the disk refuses.
        """
        self.discard()
        self.forget()
        self._last = (-1, 0, 0)
        self.forget_read()
        self.unread = []
        return recover(
            self,
            commit=commit,
            cache_is_true=cache_is_true,
            whole=whole,
            failed=failed,
            near=near,
            begin_segment=self._begin_after_recovery,
            complete=complete,
            follow=follow,
        )

    def last_checkpoint(self) -> tuple[int, bytes]:
        """(offset, record) of the latest checkpoint, for who follows a recovery."""
        return last_checkpoint(self)

    def _begin_after_recovery(self, prev_end: int) -> None:
        """Begin a segment with nothing in it yet, after what was found."""
        segment = prev_end - 1 >> self.bits
        self._tail = self.state.words[TAIL]
        self._pending_last = self._tail, *self.last_frame
        self._end = prev_end
        self._salt = self.place(segment)[1]
        try:
            self._begin_segment(_clock.wall_us(), spare=True)
            self.write()
        except BaseException:
            self.discard()
            raise

    def verify(self, seen: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
        """Check everything that is kept and change nothing: (offset, reason) of each bad spot.

        `seen` is told now and then how many bytes were read, and of how many.
        """
        return verify(self.at_rest(), seen)

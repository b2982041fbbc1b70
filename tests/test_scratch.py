"""The scratch folder: when the index that lies there may be opened."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _scratch
from weclaw_embedded._index import FILE_NAME, Index


@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
def test_an_index_is_known_by_both_its_first_pages(path: Path, page_bytes: int) -> None:
    """However large a page of memory is where it was made; cut short it is not opened."""
    with weclaw.Queue(path) as q:
        q.put("x", key="k")
        q.get()
    data = (Path(f"{path}.d") / _scratch.INDEX_NAME / FILE_NAME).read_bytes()
    (own_bytes,) = struct.unpack_from("<I", data, 40)
    made = bytearray(4 * page_bytes)
    for n in range(2):
        meta = bytearray(data[n * own_bytes : n * own_bytes + 512])
        struct.pack_into("<I", meta, 40, page_bytes)
        struct.pack_into("<Q", meta, 136, 3)  # the last page that is used
        made[n * page_bytes : n * page_bytes + 512] = meta
    file = path.with_name("made")
    file.write_bytes(made)
    assert _scratch._looks_like_lmdb(str(file), len(made))
    assert not _scratch._looks_like_lmdb(str(file), len(made) - 1)
    file.write_bytes(made[:page_bytes])
    assert not _scratch._looks_like_lmdb(str(file), len(made))
    made[page_bytes + 16] ^= 1
    file.write_bytes(made)
    assert not _scratch._looks_like_lmdb(str(file), len(made))


def test_an_index_that_was_only_read_is_not_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is when something was committed to it, and when nobody knows whether it ever was."""
    synced: list[bool] = []
    close = Index.close

    def note(index: Index, *, sync: bool = False) -> bool:
        synced.append(sync)
        return close(index, sync=sync)

    path = tmp_path / "q.wq"
    with weclaw.Queue(path) as q:
        q.put("x")
    monkeypatch.setattr(Index, "close", note)

    def look() -> bool:
        with weclaw.Queue(path) as q:
            assert q.qsize()
        return synced.pop()

    assert not look()
    with weclaw.Queue(path) as q:
        q.put("y")
    assert synced.pop()
    assert not look()
    (tmp_path / "q.wq.d" / "index" / "clean").unlink()
    assert look()
    assert not look()
    shutil.rmtree(tmp_path / "q.wq.d")
    assert look()
    assert not look()

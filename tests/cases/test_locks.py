"""No lock that another process needs is held over a sync."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest
from tests.helpers.processes import Child

import weclaw_embedded as weclaw


def work_and_count(pipe, path, flush, limit):
    """Put, take, settle and fill up; report each sync made while its thread had the write lock."""
    import traceback
    from functools import partial

    from weclaw_embedded import _files, _locks, _opening

    holders = set()
    found = []
    n_syncs = [0]
    n_locks = [0]

    def locking(real):
        def call(fd, start, exclusive):
            got = real(fd, start, exclusive)
            if start == _opening.WRITE and exclusive and got is not False:
                holders.add(threading.get_ident())
                n_locks[0] += 1
            return got

        return call

    def unlocking(real):
        def call(fd, start):
            if start == _opening.WRITE:
                holders.discard(threading.get_ident())
            real(fd, start)

        return call

    def syncing(real):
        def call(*args):
            n_syncs[0] += 1
            if threading.get_ident() in holders:
                found.append("".join(traceback.format_stack(limit=8)))
            return real(*args)

        return call

    for name in ("lock", "try_lock"):
        setattr(_locks, name, locking(getattr(_locks, name)))
    _locks.unlock = unlocking(_locks.unlock)

    def bound_lock(fd, start):
        return partial(_locks.lock, fd, start, True), partial(_locks.unlock, fd, start)

    _locks.bound_lock = bound_lock
    for name in ("begin_sync", "sync_data", "sync_all", "sync_dir"):
        setattr(_files, name, syncing(getattr(_files, name)))
    for name in ("fsync", "fdatasync"):  # what goes round the door is found, too
        setattr(os, name, syncing(getattr(os, name)))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    q = weclaw.Queue(
        path,
        flush=flush,
        flush_interval_ms=20,
        retention=0,
        segment_bytes=65536,
        retry=weclaw.RetryPolicy(backoff=0.0),
    )
    n_put = n_done = n_full = n = 0
    for size in (100, 20_000, 300):
        for _ in range(300):
            n += 1
            try:
                q.put(os.urandom(size), key=str(n % 3) if n % 7 == 0 else None, priority=n % 3)
                n_put += 1
            except weclaw.DiskFullError:
                n_full += 1
            if n % 3 == 0:
                msg = q.get(block=False)
                if n % 5 == 0:
                    msg.nack()
                else:
                    msg.ack(result=n)
                    n_done += 1
    try:
        while True:
            q.get(block=False).ack()
            n_done += 1
    except weclaw.Empty:
        pass
    time.sleep(0.3)  # upkeep and the flushes of "batch" are a timer's, and are to be seen here
    q.close()
    pipe.send((found, n_syncs[0], n_locks[0], n_put, n_done, n_full))


@pytest.mark.parametrize("limit", [None, 3 << 20], ids=["room", "full"])
@pytest.mark.parametrize("flush", ["sync", "batch", "os"])
def test_no_sync_is_made_under_the_write_lock(path, flush, limit):
    """Whatever is done, and on a full disk too, nobody waits for another's disk to take a turn."""
    with Child(work_and_count, str(path), flush, limit) as child:
        found, n_syncs, n_locks, n_put, n_done, n_full = child.hear()
        child.end()
    assert found == [], found[0]
    assert n_syncs > 10  # else little was tried; with "os" only giving back syncs, in long rounds
    assert n_locks > 1000
    assert n_done == n_put
    assert (n_full > 0) is (limit is not None)

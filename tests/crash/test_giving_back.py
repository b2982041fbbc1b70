"""SIGKILL at each step of giving space back: log and index must not come apart there."""

from __future__ import annotations

import os
import signal

import pytest
from tests.helpers.processes import Child

import weclaw_embedded as weclaw

pytestmark = pytest.mark.crash


def settle_until_killed(pipe, path, step, moment):
    """Put messages of which two groups settle all, until the process is killed at that step."""
    from weclaw_embedded import _files, _index, _slots
    from weclaw_embedded._format import HEAD_RECORD_AT

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def deadly(real, is_it=lambda args: True):
        def wrapped(*args, **kwargs):
            if moment == "before" and is_it(args):
                kill()
            result = real(*args, **kwargs)
            if moment == "after" and is_it(args):
                kill()
            return result

        return wrapped

    if step == "the log lets go":
        _slots.Slots.free = deadly(_slots.Slots.free)
    elif step == "the index forgets":
        _index.Tx.drop_below = deadly(_index.Tx.drop_below)
    elif step == "the index says so":
        forgets = []
        commit = deadly(_index.Tx.commit, lambda args: bool(forgets))
        drop_below = _index.Tx.drop_below
        _index.Tx.drop_below = lambda *args: forgets.append(1) or drop_below(*args)
        _index.Tx.commit = commit
    else:
        _files.write_at = deadly(_files.write_at, lambda args: args[2] == HEAD_RECORD_AT)

    groups = {
        name: weclaw.Queue(path, group=name, retention=0, segment_bytes=65536)
        for name in ("one", "other")
    }
    for n in range(1000):
        id = groups["one"].put("x" * 1000, id=None if n % 2 else f"given {n}")
        for name, q in groups.items():
            msg = q.get()
            if n or name == "one":  # the first stays in the other, so that it is carried
                msg.ack(result=["r" * 800, n, name])
        pipe.send((id, n))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    ["the log lets go", "the index forgets", "the index says so", "the head is recorded"],
)
def test_killed_while_space_is_given_back_a_result_is_the_one_given_or_unknown(path, step, moment):
    """A message is known with all that was said of it, or not at all, after each step."""
    with Child(settle_until_killed, path, step, moment) as child:
        acked = child.hear_rest()
        assert child.wait() == -signal.SIGKILL
    assert len(acked) > 10
    groups = {name: weclaw.Queue(path, group=name, retention=3600) for name in ("one", "other")}
    kept = set()
    for name, q in groups.items():
        for id, n in acked:
            if not n and name == "other":
                continue
            try:
                assert q.result(id) == ["r" * 800, n, name]
                assert q.status(id) == "done"
                kept.add(id)
            except KeyError:
                assert q.status(id) == "unknown"
                assert id not in kept
    one, other = groups.values()
    msg = other.get(block=False)
    assert (msg.id, msg.body) == (acked[0][0], "x" * 1000)
    before = one.qsize()
    given = {id for id, n in acked[1:] if not n % 2}
    for id in given:
        assert one.put("anew", id=id) == id
    assert one.qsize() == before + len(given - kept)
    for q in groups.values():
        q.close()

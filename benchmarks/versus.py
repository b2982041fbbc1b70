"""Other queues on the same disk in the same run, each in its most durable mode, taking turns.

    python benchmarks/versus.py --quick
    python benchmarks/versus.py --slow-sync 5ms

The first run makes benchmarks/peers-venv and installs the peers (peers.txt) there. Redis takes
part when Debian's redis-server is installed; it is started on loopback and ended again. Peers
that lose what a killed consumer held, or that don't wait for the disk, are marked.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from importlib import util

from common import (
    Floor,
    Samples,
    make_message,
    make_messages,
    median_ratio,
    p50_us,
    rate_of,
    rate_of_threads,
    take_turns,
)
from crew import through_processes
from peers import PEERS, ByHand, Peer, redis_server
from program import HERE, Run, parser, report, result_path, running, surroundings
from table import Row

_VENV = HERE / "peers-venv"
_WANTED = HERE / "peers.txt"


def _run_with_peers() -> None:
    """Go on in the peers' environment, made when it is missing or its list has changed."""
    if sys.prefix == str(_VENV) or util.find_spec("litequeue"):
        return
    stamp = _VENV / "peers.txt"
    python = str(_VENV / "bin" / "python")
    if not stamp.exists() or stamp.read_text() != _WANTED.read_text():
        print(f"Installing the peers into {_VENV.relative_to(HERE.parent)} (once) ...", flush=True)
        venv.create(_VENV, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--editable", str(HERE.parent)], check=True)
        for line in _WANTED.read_text().splitlines():
            # One by one: a peer that has no wheel for this Python is left out, not all of them.
            if line and not line.startswith("#") and subprocess.call([*pip, line]):
                print(f"{line} can't be installed here and is left out")
        stamp.write_text(_WANTED.read_text())
    raise SystemExit(subprocess.call([python, *sys.argv]))


def _present(with_redis: bool) -> list[type[Peer]]:
    found = []
    for peer in PEERS.values():
        module = {"lmdb-queue": "equeue", "persist-queue": "persistqueue"}.get(
            peer.package, peer.package.replace("-", "_")
        )
        if (not module or util.find_spec(module)) and (peer.package != "redis" or with_redis):
            found.append(peer)
        else:
            print(f"{peer.name} is not here and is left out")
    return found


def _note(peer: type[Peer]) -> str:
    marks = [] if peer.at_least_once else ["AT MOST ONCE"]
    marks += [] if peer.is_durable else ["NOT DURABLE"]
    return "; ".join([*marks, peer.durable])


def _rows(section: str, peers: list[type[Peer]], samples: Samples, unit: str) -> Iterator[Row]:
    """The floor, the yardstick, then the others from fast to slow."""

    def row(name: str, note: str) -> Row:
        return Row(
            name,
            statistics.median(samples[name]),
            unit,
            median_ratio(samples, name, "floor"),
            median_ratio(samples, name, ByHand.name),
            note=note,
            samples={name: samples[name]},
            section=section,
        )

    yield row("floor", "the bare disk, no queue")
    rows = [row(peer.name, _note(peer)) for peer in peers]
    yield rows.pop(0)
    # Those that promise less come last, whatever their figures.
    less = {peer.name for peer in peers if not (peer.is_durable and peer.at_least_once)}
    sign = -1 if unit == "/s" else 1
    yield from sorted(rows, key=lambda one: (one.work in less, sign * one.value))


def _with_floor(floor: Floor, run: Run) -> dict[str, Callable[[], float]]:
    return {"floor": lambda: 1e6 / p50_us(floor.put, run.slice_s / 3)}


def _putting(run: Run, floor: Floor, peers: list[type[Peer]]) -> Iterator[Row]:
    queues = {peer.name: peer(run.path("put")) for peer in peers}
    contenders: dict[str, Callable[[], float]] = {
        "floor": lambda: p50_us(floor.put, run.slice_s / 2)
    }
    for name, queue in queues.items():
        contenders[name] = functools.partial(p50_us, queue.put, run.slice_s)
    yield from _rows("put, p50", peers, take_turns(run.calm, run.rounds, contenders), "µs")

    batching = [peer for peer in peers if peer.has_put_many]

    def many(queue: Peer) -> float:
        def step() -> int:
            queue.put_many(make_messages(100))
            return 100

        return rate_of(step, run.slice_s)

    contenders = _with_floor(floor, run)
    contenders |= {peer.name: functools.partial(many, queues[peer.name]) for peer in batching}
    yield from _rows("put_many(100)", batching, take_turns(run.calm, run.rounds, contenders), "/s")
    for queue in queues.values():
        queue.close()


def _getting(run: Run, floor: Floor, peers: list[type[Peer]]) -> Iterator[Row]:
    stock = run.syncs_in(1.5 * run.slice_s) + 100  # more than a durable one can take

    def turn(queue: Peer) -> float:
        if queue.has_put_many:
            queue.put_many(make_messages(stock))
        else:
            for n in range(stock):
                queue.put(make_message(n))

        def step() -> int:
            token, body = queue.get_waiting()
            assert body["model"]
            queue.ack(token)
            return 1

        return rate_of(step, run.slice_s, stock)

    queues = {peer.name: peer(run.path("get")) for peer in peers}
    contenders = _with_floor(floor, run)
    contenders |= {name: functools.partial(turn, queue) for name, queue in queues.items()}
    yield from _rows("get + ack", peers, take_turns(run.calm, run.rounds, contenders), "/s")
    for queue in queues.values():
        queue.close()


def _threading(run: Run, floor: Floor, peers: list[type[Peer]]) -> Iterator[Row]:
    """The yardstick has one thread: SQLite's connection is its own."""
    queues = {peer.name: peer(run.path("threads")) for peer in peers}
    contenders = _with_floor(floor, run)
    for name, queue in queues.items():
        threads = 8 if queue.shares_threads else 1
        contenders[name] = functools.partial(rate_of_threads, queue.put, threads, run.slice_s)
    samples = take_turns(run.calm, run.rounds, contenders)
    yield from _rows("8 threads putting (Y: one)", peers, samples, "/s")
    for queue in queues.values():
        queue.close()


def _processing(run: Run, floor: Floor, peers: list[type[Peer]]) -> Iterator[Row]:
    count = max(50, min(2000, run.syncs_in(0.1 if run.quick else 0.3)))
    section = "1 producer + 2 consumer processes"
    able, failed = [], []
    for peer in peers:
        try:
            through_processes(peer.name, run.path("try"), min(200, count), patience_s=15)
            able.append(peer)
        except RuntimeError as error:
            failed.append(Row(peer.name, 0.0, "/s", note=str(error), section=section))
    contenders = _with_floor(floor, run)
    for peer in able:
        contenders[peer.name] = lambda name=peer.name: through_processes(  # type: ignore[misc]
            name, run.path("processes"), count
        )
    rounds = max(3, run.rounds // 2)
    yield from _rows(section, able, take_turns(run.calm, rounds, contenders, most=rounds), "/s")
    yield from failed


def main() -> None:
    chosen = parser(str(__doc__).partition("\n")[0]).parse_args()
    _run_with_peers()
    with running(chosen) as run, redis_server(run.path("redis")) as redis_version:
        where = surroundings(run.folder)
        peers = _present(bool(redis_version))
        where |= {peer.package: run.version(peer.package) for peer in peers[2:]}
        if redis_version:
            where["redis-server"] = redis_version
        floor = Floor(run.path("floor"))
        rows: list[Row] = []
        for work in (_putting, _getting, _threading, _processing):
            began = time.monotonic()
            rows += work(run, floor, peers)
            print(f"{rows[-1].section}: {time.monotonic() - began:.0f} s", flush=True)
        floor.close()
        report("versus", run, rows, where, chosen)
    if not chosen.no_json and util.find_spec("matplotlib"):
        from plot import draw

        path = chosen.json or result_path("versus", quick=chosen.quick)
        draw(path, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

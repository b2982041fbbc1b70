"""stats, health, peek, results: what is in there, and is it well?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded import _survey, replica
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

# Ready for so long with nobody working: a group that stands still.
_STILL_S = 60.0
_NOT_BEGUN = "has not begun; this is what it would get"


@click.command()
@common.file_argument
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def stats(file: str, topic: str, group: str, as_json: bool, readonly: bool) -> None:
    """Count what is in FILE: ready, leased, delayed, dead, settled.

    People see every topic and group there is, or those chosen. With --json, the counts of --topic
    and --group come first, and "groups" has all there are.
    """
    with common.looking(file, readonly=readonly) as store:
        # People see what is there: that the defaults are not among it says nothing.
        common.look_there(
            store,
            topic if as_json or common.told("topic") or common.told("group") else None,
            group if as_json or common.told("group") else None,
            may_begin=True,
        )
        queue = common.queue_of(store, topic, group)
        mine, holders = queue.stats(), _survey.consumers(queue)
        groups = [_counted(store, one) for one in common.places(store, None, None)]
        chosen = common.places(
            store,
            topic if common.told("topic") else None,
            group if common.told("group") else None,
        )
        shown = [(one, _counted(store, one)) for one in chosen]
        begun = {(one.topic, one.group) for one in store.groups()}
    if as_json:
        found = {"topic": topic, "group": group, **mine._asdict(), "consumers": holders}
        common.print_json({**found, "groups": groups})
        return
    _show_places(shown, begun)
    _show_file(file, mine)


def _show_places(
    shown: Sequence[tuple[common.Place, dict[str, Any]]], begun: set[tuple[str, str]]
) -> None:
    """The counts of each topic and group, and what is to be said of some."""
    fields = ("ready", "delayed", "leased", "dead", "settled")
    common.print_table(
        ["topic", "group", *((name, "right") for name in fields), ("oldest", "right")],
        [
            (
                found["topic"],
                found["group"],
                *(found[name] for name in fields),
                common.age(found["oldest_age_s"]),
            )
            for _, found in shown
        ],
        in_order=False,
    )
    for one, found in shown:
        place = common.plain(f"topic {one.topic!r}, group {one.group!r}")
        if one.paused:
            click.echo(f"{place} is {common.plain(one.pause)}\n'weclawctl resume' ends it")
        elif (one.topic, one.group) not in begun and (
            common.told("group") or any(one.topic == name for name, _ in begun)
        ):
            click.echo(f"{place} {_NOT_BEGUN}")
        elif _stands_still(found):
            click.echo(f"{place} stands still: {found['ready']} ready, none in hand")
        if found["consumers"]:
            click.echo(f"{place}, in hand: {common.holders(found['consumers'])}")


def _show_file(file: str, counts: weclaw.Stats) -> None:
    """What is said of the file as a whole."""
    role = replica.node(file).role
    if role != "primary":
        told = {"copy": "a replica's copy", "fenced": "fenced: its copy was promoted over it"}
        click.echo(f"this file is {told.get(role, role)}; look only")
    size, reclaimable = common.size(counts.file_bytes), common.size(counts.reclaimable_bytes)
    said = f"file {size}, reclaimable {reclaimable}, damaged {counts.damaged}"
    lag = counts.replica_lag
    if lag is not None:
        said += f", replica {'level' if lag == 0 else f'{common.size(lag)} behind'}"
    click.echo(said)


def _counted(store: weclaw.Store, place: common.Place) -> dict[str, Any]:
    queue = common.queue_of(store, place.topic, place.group)
    stats, holders = queue.stats(), _survey.consumers(queue)
    return {**stats._asdict(), **place._asdict(), "consumers": holders}


def _stands_still(found: Mapping[str, Any]) -> bool:
    """Whether a group has had messages ready for a while, and nobody has any in hand."""
    return bool(found["ready"] and not found["leased"] and found["oldest_age_s"] > _STILL_S)


@click.command()
@common.file_argument
@click.option("--max-backlog", type=click.IntRange(min=0), help="Ready and delayed, per group.")
@click.option("--max-age", type=common.DURATION, help="Age of the oldest: 600, 10m, 2h.")
@click.option("--max-dead", type=click.IntRange(min=0), help="Dead letters, per group.")
@click.option("--max-lag", type=click.IntRange(min=0), help="Bytes the replica is behind.")
@click.option("--topic", help="Only this topic; default: all.")
@click.option("--group", help="Only this group; default: all.")
@common.json_option
@common.readonly_option
def health(
    file: str,
    max_backlog: int | None,
    max_age: float | None,
    max_dead: int | None,
    max_lag: int | None,
    topic: str | None,
    group: str | None,
    as_json: bool,
    readonly: bool,
) -> int:
    """Check FILE and its replica, one line a check. Ends with 1 if any is bad.

    A file that can't be opened, or has damage, is bad; so is what breaks a limit given here, a
    name that is not there, and a file that a promoted copy has taken the place of. What somebody
    should see but may be meant, such as a pause, is marked with "!!" and ends with 0.
    """
    checks = _Checks()
    counts: list[tuple[common.Place, weclaw.Stats]] = []
    begun: set[tuple[str, str]] = set()
    try:
        with common.looking(file, readonly=readonly) as store:
            wrong = common.missing(store, topic, group)
            other = _survey.replica_of(store)
            unprotected = other is None and _survey.lost_its_replica(store)
            if wrong is None:
                begun = {(one.topic, one.group) for one in store.groups()}
                counts = [
                    (place, common.queue_of(store, place.topic, place.group).stats())
                    for place in common.places(store, topic, group)
                ]
            first = counts[0][1] if counts else common.queue_of(store, "default", "default").stats()
    except (common.Failure, weclaw.WeclawError, OSError) as error:
        checks.add("opens", common.in_one_line(error), bad=True)
        counts = []
    else:
        checks.add("opens", "yes")
        if wrong is not None:
            checks.add("named", wrong, bad=True)
        checks.nodes(file, other)
        checks.file(first, max_lag, unprotected=unprotected)
    for place, found in counts:
        if group is not None and (place.topic, place.group) not in begun:
            checks.add("named", _NOT_BEGUN, warn=True, topic=place.topic, group=place.group)
        checks.group(place, found, max_backlog, max_age, max_dead)

    ok = all(one["ok"] for one in checks.found)
    if as_json:
        common.print_json({"file": file, "ok": ok, "checks": checks.found})
    else:
        for one in checks.found:
            click.echo(_line(one))
    return 0 if ok else 1


class _Checks:
    """What `health` has looked at, in the order in which it is told."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        value: Any,
        limit: float | None = None,
        *,
        bad: bool = False,
        warn: bool = False,
        **where: Any,
    ) -> None:
        found = {"check": name, "ok": not bad, "warning": warn, "value": value, "limit": limit}
        self.found.append({**found, **where})

    def nodes(self, file: str, other: str | Sequence[str] | None) -> None:
        """The file, and the other one if it has a replica."""
        me = replica.node(file)
        self._node(me, bad=me.role == "fenced")
        if not other or me.role == "copy":  # of a copy it is the copy itself
            return
        try:
            copy = replica.node(other) if isinstance(other, str) else replica.node_behind(other)
        except (weclaw.WeclawError, OSError) as error:
            name = other if isinstance(other, str) else " ".join(other)
            what = "no copy there"
            if isinstance(error, PermissionError):
                what = "can't be looked at"
            self.add("node", f"{what}: {common.in_one_line(error)}", bad=True, node=name)
        else:
            mine = copy.queue == me.queue
            self._node(copy, bad=copy.role != "copy" or not mine, mine=mine)

    def _node(self, found: replica.Node, *, bad: bool, mine: bool = True) -> None:
        whose = "" if mine else " of another queue"
        value = f"{found.role}{whose}, epoch {found.epoch}"
        more: dict[str, Any] = {"role": found.role, "epoch": found.epoch, "alive": found.alive}
        self.add("node", value, bad=bad, node=found.path, **more)

    def file(self, found: weclaw.Stats, max_lag: int | None, *, unprotected: bool) -> None:
        """What is of the file as a whole; `unprotected`: its original had a replica."""
        self.add("damaged", found.damaged, 0, bad=found.damaged > 0)
        # Who gives a limit wants a replica: that there is none is the worst lag of all.
        lag = found.replica_lag
        if lag is not None or max_lag is not None or unprotected:
            late = max_lag is not None and (lag is None or lag > max_lag)
            self.add("replica_lag", lag, max_lag, bad=late, warn=lag is None and not late)

    def group(
        self,
        place: common.Place,
        found: weclaw.Stats,
        max_backlog: int | None,
        max_age: float | None,
        max_dead: int | None,
    ) -> None:
        """What is of one topic and group."""
        where: dict[str, Any] = {"topic": place.topic, "group": place.group}
        backlog = found.ready + found.delayed
        oldest = found.oldest_age_s
        self.add("backlog", backlog, max_backlog, bad=_over(backlog, max_backlog), **where)
        self.add("oldest_age_s", oldest, max_age, bad=_over(oldest, max_age), **where)
        self.add("dead", found.dead, max_dead, bad=_over(found.dead, max_dead), **where)
        # Named, but not bad by itself: whether it should move, --max-age says.
        if place.paused:
            self.add("flow", place.pause, warn=True, **where)
        elif _stands_still(found._asdict()):
            self.add("flow", "stands still", warn=True, **where)


def _over(value: float | None, limit: float | None) -> bool:
    return limit is not None and value is not None and value > limit


def _line(found: dict[str, Any]) -> str:
    name, value, limit = found["check"], found["value"], found["limit"]
    if name == "oldest_age_s":
        name, value = "oldest", common.age(value)
        limit = None if limit is None else common.age(limit)
    place = f" {found['topic']}/{found['group']}" if "topic" in found else ""
    if "node" in found:
        place = f" {found['node']}"
        if "alive" in found:
            value = f"{value}, {'in use' if found['alive'] else 'not in use'}"
    if name == "replica_lag" and value is None:
        value = "there is no replica"
    bound = "" if limit is None else f" (limit {limit})"
    mark = "BAD" if not found["ok"] else "!! " if found["warning"] else "ok "
    return common.plain(f"{mark} {name}{place}: {'-' if value is None else value}{bound}")


@click.command()
@common.file_argument
@click.option("-n", "--limit", "limit", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--leased", is_flag=True, help="Show what is in hand instead, and in whose.")
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def peek(
    file: str, limit: int, leased: bool, topic: str, group: str, as_json: bool, readonly: bool
) -> None:
    """Show what FILE would deliver next. Takes nothing."""
    with common.looking(file, readonly=readonly) as store:
        common.look_there(store, topic, group, may_begin=True)
        queue = common.queue_of(store, topic, group)
        before = queue.stats()
        if leased:
            found = [_in_hand(one, topic) for one in _survey.held(queue, limit)]
            now = datetime.now(timezone.utc)
        else:
            found = [_message(msg) for msg in queue.peek(limit)]
    if as_json:
        common.print_json(found)
    elif not found:
        # Where something is damaged, nobody knows that there is nothing else.
        there = before.damaged or (before.leased if leased else before.ready)
        readable = " that can be read" if there else ""
        click.echo(f"nothing{readable} is {'in hand' if leased else 'ready'}")
    elif leased:
        common.print_table(
            [
                "id",
                ("put ago", "right"),
                ("delivery", "right"),
                ("lease left", "right"),
                "consumer",
            ],
            [
                (
                    one["id"],
                    common.age((now - one["enqueued_at"]).total_seconds()),
                    one["delivery_count"],
                    "held" if one["lease_left_s"] is None else common.age(one["lease_left_s"]),
                    one["consumer"] or "-",
                )
                for one in found
            ],
        )
        click.echo()
        bodies = [
            (one["id"], common.excerpt(one.get("body_error", one["body"]), 120)) for one in found
        ]
        common.print_table(["id", "body"], bodies, one_line=True)
    else:
        common.print_table(
            ["id", ("pr", "right"), "put (UTC)", "body"],
            [
                (
                    msg["id"],
                    msg["priority"],
                    common.when(msg["enqueued_at"])[5:],
                    common.excerpt(msg.get("body_error", msg["body"]), 120),
                )
                for msg in found
            ],
            one_line=True,
        )


def _message(msg: weclaw.Message) -> dict[str, Any]:
    names = ("id", "key", "priority", "headers", "topic", "offset", "enqueued_at")
    return common.with_body({name: getattr(msg, name) for name in names}, msg)


def _in_hand(one: _survey.Held, topic: str) -> dict[str, Any]:
    content = one.content
    found = {
        "id": content.id,
        "key": content.key,
        "priority": content.priority,
        "topic": topic,
        "offset": content.offset,
        "enqueued_at": content.enqueued_at,
        "consumer": one.consumer,
        "delivery_count": one.delivery_count,
        "lease_left_s": None if one.left_s is None else round(one.left_s, 3),
    }
    return common.with_body(found, content)


@click.command(short_help="Show the results of messages.")
@common.file_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "-n",
    "--limit",
    "limit",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="So many at most, the oldest.",
)
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def results(
    file: str,
    ids: tuple[str, ...],
    limit: int,
    topic: str,
    group: str,
    as_json: bool,
    readonly: bool,
) -> int:
    """Show the results of messages of FILE: those named, else all that are kept, oldest first.

    Of a message acked without a result there is none to list: name it to see its status. Ends
    with 1 unless all that were named are done, and what is listed can be read.
    """
    more = False
    with common.looking(file, readonly=readonly) as store:
        common.look_there(store, topic, group)
        queue = common.queue_of(store, topic, group)
        if ids:
            found = [_result(queue, id) for id in ids]
        else:
            found = list(itertools.islice(_kept_results(queue), limit + 1))
            more = len(found) > limit
            del found[limit:]
    if as_json:
        common.print_json(found)
    elif not found:
        click.echo("no results are kept")
    else:
        common.print_table(
            ["id", "status", "result"],
            [
                (
                    entry["id"],
                    entry["status"],
                    entry.get("reason", "-")
                    if "reason" in entry or entry["status"] != "done"
                    else common.excerpt(entry["result"], 2000),
                )
                for entry in found
            ],
        )
    if more:
        click.echo(f"the first {limit}; more with --limit", err=True)
    good = all(entry["status"] == "done" and "reason" not in entry for entry in found)
    return 0 if good else 1


def _result(queue: weclaw.Queue, id: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": id, "status": queue.status(id), "result": None}
    try:
        entry["result"] = queue.result(id)
        entry["status"] = "done"
    except weclaw.DeadLetterError as error:
        entry["status"] = "dead"
        entry["reason"] = error.letter.reason
    except (weclaw.CorruptError, weclaw.SerializationError) as error:
        entry["reason"] = common.in_one_line(error)
    except (weclaw.Empty, KeyError):
        pass  # the status says why there is none
    return entry


def _kept_results(queue: weclaw.Queue) -> Iterator[dict[str, Any]]:
    after = -1
    while page := _survey.results(queue, after, 500):
        after = page[-1][0]
        for _, id, result, damage in page:
            entry = {"id": id, "status": "done", "result": result}
            yield entry if damage is None else {**entry, "reason": common.in_one_line(damage)}


COMMANDS = [stats, health, peek, results]

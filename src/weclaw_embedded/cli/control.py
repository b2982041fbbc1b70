"""pause, resume, cancel, replay, purge: what flows."""

from __future__ import annotations

import contextlib
import re
from datetime import datetime, timedelta, timezone
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded import _survey
from weclaw_embedded._options import parse_seconds
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]


@click.command()
@common.file_argument
@click.argument("seconds", type=common.POSITIVE)
@click.option("--reason", help="Why; kept with the pause.")
@common.topic_option
@common.group_option
@common.json_option
def pause(
    file: str, seconds: float, reason: str | None, topic: str, group: str, as_json: bool
) -> None:
    """Deliver nothing from FILE for SECONDS (or 10m, 2h). Every process sees it."""
    with common.opened(file) as store:
        common.must_be_there(store, topic, group)
        common.queue_of(store, topic, group).pause(seconds, reason)
    if as_json:
        found = {"topic": topic, "group": group, "paused": True, "seconds": seconds}
        common.print_json({**found, "reason": reason})
    else:
        click.echo(f"paused for {common.age(seconds)}; 'weclawctl resume' ends it sooner")


@click.command()
@common.file_argument
@common.topic_option
@common.group_option
@common.json_option
def resume(file: str, topic: str, group: str, as_json: bool) -> None:
    """End a pause of FILE."""
    with common.opened(file) as store:
        common.must_be_there(store, topic, group)
        was_paused = any(
            one.paused for one in store.groups() if (one.topic, one.group) == (topic, group)
        )
        if was_paused:  # else nothing is written: a group does not begin with being resumed
            common.queue_of(store, topic, group).resume()
    if as_json:
        found = {"topic": topic, "group": group, "paused": False, "was_paused": was_paused}
        common.print_json(found)
    else:
        click.echo("resumed" if was_paused else "it was not paused")


@click.command(short_help="Take one message out, if nobody has begun it.")
@common.file_argument
@click.argument("id")
@common.topic_option
@common.json_option
def cancel(file: str, id: str, topic: str, as_json: bool) -> int:
    """Take message ID out of FILE, for every group, if none has begun or settled it."""
    with common.opened(file) as store:
        why = common.missing(store, topic, None)
        done = why is None and store.queue(topic).cancel(id)
        if not done and why is None:
            why = _why_not(store, topic, id)
    if as_json:
        common.print_json({"id": id, "cancelled": done})
    elif done:
        click.echo(f"{common.plain(id)} cancelled")
    if why is not None:
        common.fail(f"{common.plain(id)} was not cancelled: {common.plain(why)}")
    return 0


def _why_not(store: weclaw.Store, topic: str, id: str) -> str:
    """Who has it, or where it is instead."""
    for place in common.places(store, topic, None):
        status = common.queue_of(store, topic, place.group).status(id)
        if status not in ("ready", "delayed", "unknown"):
            return f"it is {status} in group {place.group!r}"
    elsewhere = [
        place.topic
        for place in common.places(store, None, None)
        if place.topic != topic
        and common.queue_of(store, place.topic, place.group).status(id) != "unknown"
    ]
    if elsewhere:
        return f"it is in topic {elsewhere[0]!r}, not in {topic!r}; give --topic"
    return f"there is no such message in topic {topic!r}"


@click.command(short_help="Let settled messages flow again.")
@common.file_argument
@click.option(
    "--offset", type=common.OFFSET, help="All from this offset on; 'earliest': all that are kept."
)
@click.option(
    "--since",
    help="All put since then: a duration ago (2h), or a time (2026-01-31T08:00, UTC).",
)
@click.option("--id", "ids", multiple=True, metavar="ID", help="This one; may be repeated.")
@common.topic_option
@common.group_option
@common.json_option
def replay(
    file: str,
    offset: int | str | None,
    since: str | None,
    ids: tuple[str, ...],
    topic: str,
    group: str,
    as_json: bool,
) -> int:
    """Let settled messages of FILE flow again through this group, in the order of their puts.

    Their old results are gone; dead letters stay dead (see 'dlq redrive').
    """
    if sum((offset is not None, since is not None, bool(ids))) != 1:
        raise click.UsageError("give one of --offset, --since, --id")
    chosen: dict[str, Any] = {"ids": list(ids)}
    if offset is not None:
        chosen = {"offset": offset}
    elif since is not None:
        chosen = {"since": _moment(since)}
    with common.opened(file) as store:
        common.must_be_there(store, topic, group)
        queue = common.queue_of(store, topic, group)
        with common.progress_bar("replay", None, percent=True) as update:
            number, unreadable = _survey.replay(queue, update, **chosen)
    if as_json:
        common.print_json({"replayed": number})
    else:
        click.echo(f"{common.count(number, 'message')} flow{'s' if number == 1 else ''} again")
    missing = len(set(ids)) - number
    if missing > 0:
        common.fail(
            f"{missing} of those named are not settled messages of this group, or can't be read"
        )
    if unreadable and not ids:
        common.fail(
            f"{common.count(unreadable, 'place')} can't be read, and what stood there was left out"
        )
    return 0


def _moment(text: str) -> datetime:
    """A time, or how long ago; naive times are UTC, as all times that are printed."""
    with contextlib.suppress(ValueError):
        return datetime.now(timezone.utc) - timedelta(seconds=parse_seconds(text))
    try:
        moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        raise click.UsageError(
            f"{text!r} is neither a duration (90s, 2h) nor a time (2026-01-31T08:00)"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


@click.command(short_help="Take everything ready and delayed away, for good.")
@common.file_argument
@click.option(
    "--drop-group",
    is_flag=True,
    help="Forget the group too, with its dead letters: it keeps nothing any more. Not for the only "
    "group of a topic: without groups a topic keeps all of it for the next one.",
)
@common.yes_option
@common.topic_option
@common.group_option
@common.json_option
def purge(file: str, drop_group: bool, yes: bool, topic: str, group: str, as_json: bool) -> None:
    """Take everything ready and delayed in FILE away from this group, for good.

    Other groups are not concerned. What is in hand and what is dead stays. With --drop-group that
    goes too, and so does the group. A topic whose only group is forgotten keeps everything for the
    next one, what was done or purged before too: for an only group leave out --drop-group.
    """
    where = f"topic {topic!r}, group {group!r}"
    with common.opened(file) as store:
        common.must_be_there(store, topic, group)
        queue = common.queue_of(store, topic, group)
        stats = queue.stats()
        number = stats.ready + stats.delayed
        kept = None  # for the next group, where there is none any more
        if drop_group:
            number += stats.leased + stats.dead
            question = f"Forget {where} and {common.count(number, 'message')} for good?"
            if [one.group for one in store.groups() if one.topic == topic] == [group]:
                question = f"Forget {where}, the only one, though the topic then keeps everything?"
            common.ask(common.plain(question), yes=yes)
            if not store.drop_group(group, topic=topic):
                common.fail(common.plain(f"there is no {where} yet; nothing was done"))
            if not any(one.topic == topic for one in store.groups()):
                number, kept = 0, queue.qsize()
        elif number:
            question = f"Take {common.count(number, 'message')} of {where} away for good?"
            common.ask(common.plain(question), yes=yes)
            number = queue.purge()
    if as_json:
        common.print_json({"purged": number, "kept": kept})
    elif kept is None:
        click.echo(f"{common.count(number, 'message')} purged")
    else:
        forgotten = f"group {group!r} forgotten; topic {topic!r} has no group any more"
        waits = f"what it keeps waits for the next one, {common.count(kept, 'message')}"
        click.echo(common.plain(f"{forgotten}: {waits}"))


COMMANDS = [pause, resume, cancel, replay, purge]

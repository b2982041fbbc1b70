"""top, tail: what goes on at this moment."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import weclaw_embedded as weclaw
from weclaw_embedded import _survey
from weclaw_embedded._message import Content
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

_LOOK_S = 0.2
# Nobody looks at an empty screen for longer.
_FIRST_S = 0.5


# top


@click.command(short_help="Watch FILE at work: counts, rates, oldest, dead.")
@common.file_argument
@click.option("--interval", type=common.POSITIVE, default=2.0, show_default=True)
@click.option(
    "-n",
    "--count",
    "times",
    type=click.IntRange(min=1),
    help="Look so many times; default: until Ctrl-C on a terminal, else once.",
)
@click.option("--topic", help="Only this topic; default: all.")
@click.option("--group", help="Only this group; default: all.")
@common.json_option
@common.readonly_option
def top(
    file: str,
    interval: float,
    times: int | None,
    topic: str | None,
    group: str | None,
    as_json: bool,
    readonly: bool,
) -> None:
    """Watch FILE at work: counts, rates, the oldest, dead letters, disk. Ctrl-C ends it.

    in/s and done/s are since the look before. With --json, one object a line for each look.
    """
    interval = max(interval, 0.1)
    on_screen = sys.stdout.isatty() and not as_json
    if times is None and not on_screen:
        times = 1
    with common.looking(file, readonly=readonly) as store, contextlib.ExitStack() as stack:
        common.look_there(store, topic, group)
        looks = _looks(store, topic, group, interval)
        if times is not None:
            looks = itertools.islice(looks, times)
        if not on_screen:
            with contextlib.suppress(KeyboardInterrupt):
                for look in looks:
                    if as_json:
                        common.print_json(look, indent=None)
                    else:
                        out = common.console()
                        out.print(_picture(file, look, out.width, 10_000))
            return
        out = common.console()
        live = stack.enter_context(Live(console=out, screen=times is None, auto_refresh=False))
        with contextlib.suppress(KeyboardInterrupt):
            for look in looks:
                live.update(_picture(file, look, out.width, out.height), refresh=True)


def _looks(
    store: weclaw.Store, topic: str | None, group: str | None, interval: float
) -> Iterator[dict[str, Any]]:
    """What there is, again and again; the first not at once, so that it has rates, but soon."""
    before: dict[tuple[str, str], weclaw.Stats] = {}
    puts_before: dict[str, int] = {}
    at = time.monotonic()
    first = True
    while True:
        now = time.monotonic()
        queues = {
            place: common.queue_of(store, place.topic, place.group)
            for place in common.places(store, topic, group)
        }
        found = {place: queue.stats() for place, queue in queues.items()}
        holders = {place: _survey.consumers(queue) for place, queue in queues.items()}
        puts = _survey.puts(store)
        came = {topic: number - puts_before.get(topic, 0) for topic, number in puts.items()}
        if not first:
            yield _look(found, before, came, holders, now - at)
        before = {(place.topic, place.group): stats for place, stats in found.items()}
        puts_before = puts
        at = now
        _wait(min(interval, _FIRST_S) if first else interval)
        first = False


def _wait(seconds: float) -> None:
    """Until the next look, for as long as somebody reads what is shown."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))
        common.check_reader()


def _look(
    found: dict[common.Place, weclaw.Stats],
    before: dict[tuple[str, str], weclaw.Stats],
    came: dict[str, int],
    holders: dict[common.Place, dict[str, int]],
    seconds: float,
) -> dict[str, Any]:
    groups = []
    for place, stats in found.items():
        earlier = before.get((place.topic, place.group), stats)
        groups.append(
            {
                "topic": place.topic,
                "group": place.group,
                **{name: getattr(stats, name) for name in _COUNTS},
                "puts_per_s": round(came.get(place.topic, 0) / seconds, 1),
                "settled_per_s": round((stats.settled - earlier.settled) / seconds, 1),
                "paused": place.paused,
                "pause_left_s": place.pause_left_s,
                "pause_reason": place.pause_reason,
                "consumers": holders.get(place, {}),
            }
        )
    last = next(iter(found.values()))
    return {
        "time": datetime.now(timezone.utc),
        "groups": groups,
        **{name: getattr(last, name) for name in _OF_THE_FILE},
    }


# Lines that may say who is paused.
_PAUSES = 3
# Lines that may say who has what in hand.
_HOLDING = 3
_COUNTS = ("ready", "delayed", "leased", "dead", "settled", "oldest_age_s", "retries")
_OF_THE_FILE = ("replica_lag", "file_bytes", "reclaimable_bytes", "damaged")


def _picture(file: str, look: dict[str, Any], width: int, height: int) -> Group:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    numbers = ("ready", "delayed", "leased", "dead", "in/s", "done/s", "retries", "oldest")
    widths = [max(6, len(name)) for name in numbers]
    widths[-1] = len("119.9 s")
    # One to spare: older versions of rich count the gap before the last column twice.
    names = max(10, width - sum(widths) - len(widths) - 1)
    table.add_column("topic/group", overflow="ellipsis", no_wrap=True, max_width=names)
    for name, wide in zip(numbers, widths, strict=True):
        table.add_column(name, justify="right", no_wrap=True, min_width=wide)
    groups = look["groups"]
    pauses = [
        f"{one['topic']}/{one['group']} is "
        + common.paused(one["pause_left_s"], one["pause_reason"])
        for one in groups
        if one["paused"]
    ][:_PAUSES]
    # The busiest first, where there is no room for all.
    holding = [
        f"{one['topic']}/{one['group']} in hand: {common.holders(one['consumers'])}"
        for one in groups
        if one["consumers"]
    ][:_HOLDING]
    room = max(3, height - 6 - len(pauses) - len(holding))
    shown = groups
    if len(groups) > room:
        shown = sorted(groups, key=lambda one: one["ready"] + one["leased"], reverse=True)[:room]
    for one, name in zip(shown, _names(shown, names), strict=True):
        table.add_row(
            Text(name, style="yellow" if one["paused"] else ""),
            *(common.short(one[field]) for field in ("ready", "delayed", "leased")),
            Text(common.short(one["dead"]), style="red" if one["dead"] else ""),
            *(common.short(one[field]) for field in ("puts_per_s", "settled_per_s", "retries")),
            common.age(one["oldest_age_s"]),
        )
    lag = look["replica_lag"]
    replica = "none" if lag is None else "level" if lag == 0 else f"{common.size(lag)} behind"
    parts: list[Any] = [
        Text(f"{_end_of(file, width - 26)}  {look['time']:%Y-%m-%d %H:%M:%S} UTC", style="bold"),
        Text(
            f"file {common.size(look['file_bytes'])}, "
            f"reclaimable {common.size(look['reclaimable_bytes'])}, "
            f"damaged {look['damaged']}, replica {replica}"
        ),
        Text(""),
        table,
    ]
    if len(shown) < len(groups):
        parts.append(Text(f"and {len(groups) - len(shown)} more; choose with --topic, --group"))
    for line in pauses:
        text = Text(common.plain(line), style="yellow")
        text.truncate(width, overflow="ellipsis")
        parts.append(text)
    for line in holding:
        text = Text(common.plain(line))
        text.truncate(width, overflow="ellipsis")
        parts.append(text)
    return Group(*parts)


def _names(places: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """topic/group of each in so many columns; of long ones the beginning and the end of each, or
    what tells them apart.
    """
    names = [(common.plain(one["topic"]), common.plain(one["group"])) for one in places]
    found = {name: _name([name], width)[0] for name in names}
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, cut in found.items():
        alike.setdefault(cut, []).append(name)
    for those in alike.values():
        if len(those) > 1:
            found.update(zip(those, _name(those, width), strict=True))
    return [found[name] for name in names]


def _name(names: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The same of names that stay apart from each other, with as much for each topic."""
    topics, groups = zip(*names, strict=True)
    half = (width - 1) // 2
    of_group = min(max(map(cell_len, groups)), max(half, width - 1 - max(map(cell_len, topics))))
    return [
        f"{topic}/{group}"
        for topic, group in zip(
            common.apart(topics, width - 1 - of_group), common.apart(groups, of_group), strict=True
        )
    ]


def _end_of(file: str, width: int) -> str:
    """The name on one line: of a long one the end, which tells files apart."""
    text = common.plain(file)
    while cell_len(text) > width:
        text = f"…{text[2:]}"
    return text


# tail


@click.command()
@common.file_argument
@click.option(
    "-n",
    "--last",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Begin with the last so many.",
)
@click.option(
    "--offset",
    type=common.OFFSET,
    help="Begin at this offset instead; 'earliest': all that are kept.",
)
@click.option("--no-follow", is_flag=True, help="End when there are no more, wait for none.")
@click.option("--topic", help="Only this topic; default: all.")
@common.json_option
@common.readonly_option
def tail(
    file: str,
    last: int,
    offset: int | str | None,
    no_follow: bool,
    topic: str | None,
    as_json: bool,
    readonly: bool,
) -> None:
    """Show messages of FILE as they are put. Takes nothing. Ctrl-C ends it.

    With --json, one object a line.
    """
    width = common.console().width
    with (
        common.looking(file, readonly=readonly) as store,
        contextlib.suppress(KeyboardInterrupt),
    ):
        wrong = common.missing(store, topic, None)
        if wrong is not None and no_follow:
            common.fail(wrong)
        if wrong is not None:  # it may begin at any moment
            common.say(f"weclawctl: {wrong}; waiting for it")
        end = _survey.end(store)
        if offset is None:
            at = _survey.before(store, last, end, topic)
        else:
            at = 0 if isinstance(offset, str) else offset
        while True:
            for name, content in _survey.arrived(store, at, end):
                if topic is None or name == topic:
                    _show(name, content, width, as_json=as_json, several=topic is None)
            sys.stdout.flush()
            if no_follow:
                return
            at = end
            while (end := _survey.end(store)) <= at:
                _wait(_LOOK_S)


def _show(topic: str, content: Content, width: int, *, as_json: bool, several: bool) -> None:
    put_at = content.enqueued_at
    found = {
        "id": content.id,
        "topic": topic,
        "offset": content.offset,
        "key": content.key,
        "priority": content.priority,
        "headers": content.headers,
        "enqueued_at": put_at,
    }
    found = common.with_body(found, content)
    if as_json:
        common.print_json(found, indent=None)
        return
    where = f" {topic}" if several and topic != "default" else ""
    text = f"{put_at:%H:%M:%S} {content.id}{where} "
    line = Text(common.plain(text) + common.excerpt(found.get("body_error", found["body"]), width))
    line.truncate(width, overflow="ellipsis")
    click.echo(line.plain)


COMMANDS = [top, tail]

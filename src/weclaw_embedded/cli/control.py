"""pause, resume, cancel, purge: what flows."""

from __future__ import annotations

import click

from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]


@click.command()
@common.file_argument
@click.argument("seconds", type=click.FloatRange(min=0, min_open=True))
@click.option("--reason", help="Why; kept with the pause.")
@common.topic_option
@common.group_option
def pause(file: str, seconds: float, reason: str | None, topic: str, group: str) -> None:
    """Deliver nothing from FILE for SECONDS. Every process sees it."""
    with common.opened(file) as store:
        common.queue_of(store, topic, group).pause(seconds, reason)
    click.echo(f"paused for {common.age(seconds)}; 'weclawctl resume' ends it sooner")


@click.command()
@common.file_argument
@common.topic_option
@common.group_option
def resume(file: str, topic: str, group: str) -> None:
    """End a pause of FILE."""
    with common.opened(file) as store:
        common.queue_of(store, topic, group).resume()
    click.echo("resumed")


@click.command()
@common.file_argument
@click.argument("id")
@common.topic_option
@common.json_option
def cancel(file: str, id: str, topic: str, as_json: bool) -> int:
    """Take message ID out of FILE, for every group, if none has begun or settled it."""
    with common.opened(file) as store:
        queue = store.queue(topic)
        done = queue.cancel(id)
        status = "unknown" if done else queue.status(id)
    if as_json:
        common.print_json({"id": id, "cancelled": done})
    elif done:
        click.echo(f"{common.plain(id)} cancelled")
    else:
        click.echo(f"{common.plain(id)} was not cancelled: it is {status} in group 'default'")
    return 0 if done else 1


@click.command()
@common.file_argument
@common.yes_option
@common.topic_option
@common.group_option
@common.json_option
def purge(file: str, yes: bool, topic: str, group: str, as_json: bool) -> None:
    """Take everything ready and delayed in FILE away from this group, for good."""
    with common.opened(file) as store:
        queue = common.queue_of(store, topic, group)
        number = queue.qsize()
        where = f"topic {topic!r}, group {group!r}"
        if number:
            common.ask(f"Take {common.count(number, 'message')} of {where} away for good?", yes=yes)
        purged = queue.purge()
    if as_json:
        common.print_json({"purged": purged})
    else:
        click.echo(f"{common.count(purged, 'message')} purged")


COMMANDS = [pause, resume, cancel, purge]

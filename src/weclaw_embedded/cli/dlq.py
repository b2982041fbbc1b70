"""dlq: see why messages died, put them back, take them out, keep them elsewhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

import click

from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]


@click.group()
def dlq() -> None:
    """Dead letters: messages that failed too often."""


@dlq.command("list")
@common.file_argument
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True)
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def list_(file: str, limit: int, topic: str, group: str, as_json: bool, readonly: bool) -> None:
    """List the dead letters of FILE, oldest first."""
    with common.looking(file, readonly=readonly) as store:
        dead = common.queue_of(store, topic, group).dlq
        total = len(dead)
        letters = list(itertools.islice(dead, limit))
    if as_json:
        common.print_json([letter.to_dict() for letter in letters])
        return
    if not letters:
        click.echo("no dead letters")
        return
    common.print_table(
        ["id", "died (UTC)", ("retries", "right"), "reason"],
        [
            (
                letter.id,
                common.when(letter.died_at)[:16],
                letter.retry_count,
                common.excerpt(letter.reason or "-", 120),
            )
            for letter in letters
        ],
    )
    click.echo("'weclawctl dlq show FILE ID' has the body and every failure")
    if total > len(letters):
        click.echo(f"{len(letters)} of {common.count(total, 'letter')}; see more with --limit")


@dlq.command()
@common.file_argument
@click.argument("id")
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def show(file: str, id: str, topic: str, group: str, as_json: bool, readonly: bool) -> None:
    """Show one dead letter of FILE whole, with its failures."""
    with common.looking(file, readonly=readonly) as store:
        try:
            letter = common.queue_of(store, topic, group).dlq.get(id)
        except KeyError:
            letter = None
        if letter is None:
            common.fail(
                f"there is no dead letter {common.plain(id)} in topic {topic!r}, group {group!r}; "
                f"'weclawctl dlq list' shows those there are"
            )
        found = letter.to_dict()
    if as_json:
        common.print_json(found)
        return
    body = found.pop("body")
    failures = found.pop("failures")
    for name, value in found.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(f"{name:<15} {common.plain(text)}")
    if "body_error" not in found:
        click.echo("body")
        text = json.dumps(common.jsonable(body), ensure_ascii=False, indent=2)
        click.echo("\n".join(f"  {common.plain(line)}" for line in text.splitlines()))
    if failures:
        common.print_table(
            ["failed (UTC)", "reason", "consumer"],
            [(common.when(f.time), f.reason, f.consumer or "-") for f in letter.failures],
            title="failures",
        )


@dlq.command()
@common.file_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("--dry-run", is_flag=True, help="Only say how many it would be.")
@common.topic_option
@common.group_option
@common.json_option
def redrive(
    file: str,
    ids: tuple[str, ...],
    limit: int | None,
    dry_run: bool,
    topic: str,
    group: str,
    as_json: bool,
) -> None:
    """Put dead letters of FILE back into the queue: those named, else all."""
    with common.opened(file) as store:
        dead = common.queue_of(store, topic, group).dlq
        if dry_run:
            there = len(dead) if not ids else sum(_is_there(dead, id) for id in set(ids))
            number = there if limit is None else min(there, limit)
        else:
            number = dead.redrive(list(ids) or None, limit=limit)
    _report("redriven", number, ids, limit, dry_run=dry_run, as_json=as_json)


@dlq.command()
@common.file_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@common.yes_option
@common.topic_option
@common.group_option
@common.json_option
def purge(
    file: str, ids: tuple[str, ...], yes: bool, topic: str, group: str, as_json: bool
) -> None:
    """Take dead letters of FILE away for good: those named, else all."""
    with common.opened(file) as store:
        dead = common.queue_of(store, topic, group).dlq
        number = len(set(ids)) or len(dead)
        if number:
            common.ask(f"Take {common.count(number, 'dead letter')} away for good?", yes=yes)
        number = dead.purge(list(ids) or None)
    _report("purged", number, ids, None, as_json=as_json)


@dlq.command()
@common.file_argument
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--format", "form", type=click.Choice(["jsonl", "csv"]), default="jsonl")
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def export(
    file: str, out: str, form: str, topic: str, group: str, as_json: bool, readonly: bool
) -> None:
    """Write all dead letters of FILE to OUT."""
    with common.looking(file, readonly=readonly) as store:
        number = common.queue_of(store, topic, group).dlq.export(out, format=form)
    if as_json:
        common.print_json({"exported": number, "path": out})
    else:
        click.echo(f"{common.count(number, 'dead letter')} written to {common.plain(out)}")


def _is_there(dead: Any, id: str) -> bool:
    try:
        return dead.get(id) is not None
    except KeyError:
        return False


def _report(
    done: str,
    number: int,
    ids: tuple[str, ...],
    limit: int | None,
    *,
    dry_run: bool = False,
    as_json: bool,
) -> None:
    if as_json:
        common.print_json({done: number, "dry_run": True} if dry_run else {done: number})
    elif dry_run:
        click.echo(f"{common.count(number, 'dead letter')} would be {done}")
    else:
        click.echo(f"{common.count(number, 'dead letter')} {done}")
    wanted = len(set(ids)) if limit is None else min(len(set(ids)), limit)
    if number < wanted:
        common.fail(f"{wanted - number} of those named are no dead letters here; see 'dlq list'")


COMMANDS = [dlq]

"""dlq: see why messages died, put them back, take them out, keep them elsewhere."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import click

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common as common
from weclaw_embedded.cli.watch import watch
from weclaw_embedded.dlq import write_letters

__all__ = ["COMMANDS"]

Command = TypeVar("Command", bound=Callable[..., Any])


def _filters(command: Command) -> Command:
    """The options that choose letters; they come as `reason`, `older_than`, `newer_than`."""
    for option in (
        click.option("--newer-than", type=common.DURATION, help="Died at most so long ago."),
        click.option("--older-than", type=common.DURATION, help="Died at least so long ago: 2h."),
        click.option("--reason", help="Only those with this text in their reason, in any case."),
    ):
        command = option(command)
    return command


class _Choice:
    """Which letters are meant: those named, and of these those that pass the filters."""

    def __init__(
        self,
        ids: tuple[str, ...],
        reason: str | None,
        older_than: float | None,
        newer_than: float | None,
    ) -> None:
        self.ids = list(dict.fromkeys(ids))
        now = datetime.now(timezone.utc)
        self._reason = None if reason is None else reason.casefold()
        self._before = None if older_than is None else now - timedelta(seconds=older_than)
        self._after = None if newer_than is None else now - timedelta(seconds=newer_than)
        self.filters = reason is not None or older_than is not None or newer_than is not None

    @property
    def everything(self) -> bool:
        return not self.ids and not self.filters

    def of(self, dead: weclaw.DeadLetterQueue) -> Iterator[weclaw.DeadLetter]:
        return filter(self._passes, self._named(dead) if self.ids else dead)

    def chosen(self, dead: weclaw.DeadLetterQueue, limit: int | None = None) -> list[str]:
        return [letter.id for letter in itertools.islice(self.of(dead), limit)]

    def _named(self, dead: weclaw.DeadLetterQueue) -> Iterator[weclaw.DeadLetter]:
        for id in self.ids:
            try:
                yield dead.get(id)
            except KeyError:
                pass  # counted by the caller, who knows how many were named

    def _passes(self, letter: weclaw.DeadLetter) -> bool:
        return (
            (self._reason is None or self._reason in (letter.reason or "").casefold())
            and (self._before is None or letter.died_at <= self._before)
            and (self._after is None or letter.died_at >= self._after)
        )


@click.group()
def dlq() -> None:
    """Dead letters: messages that failed too often."""


@dlq.command("list")
@common.file_argument
@click.option("-n", "--limit", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--by-reason", is_flag=True, help="Only how many there are of each reason.")
@_filters
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def list_(
    file: str,
    limit: int,
    by_reason: bool,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
    readonly: bool,
) -> None:
    """List the dead letters of FILE, in the order of their puts."""
    choice = _Choice((), reason, older_than, newer_than)
    with common.looking(file, readonly=readonly) as store:
        dead = common.queue_of(store, topic, group).dlq
        reasons = collections.Counter(one.reason for one in choice.of(dead)) if by_reason else {}
        letters = list(itertools.islice(choice.of(dead), 0 if by_reason else limit + 1))
        total = len(dead)
        elsewhere = [
            (one, number)
            for one in common.places(store, None, None)
            if (one.topic, one.group) != (topic, group)
            and (number := len(common.queue_of(store, one.topic, one.group).dlq))
        ]
    more = len(letters) > limit
    del letters[limit:]
    if as_json:
        found = sorted(reasons.items(), key=lambda pair: -pair[1])
        common.print_json(
            [{"reason": text, "letters": number} for text, number in found]
            if by_reason
            else [letter.to_dict() for letter in letters]
        )
        return
    if reasons:
        common.print_table(
            [("letters", "right"), "reason"],
            [
                (number, common.excerpt(text, 200))
                for text, number in sorted(reasons.items(), key=lambda pair: -pair[1])[:limit]
            ],
        )
    elif letters:
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
    else:
        click.echo("no dead letters that pass" if total and choice.filters else "no dead letters")
    if more:
        click.echo(f"the first {limit} of {common.count(total, 'letter')}; more with --limit")
    for one, number in elsewhere:
        click.echo(
            common.plain(f"{common.count(number, 'letter')} in topic {one.topic!r}, group ")
            + common.plain(f"{one.group!r}: --topic, --group")
        )


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
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("--all", "everything", is_flag=True, help="All of them; the default.")
@click.option("--dry-run", is_flag=True, help="Only show which they would be.")
@_filters
@common.topic_option
@common.group_option
@common.json_option
def redrive(
    file: str,
    ids: tuple[str, ...],
    limit: int | None,
    everything: bool,
    dry_run: bool,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
) -> None:
    """Put dead letters of FILE back into the queue: those named or chosen, else all."""
    choice = _Choice(ids, reason, older_than, newer_than)
    if everything and not choice.everything:
        raise click.UsageError("--all goes with neither ids nor filters")
    # A dry run changes nothing, so it may look where nobody may write.
    opening = common.looking(file, readonly=False) if dry_run else common.opened(file)
    with opening as store:
        dead = common.queue_of(store, topic, group).dlq
        if dry_run:
            chosen = choice.chosen(dead, limit)
            number = len(chosen)
        elif choice.everything:
            number = dead.redrive(limit=limit)
        else:
            chosen = choice.chosen(dead, limit)
            number = dead.redrive(chosen) if chosen else 0
    if dry_run and not as_json:
        for id in chosen:
            click.echo(common.plain(id))
    _report("redriven", number, choice, limit, dry_run=dry_run, as_json=as_json)


@dlq.command()
@common.file_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@common.yes_option
@_filters
@common.topic_option
@common.group_option
@common.json_option
def purge(
    file: str,
    ids: tuple[str, ...],
    yes: bool,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
) -> None:
    """Take dead letters of FILE away for good: those named or chosen, else all."""
    choice = _Choice(ids, reason, older_than, newer_than)
    with common.opened(file) as store:
        dead = common.queue_of(store, topic, group).dlq
        chosen = None if choice.everything else choice.chosen(dead)
        number = len(dead) if chosen is None else len(chosen)
        if number:
            where = f"of topic {topic!r}, group {group!r}"
            question = f"Take {common.count(number, 'dead letter')} {where} away for good?"
            common.ask(common.plain(question), yes=yes)
            number = dead.purge(chosen)
    _report("purged", number, choice, None, as_json=as_json)


@dlq.command()
@common.file_argument
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    help="Default: csv if the name of OUT ends so, else jsonl.",
)
@_filters
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def export(
    file: str,
    out: str,
    form: str | None,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
    readonly: bool,
) -> None:
    """Write dead letters of FILE to OUT, whole and with their history: those chosen, else all."""
    choice = _Choice((), reason, older_than, newer_than)
    if form is None:
        form = "csv" if out.lower().endswith(".csv") else "jsonl"
    with common.looking(file, readonly=readonly) as store:
        dead = common.queue_of(store, topic, group).dlq
        with common.progress_bar("export", len(dead)) as update:
            number = write_letters(_counted(choice.of(dead), update), out, form)
    if as_json:
        common.print_json({"exported": number, "path": out})
    else:
        click.echo(f"{common.count(number, 'dead letter')} written to {common.plain(out)}")


def _counted(letters: Iterator[weclaw.DeadLetter], update: Any) -> Iterator[weclaw.DeadLetter]:
    for number, letter in enumerate(letters, 1):
        yield letter
        if number % 100 == 0:
            update(completed=number)


def _report(
    done: str,
    number: int,
    choice: _Choice,
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
    wanted = len(choice.ids)
    if limit is not None:
        wanted = min(wanted, limit)
    if number < wanted and not choice.filters:
        common.fail(f"{wanted - number} of those named are no dead letters here; see 'dlq list'")


dlq.add_command(watch)

COMMANDS = [dlq]

"""dlq: see why messages died, put them back, take them out, keep them elsewhere."""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import click

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common as common
from weclaw_embedded.cli.watch import watch
from weclaw_embedded.dlq import stream_letters, write_letters

__all__ = ["COMMANDS"]

Command = TypeVar("Command", bound=Callable[..., Any])

# Letters shown before it is asked whether they are meant: a screenful.
_SHOWN = 15
# In a reason: a number, an address, an id in hex.
_NUMBER = re.compile(r"\b(?:0x)?[0-9a-f]*\d[0-9a-f]*\b|\d+", re.IGNORECASE)


def _filters(command: Command) -> Command:
    """The options that choose letters; they come as `reason`, `older_than`, `newer_than`."""
    for option in (
        click.option("--newer-than", type=common.DURATION, help="Died at most so long ago."),
        click.option("--older-than", type=common.DURATION, help="Died at least so long ago: 2h."),
        click.option("--reason", help="Only those with this text in their reason, in any case."),
    ):
        command = option(command)
    return command


def _shape(reason: str) -> str:
    """A reason with `#` for each number and each id in it: what many letters have in common."""
    return _NUMBER.sub("#", reason)


def _by_reason(letters: Iterable[weclaw.DeadLetter]) -> list[tuple[str, int]]:
    """(reason, letters), the most frequent first; those that differ only in numbers are one."""
    numbers: collections.Counter[str] = collections.Counter()
    texts: dict[str, str] = {}  # as it is, where all are the same
    for letter in letters:
        shape = _shape(letter.reason)
        numbers[shape] += 1
        if texts.setdefault(shape, letter.reason) != letter.reason:
            texts[shape] = shape
    return [(texts[shape], number) for shape, number in numbers.most_common()]


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
        self.unknown: dict[str, None] = {}  # those of them that are no letters, in their order
        self.unreadable: dict[str, None] = {}  # those of them that can't be read
        self.damage: list[weclaw.CorruptError] = []  # letters that can't be read, of all there are
        now = datetime.now(timezone.utc)
        self.reason = reason
        self.has_reason = reason is None  # whether any letter that was looked at has it
        self._reason = None if reason is None else reason.casefold()
        self._before = None if older_than is None else now - timedelta(seconds=older_than)
        self._after = None if newer_than is None else now - timedelta(seconds=newer_than)
        self.filters = reason is not None or older_than is not None or newer_than is not None

    @property
    def everything(self) -> bool:
        return not self.ids and not self.filters

    def of(self, dead: weclaw.DeadLetterQueue) -> Iterator[weclaw.DeadLetter]:
        return filter(self.passes, self._named(dead) if self.ids else dead._letters(self.damage))

    def chosen(self, dead: weclaw.DeadLetterQueue, limit: int | None = None) -> list[str]:
        return [letter.id for letter in itertools.islice(self.of(dead), limit)]

    def _named(self, dead: weclaw.DeadLetterQueue) -> Iterator[weclaw.DeadLetter]:
        for id in self.ids:
            try:
                yield dead.get(id)
            except KeyError:
                if id not in self.unreadable:  # it was set aside when that was found
                    self.unknown[id] = None
            except weclaw.CorruptError:
                self.unreadable[id] = None

    def passes(self, letter: weclaw.DeadLetter) -> bool:
        has_reason = (
            self._reason is None
            or self._reason in letter.reason.casefold()
            or self._reason in _shape(letter.reason).casefold()
        )
        self.has_reason |= has_reason
        return (
            has_reason
            and (self._before is None or letter.died_at <= self._before)
            and (self._after is None or letter.died_at >= self._after)
        )


@click.group()
def dlq() -> None:
    """Dead letters: messages that failed too often."""


@dlq.command("list")
@common.file_argument
@click.option("-n", "--limit", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option(
    "--by-reason",
    is_flag=True,
    help="Only how many there are of each reason, whatever numbers it has.",
)
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
        common.look_there(store, topic, group)
        queue = common.queue_of(store, topic, group)
        dead, damaged = queue.dlq, queue.stats().damaged
        total = len(dead)  # before those that can't be read are set aside
        reasons = _by_reason(choice.of(dead)) if by_reason else []
        letters = list(itertools.islice(choice.of(dead), 0 if by_reason else limit + 1))
        elsewhere = _elsewhere(store, topic, group)
    more = len(letters) > limit
    del letters[limit:]
    if as_json:
        common.print_json(
            [{"reason": text, "letters": number} for text, number in reasons]
            if by_reason
            else [letter.to_dict() for letter in letters]
        )
        return
    if reasons:
        common.print_table(
            [("letters", "right"), "reason"],
            [(number, common.excerpt(text, 200)) for text, number in reasons[:limit]],
        )
    elif letters:
        _print_letters(letters)
    elif total and choice.filters:
        click.echo("no dead letters that pass")
    else:
        # Where something is damaged, nobody knows that there is none.
        click.echo(f"no dead letters{' that can be read' if total or damaged else ''}")
    if more:
        of = "" if choice.filters else f" of {common.count(total, 'letter')}"
        click.echo(f"the first {limit}{of}; more with --limit")
    for one, number in elsewhere:
        click.echo(
            common.plain(f"{common.count(number, 'letter')} in topic {one.topic!r}, group ")
            + common.plain(f"{one.group!r}: --topic, --group")
        )


def _elsewhere(store: weclaw.Store, topic: str, group: str) -> list[tuple[common.Place, int]]:
    """(place, letters) of each group with dead letters but the one that was asked for."""
    return [
        (one, number)
        for one in common.places(store, None, None)
        if (one.topic, one.group) != (topic, group)
        and (number := len(common.queue_of(store, one.topic, one.group).dlq))
    ]


def _print_letters(letters: Sequence[weclaw.DeadLetter]) -> None:
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
        common.look_there(store, topic, group)
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
            folded="reason",
        )


@dlq.command(short_help="Put dead letters back into the queue.")
@common.file_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--dry-run", is_flag=True, help="Only show which they would be.")
@common.yes_option
@_filters
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def redrive(
    file: str,
    ids: tuple[str, ...],
    limit: int | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
    readonly: bool,
) -> None:
    """Put dead letters of FILE back into the queue: those named or chosen, else all.

    On a terminal, unless they are named by their ids, it shows them and asks first; a program is
    not asked.
    """
    choice = _Choice(ids, reason, older_than, newer_than)
    if everything and not choice.everything:
        raise click.UsageError("--all goes with neither ids nor filters")
    if readonly and not dry_run:
        raise click.UsageError("--readonly only looks: it goes with --dry-run")
    # A dry run changes nothing, so it may look where nobody may write.
    opening = common.looking(file, readonly=readonly) if dry_run else common.opened(file)
    with opening as store:
        common.must_be_there(store, topic, group)
        dead = common.queue_of(store, topic, group).dlq
        if dry_run:
            _would_be_redriven(choice, choice.chosen(dead, limit), limit, as_json=as_json)
            return
        chosen = None if choice.everything else choice.chosen(dead, limit)
        if not ids and not yes and common.asks():
            # What was shown is what is redriven, whatever dies meanwhile.
            chosen = _ask_about(choice.of(dead), limit)
        with common.progress_bar("redrive", None, pulse=True):
            if chosen is None:
                number = dead._redrive(None, limit, choice.damage)
            else:
                number = dead._redrive(chosen, None, choice.damage) if chosen else 0
    _report("redriven", number, choice, limit, as_json=as_json)


def _would_be_redriven(
    choice: _Choice, chosen: list[str], limit: int | None, *, as_json: bool
) -> None:
    if as_json:
        common.print_json({"redriven": 0, "dry_run": True, "letters": len(chosen), "ids": chosen})
    else:
        for id in chosen:
            click.echo(common.plain(id))
        click.echo(f"{common.count(len(chosen), 'dead letter')} would be redriven")
    _must_be_all(len(chosen), choice, limit)


def _ask_about(letters: Iterator[weclaw.DeadLetter], limit: int | None) -> list[str]:
    """Show letters and ask whether they are meant; their ids."""
    chosen: list[str] = []
    for letter in itertools.islice(letters, limit):
        if len(chosen) < _SHOWN:
            reason = common.excerpt(letter.reason or "-", max(20, 76 - len(letter.id)))
            common.say(f"{common.plain(letter.id)}  {reason}")
        chosen.append(letter.id)
    if len(chosen) > _SHOWN:
        common.say(f"and {len(chosen) - _SHOWN} more; --dry-run shows all")
    if chosen:
        common.ask(f"Redrive {common.count(len(chosen), 'dead letter')}?", yes=False)
    return chosen


@dlq.command(short_help="Take dead letters away, for good.")
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
        common.must_be_there(store, topic, group)
        dead = common.queue_of(store, topic, group).dlq
        chosen = None if choice.everything else choice.chosen(dead)
        number = len(dead) if chosen is None else len(chosen)
        if number:
            where = f"of topic {topic!r}, group {group!r}"
            question = f"Take {common.count(number, 'dead letter')} {where} away for good?"
            common.ask(common.plain(question), yes=yes)
            with common.progress_bar("purge", None, pulse=True):
                number = dead.purge(chosen)
    _report("purged", number, choice, None, as_json=as_json)


@dlq.command(short_help="Write dead letters to a file, whole.")
@common.file_argument
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    help="Default: csv if the name of OUT ends so, else jsonl.",
)
@click.option("--yes", is_flag=True, help="Replace OUT if it exists, without asking.")
@_filters
@common.topic_option
@common.group_option
@common.json_option
@common.readonly_option
def export(
    file: str,
    out: str,
    form: str | None,
    yes: bool,
    reason: str | None,
    older_than: float | None,
    newer_than: float | None,
    topic: str,
    group: str,
    as_json: bool,
    readonly: bool,
) -> None:
    """Write dead letters of FILE to OUT, whole and with their history: those chosen, else all.

    OUT appears whole or not at all. If it has something in it, it is replaced only with --yes, or
    a yes from the terminal. "-" is standard output.
    """
    choice = _Choice((), reason, older_than, newer_than)
    if form is None:
        form = "csv" if out.lower().endswith(".csv") else "jsonl"
    if out == "-" and as_json:
        raise click.UsageError("with '-' standard output has the letters: leave --json out")
    _may_write_to(out, file, yes=yes)
    with common.looking(file, readonly=readonly) as store:
        common.look_there(store, topic, group)
        dead = common.queue_of(store, topic, group).dlq
        with common.progress_bar("export", len(dead)) as update:
            letters = filter(choice.passes, _counted(dead, update))
            if out == "-":
                number = stream_letters(letters, sys.stdout, form)
                return
            number = write_letters(letters, out, form, file)
    if as_json:
        common.print_json({"exported": number, "path": out})
    else:
        click.echo(f"{common.count(number, 'dead letter')} written to {common.plain(out)}")


def _may_write_to(out: str, file: str, *, yes: bool) -> None:
    """Replace nothing unasked, and never the queue itself or what is not a file of bytes."""
    if out == "-" or not os.path.exists(out) or not os.path.exists(file):
        return
    if os.path.samefile(out, file):
        common.fail(f"{common.plain(out)} is the queue itself; nothing was written")
    found = os.stat(out)
    if not stat.S_ISREG(found.st_mode):
        common.fail(f"{common.plain(out)} is no regular file; nothing was written; '-' is a pipe")
    if found.st_size:
        common.ask(
            f"{common.plain(out)} exists, with {common.size(found.st_size)} in it. Replace it?",
            yes=yes,
        )


def _counted(letters: Iterable[weclaw.DeadLetter], update: Any) -> Iterator[weclaw.DeadLetter]:
    number = 0
    for number, letter in enumerate(letters, 1):
        yield letter
        if number % 100 == 0:
            update(completed=number)
    update(completed=number)


def _report(done: str, number: int, choice: _Choice, limit: int | None, *, as_json: bool) -> None:
    if as_json:
        common.print_json({done: number})
    else:
        click.echo(f"{common.count(number, 'dead letter')} {done}")
    _must_be_all(number, choice, limit)


def _must_be_all(number: int, choice: _Choice, limit: int | None) -> None:
    """Of those that were named, all must be letters, and all that can be read, and some must have
    the reason that was named; else the exit status says so. That none is of the time asked for is
    no fault: nobody misspelt it.
    """
    faults = []
    if choice.unknown:
        letters = f"dead letter{'s' if len(choice.unknown) > 1 else ''}"
        named = _first(choice.unknown)
        faults.append(f"no {letters} of this topic and group: {named}; see 'dlq list'")
    elif not choice.has_reason:
        which = "of these dead letters" if choice.ids else "dead letter of this topic and group"
        faults.append(
            f"no{'ne' if choice.ids else ''} {which} has {choice.reason!r} in its reason; "
            "'dlq list --by-reason' has those there are"
        )
    at = dict.fromkeys(f"that at offset {one.offset}" for one in choice.damage)
    damaged = [*choice.unreadable, *at]
    if damaged and (limit is None or number < limit):
        faults.append(
            f"{common.count(len(damaged), 'dead letter')} can't be read and stayed out of it: "
            f"{_first(damaged)}; 'weclawctl verify' lists all damage"
        )
    if faults:
        common.fail("; ".join(faults))
    wanted = len(choice.ids) if limit is None else min(len(choice.ids), limit)
    if number < wanted and not choice.filters:  # redriven or purged by others meanwhile
        common.fail(f"{wanted - number} of those named are no dead letters any more")


def _first(names: Collection[str]) -> str:
    """The names, as many as can be shown."""
    first = ", ".join(common.plain(name) for name in itertools.islice(names, _SHOWN))
    more = len(names) - _SHOWN
    return f"{first}{f' and {more} more' if more > 0 else ''}"


dlq.add_command(watch)

COMMANDS = [dlq]

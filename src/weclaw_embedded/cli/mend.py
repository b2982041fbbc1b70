"""verify, repair, backup: is what lies on disk what was written, and what to do when it is not."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator

import click

import weclaw_embedded as weclaw
from weclaw_embedded import _survey
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

# Faults in what there are two copies of, and that is no record.
_IN_HEADER = re.compile(r"slot header is damaged|header block (is|was) damaged")
# A copy that is being fed may be this late.
_PATIENCE_S = 5.0


@click.command()
@common.file_argument
@click.option(
    "--against",
    metavar="COPY",
    type=click.Path(dir_okay=False),
    help="Hold each frame against the one at the same offset of a replica's file.",
)
@common.json_option
@common.readonly_option
def verify(file: str, against: str | None, as_json: bool, readonly: bool) -> int:
    """Read all of FILE and check it. Writes nothing, with --readonly or without; ends with 1 if
    something is damaged.

    With --against also if COPY has other frames, or lacks some that FILE had at the start.
    """
    del readonly  # opened otherwise a torn end would be cut, and a copy of a header mended
    with (
        contextlib.ExitStack() if against else _said_once(),
        common.looking(file, readonly=True) as store,
        common.progress_bar("verify", None, percent=True) as update,
    ):
        if against is None:
            faults = _survey.verify(store, update)
            compared, promoted = None, 0
            becomes = "" if as_json or not faults else _what_of(faults, store)
        else:
            compared, promoted = _compare(store, against)
            faults = compared.differences
    if as_json:
        found = [{"offset": offset, "reason": reason} for offset, reason in faults]
        if compared is None:
            common.print_json(found)
        else:
            behind = compared.behind
            common.print_json({"frames": compared.frames, "behind": behind, "differences": found})
    elif faults:
        common.print_table([("offset", "right"), "reason"], faults)
        if compared is None:
            click.echo(f"{common.count(len(faults), 'fault')}; {becomes}")
        else:
            click.echo(
                f"the copy was promoted (epoch {promoted}) and goes its own way from there on"
                if promoted
                else "not the same: never promote this copy; make a new one, or restore"
            )
    elif compared is None:
        click.echo("good: everything kept can be read")
    elif compared.behind:
        click.echo(
            f"{common.count(compared.frames, 'frame')} are the same; the copy lacks the last "
            f"{common.size(compared.behind)}"
        )
    else:
        click.echo(f"the same: {common.count(compared.frames, 'frame')}")
    return 1 if faults or (compared is not None and compared.behind) else 0


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Leave out the warnings of damage met while the file is opened: they stand in the answer."""

    def is_other(record: logging.LogRecord) -> bool:
        return "damage at offset" not in record.msg

    logger = logging.getLogger("weclaw_embedded")
    handlers = list(logger.handlers)
    for handler in handlers:
        handler.addFilter(is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _what_of(faults: list[tuple[int, str]], store: weclaw.Store) -> str:
    """What becomes of what these faults hit."""
    hits = [offset for offset, reason in faults if not _IN_HEADER.search(reason)]
    if not hits:
        return "no message is hit while the other copy of a header is whole; repair writes both"
    n = _survey.set_aside_in(store, hits)
    if not n:
        return "what they hit is set aside when it is come upon, or by repair; the rest flows"
    is_are = "is" if n == 1 else "are"
    return f"{common.count(n, 'message')} that they hit {is_are} set aside; the rest flows"


def _compare(store: weclaw.Store, against: str) -> tuple[_survey.Comparison, int]:
    """Wait for a copy that is being fed until it has what the file has now. Also its epoch if it
    was promoted over the file, else 0.
    """
    until = _survey.end(store)
    deadline = time.monotonic() + _PATIENCE_S
    # Readonly: a copy belongs to its receiver, who may be at work on it.
    with common.opened(against, readonly=True) as other:
        while True:
            before = _survey.end(other)
            if before >= until or time.monotonic() >= deadline:
                epoch = _survey.epoch(other)
                promoted = epoch if epoch > _survey.epoch(store) else 0
                return _survey.compare(store, other, until), promoted
            time.sleep(0.1)


@click.command(short_help="Set aside what can't be read, so that verify is quiet.")
@common.file_argument
@common.yes_option
@common.json_option
def repair(file: str, yes: bool, as_json: bool) -> None:
    """Set aside what can't be read in FILE, so that 'verify' finds it good again.

    What its replica has is put back. Else the messages that stood there are gone; all others are
    kept. Processes may go on working.
    """
    with common.opened(file) as store:
        with common.progress_bar("verify", None, percent=True) as update:
            faults = _survey.verify(store, update)
        if faults:
            places = common.count(len(faults), "place")
            common.ask(f"Overwrite {places} that can't be read, for good?", yes=yes)
        found: list[_survey.Gone] = []
        if faults:
            with common.progress_bar("repair", None, percent=True) as update:
                found = _survey.repair(store, update)
    if as_json:
        common.print_json([one._asdict() for one in found])
    elif not found:
        click.echo("good: nothing to repair")
    else:
        common.print_table(
            [("offset", "right"), ("bytes", "right"), "written between (UTC)", "reason"],
            [(one.offset, _bytes_of(one), _between(one), one.reason) for one in found],
        )
        healed = sum(one.healed for one in found)
        if healed:
            click.echo(f"{common.count(healed, 'place')} healed from the replica: nothing is gone")
        if healed == len(found):
            return
        gone = sum(one.size_bytes or 0 for one in found)
        unknown = sum(one.size_bytes is None for one in found)
        said = []
        if gone or not unknown:
            said.append(
                f"the messages in {common.count(gone, 'byte')} are gone" if gone else "no message"
            )
        if unknown:
            said.append(
                f"of {common.count(unknown, 'place')} the space was used again since, and what "
                "stood there is not known any more"
            )
        click.echo(
            f"{common.count(len(found) - healed, 'place')} set aside: {', and '.join(said)}; all "
            "others are kept"
        )


def _bytes_of(place: _survey.Gone) -> str:
    return "?" if place.size_bytes is None else str(place.size_bytes)


def _between(place: _survey.Gone) -> str:
    if place.after is None and place.before is None:
        return "-"
    after, before = (common.when(moment) for moment in (place.after, place.before))
    return f"{after} and {before[11:] if before[:10] == after[:10] else before}"


@click.command()
@common.file_argument
@click.argument("out", type=click.Path(dir_okay=False))
@common.json_option
@common.readonly_option
def backup(file: str, out: str, as_json: bool, readonly: bool) -> None:
    """Copy FILE to OUT while it is in use. OUT is a queue of its own, as of this moment."""
    with (
        common.looking(file, readonly=readonly) as store,
        common.progress_bar("backup", None, percent=True) as update,
    ):
        _survey.backup(store, os.path.abspath(out), update)
    bytes_written = os.stat(out).st_size
    if as_json:
        common.print_json({"path": out, "file_bytes": bytes_written})
    else:
        click.echo(f"{common.plain(out)} written, {common.size(bytes_written)}")


COMMANDS = [verify, repair, backup]

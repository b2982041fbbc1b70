"""put: messages from standard input, a file or the command line."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded._values import pack_value
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

_CHUNK_BYTES = 1 << 20
# What files of messages are called.
_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv")
# What the library says of a single put.
_NOTHING = re.compile(r"; nothing was (written|put|changed)\b")
# What looks like a path: with a folder, or an ending, and no address of something on the net.
_PATH = re.compile(r"(?![a-z][a-z0-9+.-]*://)(\S*/\S+|[\w~.-]+\.[a-z]\w{0,5})", re.IGNORECASE)


@click.command()
@common.file_argument
@click.argument("bodies", nargs=-1, metavar="[BODY]...")
@click.option(
    "--input",
    "source",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Read from this file; '-': from standard input.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    help="Of the input; default: csv if its name ends so, else jsonl.",
)
@click.option("--text", is_flag=True, help="Each BODY is text, as it stands; not JSON, no file.")
@click.option("--topic", default="default", show_default=True, help="The topic.")
@click.option("--key-field", help="Take each message's key from this field of its body.")
@click.option("--id-field", help="Take each message's id from this field of its body.")
@click.option("--priority", type=click.IntRange(0, 9), default=0, show_default=True)
@click.option("--delay", type=common.DURATION, default=0.0, help="Due after: 30, 10m, 2h.")
@click.option("--ttl", type=common.POSITIVE, help="A dead letter after: 30, 10m, 2h.")
@common.json_option
def put(
    file: str,
    bodies: tuple[str, ...],
    source: str | None,
    form: str | None,
    text: bool,
    topic: str,
    key_field: str | None,
    id_field: str | None,
    priority: int,
    delay: float,
    ttl: float | None,
    as_json: bool,
) -> None:
    """Put messages into FILE, which is made if it is missing.

    Without a BODY they are read from standard input, one JSON object a line:

        weclawctl put tasks.wq < tasks.jsonl

    A BODY is JSON if it can be read as such, else text; "-" is standard input. What was put is on
    disk; an input that can't be read stops at its line, and says so. With --id-field, putting it
    again puts nothing twice.
    """
    if bodies and source is not None:
        raise click.UsageError("give either bodies or --input, not both")
    if not text and "-" in bodies:
        if len(bodies) > 1:
            raise click.UsageError("'-' is standard input, and stands alone, unless with --text")
        bodies, source = (), "-"
    if not bodies and source is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("nothing to put: give a body, --input, or a pipe")
    if source == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed, so '-' has nothing to put")
        source = None
    if not text:
        _must_be_no_files(bodies)

    terms = {"priority": priority, "delay": delay, "ttl": ttl}
    total = 0
    fault: str | None = None
    queue: weclaw.Queue | None = None
    with contextlib.ExitStack() as stack:
        # What can't be used makes no file; where there is one, it is opened before all else.
        if common.is_there(file):
            queue = stack.enter_context(common.opened(file, create=True)).queue(topic)
        else:
            common.must_have_folder(file)
        with common.progress_bar("put", None) as update, _told_when_interrupted(lambda: total):
            for batch, fault in _batches(bodies, source, form, text=text):
                messages, unnamed = _messages(batch, key_field, id_field, terms)
                fault = unnamed or fault
                ids: list[str] = []
                if messages and queue is None and (refused := _unfit(*batch[0])) is not None:
                    fault = refused
                elif messages:
                    if queue is None:
                        queue = stack.enter_context(common.opened(file, create=True)).queue(topic)
                    ids, refused = _put_all(queue, messages, [where for where, _ in batch])
                    fault = refused or fault
                total += len(ids)
                update(completed=total)
                if as_json:
                    for message_id in ids:
                        common.print_json({"id": message_id}, indent=None)
                if fault is not None:
                    break
            update(total=total)
    if fault is not None:
        common.fail(_what_is_put(fault, total, alone=len(bodies) == 1))
    if not as_json:
        none = "" if queue is not None else ", which was not made: there was nothing to put"
        again = ", or there already by its id" if id_field and total else ""
        click.echo(f"{common.count(total, 'message')} put into {common.plain(file)}{again}{none}")


def _what_is_put(fault: str, total: int, *, alone: bool) -> str:
    """The fault, and what was put before it."""
    if alone:
        return fault
    if not total:
        return f"{fault}; nothing was put before it"
    was_were = "was" if total == 1 else "were"
    return (
        f"{fault}; {common.count(total, 'message')} before it {was_were} put; put the rest when "
        "that is mended"
    )


@contextlib.contextmanager
def _told_when_interrupted(total: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        common.say(
            f"weclawctl: at least {common.count(total(), 'message')} put; with --id-field the same "
            "input can be put again, and nothing is there twice"
        )
        raise


def _messages(
    batch: list[tuple[str, Any]], key_field: str | None, id_field: str | None, terms: dict[str, Any]
) -> tuple[list[weclaw.Put], str | None]:
    """What is to be put for these (where, body); up to the first without its key or id, and why."""
    messages: list[weclaw.Put] = []
    for where, body in batch:
        try:
            key = _field(body, key_field, "key")
            id = _field(body, id_field, "id")
        except ValueError as error:
            return messages, _told(where, error)
        messages.append(weclaw.Put(body, id=id, key=key, **terms))
    return messages, None


def _unfit(where: str, body: Any) -> str | None:
    """Why the first message of a file to be made can't be put, whatever else may be wrong."""
    try:
        pack_value(body)
    except weclaw.SerializationError as error:
        return _told(where, error)
    return None


def _told(where: str, error: Exception) -> str:
    """Of one that was refused. Where it is one of several, how many were put is said of all."""
    return f"{where}: {_NOTHING.sub('', str(error))}" if where else str(error)


def _put_all(
    queue: weclaw.Queue, messages: list[weclaw.Put], places: list[str]
) -> tuple[list[str], str | None]:
    """Put them together; if one is refused, those before it. The ids, and what was wrong where."""
    if not messages:
        return [], None
    try:
        if len(messages) == 1:  # else it is told which of them, beside its line
            return [_put_one(queue, messages[0])], None
        return queue.put_many(messages), None
    except (weclaw.SerializationError, weclaw.MessageTooLargeError, ValueError) as error:
        # Refused as a whole, with nothing written: which of them is it?
        if len(messages) == 1:
            return [], _told(places[0], error)
        ids: list[str] = []
        for where, message in zip(places, messages, strict=False):
            put, fault = _put_all(queue, [message], [where])
            ids += put
            if fault is not None:
                return ids, fault
        return ids, None
    except weclaw.WeclawError as error:
        first, last = places[0], places[len(messages) - 1]
        where = first if first == last else f"{first} to {last}"
        return [], f"{where}: {error}" if where else str(error)


def _put_one(queue: weclaw.Queue, one: weclaw.Put) -> str:
    return queue.put(
        one.body, id=one.id, key=one.key, priority=one.priority, delay=one.delay, ttl=one.ttl
    )


Batch = tuple[list[tuple[str, Any]], "str | None"]


def _batches(
    bodies: tuple[str, ...], source: str | None, form: str | None, *, text: bool
) -> Iterator[Batch]:
    """Yield ([(where, body)], fault): what is there already is put without waiting for more."""
    if bodies:
        read = str if text else _from_argument
        names = [f"body {i}" for i in range(1, len(bodies) + 1)] if len(bodies) > 1 else [""]
        yield [(name, read(body)) for name, body in zip(names, bodies, strict=True)], None
        return
    if form is None:
        form = "csv" if source is not None and source.lower().endswith(".csv") else "jsonl"
    fd = 0 if source is None else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from _csv(fd) if form == "csv" else _jsonl(fd)
    finally:
        if source is not None:
            os.close(fd)


def _must_be_no_files(bodies: tuple[str, ...]) -> None:
    """The name of a file of messages is hardly meant as a message; a misspelt one may be."""
    for body in bodies:
        name = common.excerpt(body)
        is_named_so = body.lower().endswith(_ENDINGS)
        if (is_named_so or _PATH.fullmatch(body)) and common.is_there(body) is False:
            common.say(
                f"weclawctl: there is no file {name!r}, so the name itself is put, as text; --text "
                "says that it is meant"
            )
        if is_named_so and os.path.isfile(body):
            raise click.UsageError(
                f"{name!r} is a file: --input {name} puts what is in it, --text the name itself"
            )


def _from_argument(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if text.lstrip()[:1] in ("{", "["):
            raise common.Failure(
                f"{common.excerpt(text)} looks like JSON but is not: {error}; nothing was put"
            ) from None
        return text


def _jsonl(fd: int) -> Iterator[Batch]:
    line = 0
    rest = b""
    while True:
        chunk = os.read(fd, _CHUNK_BYTES)
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk:
            lines, rest = [rest], b""
        batch: list[tuple[str, Any]] = []
        fault = None
        for raw in lines:
            line += 1
            text = raw.strip().removeprefix(b"\xef\xbb\xbf")
            if not text:
                continue
            try:
                batch.append((f"line {line}", json.loads(text)))
            except (ValueError, RecursionError) as error:
                fault = f"line {line} is not JSON: {error}"
                break
        yield batch, fault
        if not chunk:
            return


def _csv(fd: int) -> Iterator[Batch]:
    """Yield as `_batches` does; a record is named by the line on which it begins."""
    with _decoded(fd) as lines:
        reader = csv.reader(lines, strict=True)
        batch: list[tuple[str, Any]] = []
        heading: list[str] = []
        line = 1
        try:
            for row in reader:
                if row and not heading:
                    heading = _heading(row)
                elif row:  # a line with nothing in it is none
                    if len(row) != len(heading):
                        more = "more" if len(row) > len(heading) else "fewer"
                        raise csv.Error(f"{more} fields than the heading has")
                    batch.append((f"line {line}", dict(zip(heading, row, strict=True))))
                    if len(batch) == 1000:
                        yield batch, None
                        batch = []
                line = reader.line_num + 1
        except csv.Error as error:
            yield batch, f"line {line} is not CSV: {error}"
            return
        except UnicodeDecodeError as error:  # maybe in the middle of a record
            yield batch, f"line {reader.line_num + 1} is not CSV: {error}"
            return
        yield batch, None


@contextlib.contextmanager
def _decoded(fd: int) -> Iterator[Iterator[str]]:
    """The lines of a file, each decoded by itself: a stream would fail many lines ahead."""
    with open(
        fd, encoding="utf-8-sig", errors="surrogateescape", newline="", closefd=False
    ) as stream:
        yield (
            line if line.isascii() else line.encode("utf-8", "surrogateescape").decode("utf-8")
            for line in stream
        )


def _heading(names: list[str]) -> list[str]:
    """The same names, if there is none twice: one column would be lost under the other."""
    for name in names:
        if names.count(name) > 1:
            raise csv.Error(f"the heading has {common.excerpt(name)!r} twice")
    return names


def _field(body: Any, name: str | None, use: str) -> str | None:
    """The text of the field that holds the key or id."""
    if name is None:
        return None
    value = body.get(name) if isinstance(body, dict) else None
    if value is None or isinstance(value, (dict, list)):
        if isinstance(body, dict) and name in body:
            raise ValueError(f"the field {name!r} is no text or number to take the {use} from")
        raise ValueError(f"there is no field {name!r} to take the {use} from")
    return value if isinstance(value, str) else json.dumps(value)


COMMANDS = [put]

"""What the verbs share: opening, options, printing for programs; from `_screen`, for people."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import click
from click.core import ParameterSource

import weclaw_embedded as weclaw
from weclaw_embedded import _options, _survey, replica
from weclaw_embedded._jsonable import dumps, jsonable
from weclaw_embedded._message import Content
from weclaw_embedded.cli._screen import (
    age,
    apart,
    check_reader,
    console,
    count,
    excerpt,
    holders,
    middle,
    paused,
    plain,
    print_table,
    progress_bar,
    say,
    short,
    size,
    when,
)

__all__ = [
    "DURATION",
    "OFFSET",
    "POSITIVE",
    "Failure",
    "Place",
    "age",
    "apart",
    "ask",
    "asks",
    "check_reader",
    "console",
    "count",
    "excerpt",
    "fail",
    "fail_if_not_ours",
    "file_argument",
    "group_option",
    "holders",
    "in_one_line",
    "is_read",
    "is_there",
    "json_option",
    "jsonable",
    "look_there",
    "looking",
    "middle",
    "missing",
    "must_be_there",
    "must_exist",
    "must_have_folder",
    "opened",
    "paused",
    "places",
    "plain",
    "print_json",
    "print_table",
    "progress_bar",
    "queue_of",
    "readonly_option",
    "say",
    "short",
    "size",
    "told",
    "topic_option",
    "when",
    "with_body",
    "yes_option",
]

Command = TypeVar("Command", bound=Callable[..., Any])

# We may look at it, and no more.
_NOT_OURS = (errno.EROFS, errno.EACCES, errno.EPERM)


class Failure(click.ClickException):
    """What was asked for was not done: one line on standard error, exit status 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"weclawctl: {self.message}", err=True)


def fail(message: str) -> NoReturn:
    raise Failure(message)


def in_one_line(error: Exception) -> str:
    """What an error says, without its number and without line breaks."""
    if isinstance(error, Failure):
        return error.message
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return plain(f"{error.filename}: {error.strerror}")
    return plain(" ".join(str(error).split()) or type(error).__name__)


# Options.


class _Duration(click.ParamType):  # type: ignore[type-arg]  # generic in some versions
    name = "duration"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        try:
            seconds = _options.parse_seconds(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        if self._positive and not seconds:
            self.fail("it must be more than 0 seconds", param, ctx)
        return seconds


class _Offset(click.ParamType):  # type: ignore[type-arg]  # generic in some versions
    name = "offset"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "earliest" or isinstance(value, int):
            return value
        if not value.isdecimal():
            self.fail(f"{value!r} is neither an offset nor 'earliest'", param, ctx)
        return int(value)


#: A number, or "earliest".
OFFSET = _Offset()
#: Seconds, or 30s, 10m, 48h, 7d.
DURATION = _Duration()
#: The same, and more than none.
POSITIVE = _Duration(positive=True)


def _complete_place(index: int) -> Callable[..., list[str]]:
    """Names of topics (0) or groups (1), for the shell; nothing when the file can't be read."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        # With an option still open, click has not told the arguments apart.
        file = ctx.params.get("file") or next(filter(os.path.isfile, ctx.args), "")
        with contextlib.suppress(Exception), looking(file, readonly=False) as store:
            topic = ctx.params.get("topic")
            typed = ctx.get_parameter_source("topic") is ParameterSource.COMMANDLINE
            of_topic = topic if index and typed else None
            names = {str(place[index]) for place in places(store, of_topic, None)}
            return sorted(name for name in names if name.startswith(incomplete))
        return []

    return complete


# Whether it can be read, opening it says: to `health` that is an answer and no wrong usage.
file_argument: Callable[[Command], Command] = click.argument(
    "file", type=click.Path(readable=False)
)
topic_option: Callable[[Command], Command] = click.option(
    "--topic",
    default="default",
    show_default=True,
    help="The topic.",
    shell_complete=_complete_place(0),
)
group_option: Callable[[Command], Command] = click.option(
    "--group",
    default="default",
    show_default=True,
    help="The consumer group.",
    shell_complete=_complete_place(1),
)
json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs."
)
readonly_option: Callable[[Command], Command] = click.option(
    "--readonly", is_flag=True, help="Open without the right to write."
)
yes_option: Callable[[Command], Command] = click.option(
    "--yes", is_flag=True, help="Do it without asking."
)


def asks() -> bool:
    """Whether there is somebody who sees a question and can answer it."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, *, yes: bool) -> None:
    """Go on only with --yes or a yes from the terminal."""
    if yes:
        return
    if not asks():
        raise Failure(f"{question} Nothing was done; add --yes to do it without being asked")
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)  # Ctrl-C leaves the cursor behind the question
        raise
    if not agreed:
        raise Failure("nothing was done")


def must_exist(file: str) -> None:
    """Only put makes a file: a name misspelled elsewhere is an error, not an empty queue; and
    what has been cut to nothing is not a queue in good health.
    """
    try:
        found = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        if not file:
            fail("the name of the file is empty; name one")
        to = f" as {os.path.realpath(file)}, where it leads" if os.path.islink(file) else ""
        fail(plain(f"{file}: there is no such file{to}; 'weclawctl put' makes one"))
    except OSError:
        return  # opening it says more
    if stat.S_ISREG(found.st_mode) and not found.st_size:
        fail(
            f"{plain(file)} is empty: there is no queue in it; 'weclawctl put' makes one, and "
            "if there was one, it is lost: restore a backup or the replica"
        )


def is_there(path: str) -> bool | None:
    """Whether there is such a name; None where that can't be known, as behind a closed folder."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return True


def must_have_folder(file: str) -> None:
    """No folder is made beside the file."""
    folder = os.path.dirname(file)
    if folder and is_there(folder) is not None and not os.path.isdir(folder):
        fail(f"{plain(folder)}: there is no such folder; nothing was put; make it first")


@contextlib.contextmanager
def opened(
    file: str, *, readonly: bool = False, create: bool = False, consumer: str | None = None
) -> Iterator[weclaw.Store]:
    """The store of an existing file (any file with `create`), closed at the end."""
    if create:
        must_have_folder(file)
    else:
        must_exist(file)
    try:
        made = weclaw.open(file, readonly=readonly, consumer=consumer)
    except weclaw.StorageError as error:
        fail_if_not_ours(file, error)
        raise
    with made as store:
        yield store


def fail_if_not_ours(file: str, error: weclaw.StorageError) -> None:
    """Say what still works, if `error` comes of that we may not read or write."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _NOT_OURS:
        if (there := is_there(file)) is None:
            fail(
                f"{plain(file)} can't be reached ({cause.strerror}), so whether there is such a "
                "file is not known; nothing was changed; do this as who may enter its folder"
            )
        if not there:
            fail(
                f"{plain(file)} does not exist and can't be made ({cause.strerror}); nothing was "
                "changed; check the path, or do this as who may write in that folder"
            )
        if not os.access(file, os.R_OK):
            fail(
                f"{plain(file)} can't be read ({cause.strerror}); nothing was changed; do this as "
                "its owner"
            )
        what = plain(file)
        if os.access(file, os.W_OK):
            what = f"the folder {plain(file)}.d, which belongs to {what}, can't be made there, or"
        fail(
            f"{what} can't be written ({cause.strerror}); nothing was changed; what only "
            "looks (stats, peek, verify, dlq list …) works all the same"
        )


@contextlib.contextmanager
def looking(file: str, *, readonly: bool) -> Iterator[weclaw.Store]:
    """The store, only to be looked at: where we may not write, it is opened readonly."""
    with opened(file, readonly=readonly or not _may_write(file)) as store:
        yield store


def _may_write(file: str) -> bool:
    with contextlib.suppress(Exception):
        if replica.node(file).role == "copy":
            return False  # it belongs to its receiver
    real = os.path.realpath(file)
    scratch = f"{real}.d"
    beside = scratch if os.path.isdir(scratch) else os.path.dirname(real)
    return os.access(real, os.W_OK) and os.access(beside, os.W_OK)


class Place(NamedTuple):
    """A topic as one group sees it."""

    topic: str
    group: str
    paused: bool
    pause_left_s: float | None = None
    pause_reason: str | None = None

    @property
    def pause(self) -> str:
        return paused(self.pause_left_s, self.pause_reason)


def places(store: weclaw.Store, topic: str | None, group: str | None) -> list[Place]:
    """Every topic and group there is, or those chosen; a topic nobody has read yet is seen by the
    group it waits for.
    """
    pauses = _survey.pauses(store)
    found = [
        Place(one.topic, one.group, True, *pauses[one[:2]])
        if one[:2] in pauses
        else Place(one.topic, one.group, False)
        for one in store.groups()
    ]
    read = {one.topic for one in found}
    found += [
        Place(name, group or "default", False) for name in _survey.topics(store) if name not in read
    ]
    chosen = [one for one in found if topic in (None, one.topic) and group in (None, one.group)]
    return sorted(chosen) or [Place(topic or "default", group or "default", False)]


def told(option: str) -> bool:
    """Whether the caller gave this option, rather than leaving it at its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not None and source is not ParameterSource.DEFAULT


def missing(store: weclaw.Store, topic: str | None, group: str | None) -> str | None:
    """What is wrong with these names, in one line that says which there are; None if nothing is.

    None stands for any. A topic that nobody has read yet waits for its first group, whatever that
    is called.
    """
    found = store.groups()
    topics = sorted({*_survey.topics(store), *(one.topic for one in found)})
    if topic is not None and topic not in topics:
        if not topics and not told("topic"):
            return None  # a new file: nothing was put yet, so no name can be wrong
        return plain(f"there is no topic {topic!r} in this file; {_listed('topic', topics)}")
    groups = sorted({one.group for one in found if topic in (None, one.topic)})
    if group is None or group in groups or not groups:
        return None
    where = "this file" if topic is None else f"topic {topic!r}"
    return plain(f"there is no group {group!r} in {where}; {_listed('group', groups)}")


def is_read(store: weclaw.Store, topic: str | None) -> bool:
    """Whether any group of the topic (None: of any) has begun."""
    return any(topic in (None, one.topic) for one in store.groups())


def _listed(noun: str, names: Sequence[str]) -> str:
    if not names:
        return f"it has no {noun}s yet"
    shown = ", ".join(repr(name) for name in names[:10])
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"the {noun}s there are: {shown}{more}"


def must_be_there(store: weclaw.Store, topic: str | None, group: str | None) -> None:
    """Go on only if there is such a topic and group: a misspelt one looks empty and healthy."""
    wrong = missing(store, topic, group)
    if wrong is not None:
        fail(f"{wrong}; nothing was changed")


def look_there(
    store: weclaw.Store, topic: str | None, group: str | None, *, may_begin: bool = False
) -> None:
    """The same for looking: a name that was typed must be there; of a default that is not, and with
    `may_begin` of a group that has not begun (it is shown what it would get), a line tells. It
    tells of a typed group, too, where any name would do: it may be misspelt all the same.
    """
    wrong = missing(store, topic, group)
    if wrong is None:
        if group is not None and told("group") and not is_read(store, topic):
            where = "this file" if topic is None else f"topic {topic!r}"
            first = f"no group has read {where} yet; group {group!r} would get all of it"
            say(plain(f"weclawctl: {first}"))
        return
    of_topic = missing(store, topic, None) is not None
    typed = told("topic") if of_topic else told("group") and not may_begin
    if typed:
        fail(wrong)
    say(f"weclawctl: {wrong}")


def queue_of(store: weclaw.Store, topic: str, group: str, **options: Any) -> weclaw.Queue:
    return store.queue(topic, group=group, **options)


# For programs.


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON document on standard output; indent=None for one line."""
    text = dumps(value, indent=indent)
    # A lone surrogate can stand in a file's name; JSON has an escape for it, UTF-8 has not.
    data = text.encode("utf-8", "backslashreplace") + b"\n"
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(data.decode("utf-8"))
    else:
        stream.write(data)
        stream.flush()


def with_body(found: dict[str, Any], content: Content | weclaw.Message) -> dict[str, Any]:
    """The same with `body`; where it can't be decoded here, null, and why in `body_error`."""
    try:
        body = content.body if isinstance(content, weclaw.Message) else content.body("msgpack")
    except weclaw.SerializationError as error:
        return {**found, "body": None, "body_error": str(error)}
    return {**found, "body": body}

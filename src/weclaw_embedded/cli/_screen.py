"""What people see: sizes and times in words, tables, progress bars, lines on standard error.

Nothing here knows of queues. What comes from outside goes through `plain` before it is shown.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, cast

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from weclaw_embedded._jsonable import dumps

__all__ = [
    "OutputError",
    "ReaderLeftError",
    "age",
    "apart",
    "check_reader",
    "console",
    "count",
    "drop_output",
    "excerpt",
    "holders",
    "middle",
    "open_output",
    "paused",
    "plain",
    "print_table",
    "progress_bar",
    "say",
    "short",
    "size",
    "stand_in_for_closed",
    "when",
]


class OutputError(OSError):
    """Standard output can't be written: no fault of the queue's disk, whatever the number says."""


class ReaderLeftError(Exception):
    """Whoever read standard output has seen enough. It is no OSError: click and rich end the
    process by themselves at a broken pipe, each in its own way, and leave behind what Python then
    fails to write at exit.
    """


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderLeftError from error
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


def stand_in_for_closed() -> None:
    """Have something open in place of each standard stream that was closed: else the queue file is
    opened under its number, to be read as input, or written to by whatever prints. Writing to a
    standard output that was closed fails; who reads standard input looks whether it is None.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    if sys.stdout is None:
        fd = os.open(os.devnull, os.O_RDONLY)
        sys.stdout = os.fdopen(fd, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        fd = os.open(os.devnull, os.O_WRONLY)
        sys.stderr = os.fdopen(fd, "w", encoding="utf-8", closefd=False)


def open_output(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same standard stream, so that what can't be written there raises OutputError, or
    ReaderLeftError. A sign that a terminal can't show becomes its code, not an error in the middle
    of a table.
    """
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def check_reader() -> None:
    """Raise ReaderLeftError if nobody reads standard output any more. For who waits: else only the
    next thing that is written would tell, and that may never come.
    """
    try:
        fd = sys.stdout.fileno()
    except io.UnsupportedOperation:
        return  # it is memory of whoever called us in his own process
    poll = select.poll()
    poll.register(fd, 0)  # what is asked for in any case: an error, a hang-up
    if poll.poll(0):
        raise ReaderLeftError


def drop_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter does not try it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(text: str) -> str:
    """The text on one line, with nothing in it that a terminal would obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def excerpt(value: Any, width: int = 60) -> str:
    """A body in one line of at most `width` characters."""
    if isinstance(value, str):
        text = value[: width + 1]
    else:
        text = dumps(value)[: width + 1]
    text = plain(text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def middle(text: str, width: int) -> str:
    """The text in at most `width` columns: of a long one both ends, which tell names apart."""
    if cell_len(text) <= width:
        return text
    room = width - 1
    begin = set_cell_size(text, (room + 1) // 2).rstrip()
    end = text[len(text) - room // 2 :]
    while cell_len(end) > room // 2:
        end = end[1:]
    return f"{begin}…{end}"


def apart(texts: Sequence[str], width: int) -> list[str]:
    """Each in at most `width` columns; where `middle` leaves out what tells some from each other,
    these are shown from where they begin to differ, which may still be too long for the width.
    """
    found = {text: middle(text, width) for text in texts}
    for those in _alike(found):
        found.update(_from_where_they_differ(those, width))
    return [found[text] for text in texts]


def _alike(shown: Mapping[str, str]) -> list[list[str]]:
    """The texts that are shown as another one is, too."""
    sets = collections.defaultdict(list)
    for text, cut in shown.items():
        sets[cut].append(text)
    return [those for those in sets.values() if len(those) > 1]


def _from_where_they_differ(texts: Sequence[str], width: int) -> dict[str, str]:
    """With some of what they have in common before that, if they stay apart with it."""
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, signs in columns if len(set(signs)) > 1), min(map(len, texts)))
    found: dict[str, str] = {}
    for room in (width // 3, 0):
        begin = set_cell_size(texts[0][:same], min(same, room)).rstrip()
        left = width - cell_len(begin) - 1
        for text in texts:
            rest = text[same:]
            if cell_len(rest) > left:
                rest = set_cell_size(rest, left - 1).rstrip() + "…"
            found[text] = f"{begin}…{rest}"
        if not _alike(found):
            break
    return found


def count(number: int, noun: str) -> str:
    """As in `1 message` and `1 000 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}".replace(",", " ")


def paused(left_s: float | None, reason: str | None) -> str:
    """As in `paused for 29 m more: provider is down`."""
    return f"paused for {age(left_s)} more" + (f": {reason}" if reason else "")


def holders(found: Mapping[str, int]) -> str:
    """Who has how many in hand, the first ten by number: `worker-2 12, host:4711 1`."""
    ranked = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{plain(name) or '-'} {number}" for name, number in ranked[:10])
    return shown + (f" and {len(ranked) - 10} more" if len(ranked) > 10 else "")


def age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def short(number: float) -> str:
    """A number in at most six signs."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < (100_000 if not unit else 10_000):
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}T"


def size(number: int | None) -> str:
    if number is None:
        return "-"
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(moment: datetime | None) -> str:
    if moment is None:
        return "-"
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def console(*, err: bool = False) -> Console:
    stream = sys.stderr if err else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else 80,
        highlight=False,
        emoji=False,
        markup=False,
    )


def _console_of_bars() -> Console:
    """Two columns are left free: there a terminal writes the ^C of Ctrl-C, which would wrap to a
    line of its own otherwise, and leave a second bar there.
    """
    out = console(err=True)
    out.width = max(20, out.width - len("^C"))
    return out


# Between two columns: so much, or where that is too much, this.
_GAPS = (3, 1)
# A text that may be folded has so many columns at least.
_LEAST = 12


def print_table(
    columns: Sequence[str | tuple[str, str]],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    one_line: bool = False,
    folded: str | None = None,
    in_order: bool = True,
) -> None:
    """A table; a column is its heading, or (heading, "right").

    Texts are folded to fit, which are the last column, if it is not to the right, or `folded`; with
    one_line the last column is cut instead. All else stays whole, since half an id can be neither
    copied nor searched for: where the columns don't fit beside each other, each row is a list.
    Where the rows need not stay `in_order`, only those that are too wide are, behind the others.
    """
    out = console()
    named = [(one, "left") if isinstance(one, str) else one for one in columns]
    headings = [heading for heading, _ in named]
    if folded is None and named[-1][1] == "left":
        folded = headings[-1]
    cells = [[Text(plain(str(cell))) for cell in row] for row in rows]

    def gap_of(widths: list[int]) -> int | None:
        least = sum(
            min(wide, _LEAST) if one == folded else wide
            for one, wide in zip(headings, widths, strict=True)
        )
        # One gap to spare: older versions of rich count the one before the last column twice.
        return next((gap for gap in _GAPS if least + gap * len(widths) <= out.width), None)

    narrowest = 0 if in_order else min((_widest(row) for row in cells), default=0)
    limit = max((_widest(row) for row in cells), default=0)
    beside = cells
    while (gap := gap_of(widths := _widths(headings, beside))) is None and limit > narrowest > 0:
        limit -= 1
        beside = [row for row in beside if _widest(row) <= limit]
    if gap is None:
        _print_lists(out, headings, cells, title, one_line=one_line)
        return
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,  # else a table begins with a line of blanks
        pad_edge=False,
        padding=(0, gap // 2),
    )
    for heading, justify in named:
        whole = heading != folded
        table.add_column(heading, justify=cast(Any, justify), overflow="fold", no_wrap=whole)
    room = out.width - sum(widths[:-1]) - gap * len(widths)
    for row in beside:
        if one_line:
            row[-1].truncate(room, overflow="ellipsis")
        table.add_row(*row)
    out.print(table)
    if len(beside) < len(cells):
        out.print()
        too_wide = [row for row in cells if _widest(row) > limit]
        _print_lists(out, headings, too_wide, None, one_line=one_line)


def _widest(row: list[Text]) -> int:
    """How wide the widest cell is."""
    return max(cell.cell_len for cell in row)


def _widths(headings: list[str], rows: list[list[Text]]) -> list[int]:
    """How wide each column is at its widest."""
    return [
        max([cell_len(heading), *(row[i].cell_len for row in rows)])
        for i, heading in enumerate(headings)
    ]


def _print_lists(
    out: Console, headings: list[str], rows: list[list[Text]], title: str | None, *, one_line: bool
) -> None:
    """Each row as lines of a heading and what stands under it."""
    wide = max(map(cell_len, headings))
    if title is not None:
        out.print(Text(title, style="bold"))
    for n, row in enumerate(rows):
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True, min_width=wide)
        table.add_column(overflow="fold")
        for heading, cell in zip(headings, row, strict=True):
            if one_line and cell is row[-1]:
                cell.truncate(max(out.width - wide - 2, 1), overflow="ellipsis")
            table.add_row(heading, cell)
        if n:
            out.print()
        out.print(table)


_bars: list[Progress] = []


@contextlib.contextmanager
def progress_bar(
    label: str, total: int | None, *, pulse: bool = False, percent: bool = False
) -> Iterator[Any]:
    """Yield update(completed=…, total=…, label=…); shown on a terminal and nowhere else.

    With `percent` the numbers are bytes, which nobody wants to read; with `pulse` there is nothing
    to count: it only shows that work goes on.
    """
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeRemainingColumn())
    if pulse:
        counted = ()
    elif percent:
        counted = (TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        *counted,
        TimeElapsedColumn(),
        console=_console_of_bars(),
        expand=False,
        transient=pulse or percent,
    ) as progress:
        _bars.append(progress)
        task = progress.add_task(label, total=total)

        def update(
            *, completed: int | None = None, total: int | None = None, label: str | None = None
        ) -> None:
            progress.update(task, completed=completed, total=total, description=label)

        try:
            yield update
        finally:
            _bars.remove(progress)


def say(text: str) -> None:
    """A line on standard error, above the progress bar if there is one."""
    if _bars:
        _bars[-1].console.print(Text(text), soft_wrap=True)
    else:
        click.echo(text, err=True)

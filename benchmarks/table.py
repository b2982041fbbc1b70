"""What was measured, as rows and their table: what must be reached, figures, ratios, Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from common import Samples, median_ratio


@dataclass
class Target:
    """What must be reached: of the value itself, or of its ratio to the floor or yardstick."""

    of: str  # "value", "floor" or "yardstick"
    limit: float
    is_upper: bool
    unit: str = ""

    def __str__(self) -> str:
        unit = {"floor": " × F", "yardstick": " × Y"}.get(self.of, f" {self.unit}".rstrip())
        return f"{'≤' if self.is_upper else '≥'} {figure(self.limit)}{unit}"


def at_most(limit: float, of: str = "value", unit: str = "") -> Target:
    return Target(of, limit, True, unit)


def at_least(limit: float, of: str = "value", unit: str = "") -> Target:
    return Target(of, limit, False, unit)


@dataclass
class Row:
    """One line of the table; `samples` are the turns it comes from."""

    work: str
    value: float
    unit: str
    x_floor: float | None = None
    x_yardstick: float | None = None
    target: Target | None = None
    note: str = ""
    samples: Samples = field(default_factory=dict)
    section: str = ""

    @property
    def reached(self) -> str:
        if self.target is None:
            return ""
        value = {"floor": self.x_floor, "yardstick": self.x_yardstick}.get(
            self.target.of, self.value
        )
        if value is None:
            return "?"
        is_met = value <= self.target.limit if self.target.is_upper else value >= self.target.limit
        return "yes" if is_met else "NO"


def figure(value: float | None) -> str:
    if value is None:
        return ""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


def latency_row(work: str, samples: Samples, target: Target | None = None) -> Row:
    """A row of times in microseconds, of the contenders "ours", "floor" and "yardstick"."""
    return _row(work, samples, "µs", target)


def rate_row(work: str, samples: Samples, target: Target | None = None, note: str = "") -> Row:
    """A row of rates. Its × floor is how many messages go through while the floor writes one."""
    return _row(work, samples, "/s", target, note)


def _row(work: str, samples: Samples, unit: str, target: Target | None, note: str = "") -> Row:
    return Row(
        work,
        statistics.median(samples["ours"]),
        unit,
        median_ratio(samples, "ours", "floor") if "floor" in samples else None,
        median_ratio(samples, "ours", "yardstick") if "yardstick" in samples else None,
        target,
        note,
        samples,
    )


_HEAD = ("work", "measured", "× floor", "× yardstick", "target", "reached", "note")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table that reads well on a terminal, too."""
    cells = [
        (
            row.work,
            f"{figure(row.value)} {row.unit}".rstrip(),
            figure(row.x_floor),
            figure(row.x_yardstick),
            "" if row.target is None else str(row.target),
            row.reached,
            row.note,
        )
        for row in rows
    ]
    # Columns that nothing stands in are left out.
    kept = [i for i in range(len(_HEAD)) if any(line[i] for line in cells)]
    columns = [[_HEAD[i], *[line[i] for line in cells]] for i in kept]
    widths = [max(len(text) for text in column) for column in columns]
    lines = []
    for n in range(len(cells) + 1):
        words = [column[n].ljust(width) for column, width in zip(columns, widths, strict=True)]
        lines.append(f"| {' | '.join(words)} |")
        if n == 0:
            lines.append(f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)

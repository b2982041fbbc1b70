"""Draw what versus.py kept: one panel a work, bars on a log scale.

python benchmarks/plot.py benchmarks/results/versus.json [OUT.png]
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

# Without pyplot, which would look for a screen.
_figure: Any = importlib.import_module("matplotlib.figure").Figure

_OURS = "#1f6feb"
_YARDSTICK = "#6e7781"
_PEER = "#c9d1d9"
_LESS = "#f0d9c4"
_INK = "#24292f"


def _rate(row: dict[str, Any]) -> float:
    return 1e6 / row["value"] if row["unit"] == "µs" else float(row["value"])


def _color(row: dict[str, Any]) -> str:
    if row["work"] == "weclaw_embedded":
        return _OURS
    if "(Y)" in row["work"]:
        return _YARDSTICK
    return _LESS if row["note"].startswith(("NOT", "AT MOST")) else _PEER


def _panel(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    floor = next(row for row in rows if row["work"] == "floor")
    bars = [row for row in rows if row["work"] != "floor" and row["value"] > 0]
    bars.sort(key=_rate)
    names = [row["work"] for row in bars]
    rates = [_rate(row) for row in bars]
    hatches = ["///" if _color(row) == _LESS else "" for row in bars]
    axes.barh(
        names,
        rates,
        color=[_color(row) for row in bars],
        hatch=hatches,
        edgecolor="white",
        height=0.7,
    )
    for at, (rate, row) in enumerate(zip(rates, bars, strict=True)):
        is_ours = row["work"] == "weclaw_embedded"
        weight = "bold" if is_ours else "normal"
        ratio = row["x_yardstick"] if row["unit"] == "/s" else 1 / row["x_yardstick"]
        text = f" {rate:,.0f}".replace(",", " ") + f"   {ratio:.2g} × Y"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(
            rate * 1.03, at, text, va="center", fontsize=8, color=_INK, weight=weight, bbox=box
        )
        if is_ours:
            axes.get_yticklabels()[at].set_weight("bold")
    axes.axvline(_rate(floor), color="#cf222e", linewidth=1, linestyle="--", zorder=0.5)
    axes.set_xscale("log")
    every = [*rates, _rate(floor)]
    axes.set_xlim(min(every) / 3, max(every) * 12)
    axes.set_title(title, loc="left", fontsize=10, weight="bold", color=_INK)
    axes.tick_params(labelsize=8, length=0, colors=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(kept: Path, out: Path) -> None:
    """The table in `kept` as a picture in `out`."""
    result = json.loads(kept.read_text())
    panels = {
        name: list(rows)
        for name, rows in itertools.groupby(result["rows"], key=lambda row: row["section"])
    }
    heights = [len(rows) for rows in panels.values()]
    height = 0.25 * sum(heights) + 0.5 * len(panels) + 1
    figure = _figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(len(panels), gridspec_kw={"height_ratios": heights})
    for one, (title, rows) in zip(axes, panels.items(), strict=True):
        _panel(one, title.replace("put, p50", "put, one at a time"), rows)
    axes[-1].set_xlabel("messages a second, log scale", fontsize=8, color=_INK)
    where = result["where"]
    figure.suptitle(
        "Durable queues on one disk. Dashed: the bare disk, one synced write a message.\n"
        "Grey: sqlite3 by hand (Y). Hatched: not durable, or loses what a killed consumer held.\n"
        f"{where['machine']}; {where['disk']}; each sync {where['each sync']}; {where['date']}",
        fontsize=8,
        color=_INK,
        x=0.01,
        ha="left",
    )
    figure.savefig(out, dpi=150)


def main() -> None:
    kept = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else kept.with_suffix(".png")
    draw(kept, out)
    print(f"drawn in {out}")


if __name__ == "__main__":
    main()

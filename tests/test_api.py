"""docs/api.md has every public name, with the arguments and defaults it has in the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _options, aio, threads

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")
BLOCKS = " ".join(
    " ".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).split()
)
#: Numbers that are easier to read as they are thought of.
SHOWN = {172800.0: "48*3600", 268435456: "256*2**20", 16777216: "16*2**20", "": "''"}
#: The same as another, awaited or closed by a block; each is held to it below.
TWINS = {
    "AsyncQueue": weclaw.Queue,
    "AsyncMessage": weclaw.Message,
    "AsyncTransaction": weclaw.Transaction,
    "AsyncDeadLetterQueue": weclaw.DeadLetterQueue,
}
#: What a user gets and never makes.
GIVEN = {"Message", "Transaction", "DeadLetter", "DeadLetterQueue", "Store"}


def classes() -> Iterator[tuple[str, Any]]:
    for name in weclaw.__all__:
        found = getattr(weclaw, name)
        if inspect.isclass(found) and name not in TWINS and not issubclass(found, Exception):
            yield name, found
    yield "aio.Queue", aio.Queue
    yield "threads.Queue", threads.Queue


def members(kind: Any) -> dict[str, Any]:
    """The public names that a class has of us."""
    found = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("weclaw_embedded"):
            found.update({n: value for n, value in vars(base).items() if n[0] != "_"})
    return {n: value for n, value in found.items() if "I/O thread" not in (value.__doc__ or "")}


def defaults() -> dict[str, Any]:
    return {one.name: one.default for one in (*_options._STORE, *_options._QUEUE, *_options._RETRY)}


def signature(name: str, function: Any, *, options: bool = False) -> str:
    """`name(a, *, b=None)`, as the page writes it; of what was left out its default."""
    parts, starred = [], False
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        text = one.name
        if one.kind is one.VAR_KEYWORD:
            text = f"**{text}"
        elif one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        if one.default is _options.UNSET:
            default = defaults()[one.name] if options else ...
            if one.name == "retry":
                default = weclaw.RetryPolicy
            text += f"={shown(default)}"
        elif one.default is not one.empty:
            text += f"={shown(one.default)}"
        parts.append(text)
    return f"{name}({', '.join(parts)})"


def shown(value: Any) -> str:
    if value is ...:
        return "…"
    if value is weclaw.RetryPolicy:
        return "RetryPolicy()"
    if type(value) in (int, float, str) and value in SHOWN:
        return SHOWN[value]
    return repr(value).replace("'", '"')


def signatures() -> Iterator[str]:
    yield signature("open", weclaw.open, options=True)
    for name, kind in classes():
        if name not in GIVEN and not issubclass(kind, tuple):
            yield signature(name, kind.__init__, options=True)
        for member, value in members(kind).items():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield signature(f"{name}.{member}", function, options=name == "Store")


@pytest.mark.parametrize("text", list(signatures()))
def test_every_signature_is_on_the_page(text: str) -> None:
    """With its arguments in their order, and what holds when they are left out."""
    assert re.search(rf"(?<![\w.]){re.escape(text)}", BLOCKS), text


def test_the_page_has_no_signature_that_is_not_there() -> None:
    mine = {text.partition("(")[0] for text in signatures()}
    shown = set(re.findall(r"(?<![\w.`])((?:\w+\.)*\w+)\((?![^ ]*\) *=)", BLOCKS)) - {"RetryPolicy"}
    assert shown <= mine | {"RetryPolicy"}, shown - mine


@pytest.mark.parametrize("kind", [pair[1] for pair in classes()], ids=[p[0] for p in classes()])
def test_every_attribute_is_on_the_page(kind: Any) -> None:
    """What a class has besides methods."""
    for name, value in members(kind).items():
        if not inspect.isfunction(getattr(value, "__func__", value)):
            assert f"`{name}`" in PAGE, name


def test_what_a_worker_counts_is_on_the_page(tmp_path: Path) -> None:
    """It has these once it is made, not as a class."""
    with weclaw.Queue(tmp_path / "tasks.wq") as q:
        counts = [name for name in vars(weclaw.Worker(q, print)) if name[0] != "_"]
    assert counts
    for name in counts:
        assert f"`{name}`" in PAGE, name


def test_every_name_of_the_package_is_on_the_page() -> None:
    for name in weclaw.__all__:
        if not name.startswith("__"):
            assert re.search(rf"`(?:weclaw\.)?{name}\b|^{name}\(", PAGE, re.MULTILINE), name


def test_the_options_are_those_of_the_table_in_the_code() -> None:
    """Each with its default, and the variable of the environment that stands for it."""
    told = {
        name: (default, variable)
        for name, default, variable in re.findall(
            r"^\| `(\w+)` \| `(.*?)` \| (?:`(\w+)`)? ?\| .+ \|$", PAGE, re.MULTILINE
        )
    }
    wanted = {
        one.name: (
            "RetryPolicy()" if one.name == "retry" else shown(one.default),
            f"WECLAW_{one.variable}" if one.variable else "",
        )
        for one in (*_options._STORE, *_options._QUEUE, *_options._RETRY)
    }
    assert told == wanted


@pytest.mark.parametrize(
    ("what", "table"), [(weclaw.open, _options._STORE), (weclaw.Queue, _options._QUEUE)]
)
def test_help_explains_every_option_with_its_default(what: Any, table: Any) -> None:
    """It is where they are looked for first."""
    text = inspect.getdoc(what) or ""
    for one in table:
        told = re.search(rf"^    {one.name}: (?:.|\n(?!    \w))*", text, re.MULTILINE)
        assert told, one.name
        assert "default" in told[0], one.name


@pytest.mark.parametrize("name", TWINS)
def test_what_is_awaited_takes_the_same(name: str) -> None:
    """What the page says of the one holds for the other."""
    mine, other = members(getattr(weclaw, name)), members(TWINS[name])
    for member in set(mine) & set(other):
        if inspect.isfunction(mine[member]):
            first = signature(member, mine[member])
            assert first == signature(member, other[member])
    assert {n for n in other if inspect.isfunction(other[n])} <= set(mine) | {"close"}

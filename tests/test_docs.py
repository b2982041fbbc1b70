"""What the documentation shows is tried: every Python block runs, every shown command exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = sorted([*READMES, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    """Each block of this language in all pages, with its page and line as its name."""
    found = []
    for page in PAGES:
        if page == READMES[1]:
            continue  # its blocks are those of the other, as a test below sees to
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_runs(code: str, tmp_path: Path) -> None:
    """In a process of its own and an empty folder, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert not done.stderr, done.stderr


def shown_commands() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return sorted(set(re.findall(r"weclawctl ((?:dlq )?[a-z]+)", text)))


@pytest.mark.parametrize("words", shown_commands())
def test_a_command_that_is_shown_exists(words: str) -> None:
    click = pytest.importorskip("click")
    from weclaw_embedded.cli._app import app

    command: object = app
    for word in words.split():
        assert isinstance(command, click.Group)
        command = command.commands.get(word)
        assert command is not None, f"weclawctl {words}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_shown_exist() -> None:
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z]+)", page.read_text(encoding="utf-8")):
            if re.search(rf"`make {target}|^make {target}", page.read_text("utf-8"), re.MULTILINE):
                assert re.search(rf"^{target}:", made, re.MULTILINE), f"{page.name}: make {target}"


def outline(page: Path) -> tuple[list[str], list[str], list[str]]:
    """The levels of the headings, the blocks of code, and the names of our own that are used."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    levels = [line.split()[0] for line in prose.splitlines() if re.match(r"#+ ", line)]
    before = re.split(r"^## (?:Reading the source|阅读源码)$", prose, flags=re.MULTILINE)[0]
    names = re.findall(r"`[^`]*`", before)
    return levels, blocks, sorted(set(names))


def test_the_readme_says_the_same_in_both_languages() -> None:
    """The same headings, the same code, the same names and numbers of options."""
    english, chinese = map(outline, READMES)
    assert english[0] == chinese[0]
    assert english[1] == chinese[1]
    assert english[2] == chinese[2]


def test_a_table_of_the_readme_has_as_many_rows_in_both_languages() -> None:
    def rows(page: Path) -> list[int]:
        text = page.read_text(encoding="utf-8")
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        return [table.count("\n") for table in tables if "`errors`" not in table]

    assert rows(READMES[0]) == rows(READMES[1])


def test_the_chinese_readme_leads_to_the_other_and_back() -> None:
    assert "(README.zh.md)" in READMES[0].read_text(encoding="utf-8")
    assert "(README.md)" in READMES[1].read_text(encoding="utf-8")


def test_every_verb_is_somewhere_in_the_pages() -> None:
    """What `weclawctl` can do is shown, but for what only machines call."""
    click = pytest.importorskip("click")
    from weclaw_embedded.cli._app import app

    def verbs(group: object, *path: str) -> list[str]:
        assert isinstance(group, click.Group)
        found = []
        for name, command in group.commands.items():
            inner = isinstance(command, click.Group)
            found += verbs(command, *path, name) if inner else [" ".join((*path, name))]
        return found

    shown = set(shown_commands())
    hidden = {verb for verb in verbs(app) if verb not in shown}
    assert hidden <= {"replica", "cancel", "dlq purge"}, hidden

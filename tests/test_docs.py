"""What the documentation shows is tried: every Python block runs, every shown command exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    """Each block of this language in all pages, with its page and line as its name."""
    found = []
    for page in PAGES:
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

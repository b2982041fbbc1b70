"""weclawctl called in this process, and handlers for it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my tasks 任务.wq"


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: (exit status, output, errors)."""
    from weclaw_embedded.cli._app import run

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def js(ctl: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run with --json and read it."""

    def call(*words: object, status: int = 0) -> Any:
        ended, out, err = ctl(*words, "--json")
        assert ended == status, err
        return json.loads(out)

    return call


@pytest.fixture
def handlers(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Make a module of handlers; gives the specification of its function `handle`."""
    made = []

    def make(code: str) -> str:
        name = f"handlers_{os.getpid()}_{len(made)}_{time.monotonic_ns()}"
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        made.append(name)
        return f"{tmp_path / name}.py:handle"

    path = list(sys.path)
    yield make
    sys.path[:] = path
    for name in made:
        sys.modules.pop(name, None)

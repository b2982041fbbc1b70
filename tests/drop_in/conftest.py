from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drop_in import substitute


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    """A folder for the files of one test's queues, which are closed after it."""
    substitute.folder.append(str(tmp_path))
    yield
    substitute.close_all()
    substitute.folder.pop()

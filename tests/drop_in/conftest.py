from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drop_in import substitute


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, little_garbage: None) -> Iterator[None]:
    """A folder for the files of one test's queues, which are closed after it."""
    # What other tests have dropped open is closed by a thread of its own once it is collected; not
    # while CPython's tests go through the set of all threads, which then changes under them.
    gc.collect()
    substitute.folder.append(str(tmp_path))
    yield
    substitute.close_all()
    substitute.folder.pop()

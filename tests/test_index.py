"""The index against a plain model, whole and rebuilt, over processes, aborts and reopenings."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_model import Driver, check, joined, rebuild

from weclaw_embedded import _records as rec
from weclaw_embedded._index import Index

GID = rec.group_id("default", "default")
PUT = joined(rec.pack_put(0, 0, 0, b"", b"body"))

steps = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 299), st.integers(0, 299)), max_size=60
)
commits = st.integers(1, 12)


@settings(
    max_examples=int(os.environ.get("INDEX_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps, commits)
def test_any_records_give_the_answers_of_the_model_and_again_when_rebuilt(
    todo: list[tuple[int, int, int]], every: int
) -> None:
    """Folded one by one or in one go, from the beginning or the head, the answers are the same."""
    with tempfile.TemporaryDirectory() as folder:
        index = Index.open(Path(folder, "a"), create=True)
        driver = Driver(index)
        for number, (op, a, b) in enumerate(todo):
            driver.step(op, a, b)
            if number % every == 0:
                driver.commit()
            if number % 16 == 15:
                check(driver.model, driver.open())
        check(driver.model, driver.open())
        driver.commit()
        index.close()
        again = Index.open(Path(folder, "a"), create=False)
        check(driver.model, again.write())
        again.close()
        new = Index.open(Path(folder, "b"), create=True)
        tx = rebuild(driver.model, new)
        check(driver.model, tx)
        tx.commit(driver.model.end, 1)
        new.close()

"""A bounded number of the crash rounds; longer ones by hand, see README.md."""

from __future__ import annotations

import random

import pytest
from tests.crash import rounds
from tests.crash.ledger import SCRATCH

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_nothing_promised_is_broken(tmp_path, seed):
    """SIGKILL at random moments, several processes working: every promise of the ledger holds."""
    numbers = rounds.random_round(tmp_path / "round", f"ci {seed}", seconds=1.0)
    assert numbers["events"] > 20


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("retention", [3600, 0])
def test_stopped_at_a_storage_call_nothing_promised_is_broken(tmp_path, existing, retention):
    """Stopped before, in or after a storage call while another works: every promise holds."""
    total = rounds.stop_round(
        tmp_path / "count",
        "calls",
        0,
        "count",
        existing=existing,
        scratch="deleted",
        retention=retention,
    )
    assert total > 50
    rng = random.Random(f"{existing} {retention}")
    for n in range(15):
        rounds.stop_round(
            tmp_path / f"stop {n}",
            "calls",
            rng.randrange(1, total + 1),
            rng.choice(("before", "half", "after")),
            existing=existing,
            scratch=SCRATCH[1:][n % 3],
            retention=retention,
        )


def test_stopped_at_a_line_nothing_promised_is_broken(tmp_path):
    """Stopped at a line of the library while another works: every promise holds."""
    total = rounds.stop_round(
        tmp_path / "count", "lines", 0, "count", existing=True, scratch="deleted"
    )
    assert total > 1000
    rng = random.Random("lines")
    for n in range(15):
        rounds.stop_round(
            tmp_path / f"stop {n}",
            "lines",
            rng.randrange(1, total + 1),
            "before",
            existing=n % 4 > 0,
            scratch=SCRATCH[1:][n % 3],
            retention=(3600, 0)[n % 2],
        )


@pytest.mark.slow
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_stopped_at_every_storage_call(tmp_path, existing, moment):
    """The same for every single storage call."""
    total = rounds.stop_round(
        tmp_path / "count", "calls", 0, "count", existing=existing, scratch="deleted"
    )
    for at in range(1, total + 1):
        rounds.stop_round(
            tmp_path / f"stop {at}",
            "calls",
            at,
            moment,
            existing=existing,
            scratch=SCRATCH[1:][at % 3],
            retention=(3600, 0)[at % 2],
        )

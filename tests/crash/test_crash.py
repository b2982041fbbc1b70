"""A bounded number of the crash rounds; longer ones by hand, see README.md."""

from __future__ import annotations

import random

import pytest
from tests.crash import copies, rounds
from tests.crash.ledger import SCRATCH

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_nothing_promised_is_broken(tmp_path, seed):
    """SIGKILL at random moments, several processes working: every promise of the ledger holds."""
    numbers = rounds.random_round(tmp_path / "round", f"ci {seed}", seconds=1.0)
    if numbers["events"] <= 20:  # a machine that is busy with other things got nowhere in that time
        numbers = rounds.random_round(tmp_path / "longer", f"ci {seed}", seconds=10.0)
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


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_the_copy_has_what_was_promised(tmp_path, seed):
    """Producers, consumers and receivers killed at random; then the primary is lost or fenced."""
    numbers = copies.copy_round(tmp_path / "round", f"ci {seed}", seconds=1.5)
    assert numbers["events"] > 0
    assert numbers["receivers"] > 1


def test_a_receiver_stopped_at_a_storage_call_spoils_nothing(tmp_path):
    """Stopped before, in or after a call while puts wait for it: every promise holds."""
    total = copies.receiver_stop_round(tmp_path / "count", 0, "count")
    assert total > 50
    rng = random.Random("receiver")
    for n in range(8):
        copies.receiver_stop_round(
            tmp_path / f"stop {n}",
            rng.randrange(1, total + 1),
            rng.choice(("before", "half", "after")),
            retention=(3600, 0)[n % 2],
        )


@pytest.mark.parametrize("existing", [False, True], ids=["feeds", "does not feed"])
def test_stopped_at_a_storage_call_with_a_replica_nothing_promised_is_broken(tmp_path, existing):
    """The process that feeds, and one that does not: another goes on, and the copy has it all."""
    total = copies.feeder_stop_round(tmp_path / "count", "calls", 0, "count", existing=existing)
    assert total > 50
    rng = random.Random(f"feeder {existing}")
    for n in range(6):
        copies.feeder_stop_round(
            tmp_path / f"stop {n}",
            "calls",
            rng.randrange(1, total + 1),
            rng.choice(("before", "half", "after")),
            existing=existing,
            retention=(3600, 0)[n % 2],
        )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_a_receiver_stopped_at_every_storage_call(tmp_path, moment):
    """The same for every call."""
    total = copies.receiver_stop_round(tmp_path / "count", 0, "count")
    for at in range(1, total + 1):
        copies.receiver_stop_round(tmp_path / f"stop {at}", at, moment, retention=(3600, 0)[at % 2])


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

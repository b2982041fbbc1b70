"""Options: argument before environment before the file before default; nonsense is refused."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weclaw_embedded as weclaw
from weclaw_embedded import _options
from weclaw_embedded._options import (
    UNSET,
    QueueOptions,
    RetryPolicy,
    StoreOptions,
    check_count,
    check_name,
    check_seconds,
    check_timeout,
    queue_options,
    store_options,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in (*_options._STORE, *_options._QUEUE, *_options._RETRY):
        for prefix in ("WECLAW_", "WEBCLAW_"):
            monkeypatch.delenv(f"{prefix}{option.variable}", raising=False)


@pytest.mark.parametrize("start", ["late", b"earliest", 1.5])
def test_where_a_group_may_begin_is_told_in_full(start: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="'earliest', 'latest' or an offset"):
        queue_options({"start": start})


def test_the_defaults_are_those_of_the_documentation() -> None:
    store = store_options({})
    assert store == StoreOptions(
        flush="sync",
        flush_interval_ms=500,
        flush_messages=1000,
        retention=48 * 3600,
        retention_bytes=256 * 2**20,
        max_bytes=None,
        max_message_bytes=16 * 2**20,
        segment_bytes=None,
        codec="msgpack",
        replica=None,
        sync_replica=True,
        replica_timeout=5.0,
        readonly=False,
        consumer=None,
        given=frozenset(),
        environment=frozenset(),
    )
    assert queue_options({}) == QueueOptions(
        topic="default",
        group="default",
        maxsize=0,
        visibility_timeout=60.0,
        retry=RetryPolicy(3, 5.0, 2.0, 60.0, 0.0, 3),
        on_dead=None,
        start="earliest",
        given=frozenset(),
    )


def test_what_was_left_out_is_told_from_what_was_given() -> None:
    store = store_options({"flush": "sync", "retention": UNSET, "max_bytes": None})
    assert store.given == {"flush", "max_bytes"}
    assert queue_options({"start": "earliest", "group": UNSET}).given == {"start"}
    assert store_options({"replica": None, "segment_bytes": None}).given == set()


GOOD_ENVIRONMENT: list[tuple[str, str, str, Any]] = [
    ("FLUSH_MODE", "batch", "flush", "batch"),
    ("FLUSH_MODE", "OS", "flush", "os"),
    ("FLUSH_INTERVAL_MS", "250", "flush_interval_ms", 250),
    ("FLUSH_INTERVAL_MS", "2s", "flush_interval_ms", 2000),
    ("FLUSH_INTERVAL_MS", "500ms", "flush_interval_ms", 500),
    ("FLUSH_MESSAGES", "10", "flush_messages", 10),
    ("SYNC_REPLICA", "0", "sync_replica", False),
    ("SYNC_REPLICA", "Yes", "sync_replica", True),
    ("SYNC_REPLICA", "off", "sync_replica", False),
    ("SYNC_REPLICA", "TRUE", "sync_replica", True),
    ("REPLICA", "/mnt/other disk/任务.wq", "replica", "/mnt/other disk/任务.wq"),
    ("MAX_RETRIES", "0", "max_retries", 0),
    ("RETRY_BACKOFF", "500ms", "backoff", 0.5),
    ("RETRY_BACKOFF", "1.5", "backoff", 1.5),
    ("RETRY_BACKOFF_MAX", "2m", "max_backoff", 120),
    ("RETRY_BACKOFF_MULTIPLIER", "1.5", "multiplier", 1.5),
    ("RETENTION", "48h", "retention", 48 * 3600),
    ("RETENTION", "0", "retention", 0),
    ("RETENTION", " 7d ", "retention", 7 * 86400),
]


@pytest.mark.parametrize("prefix", ["WECLAW_", "WEBCLAW_"])
@pytest.mark.parametrize(("suffix", "text", "name", "value"), GOOD_ENVIRONMENT)
def test_a_variable_fills_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, prefix: str, suffix: str, text: str, name: str, value: Any
) -> None:
    monkeypatch.setenv(prefix + suffix, text)
    if hasattr(RetryPolicy(), name):
        assert getattr(queue_options({}).retry, name) == value
    else:
        store = store_options({})
        assert getattr(store, name) == value
        assert store.environment == {name}
        assert store.chosen(name)


BAD_ENVIRONMENT = [
    ("FLUSH_MODE", "fsync"),
    ("FLUSH_MODE", ""),
    ("FLUSH_INTERVAL_MS", "soon"),
    ("FLUSH_INTERVAL_MS", "0"),
    ("FLUSH_INTERVAL_MS", "-5"),
    ("FLUSH_INTERVAL_MS", "5 parsecs"),
    ("FLUSH_MESSAGES", "0"),
    ("FLUSH_MESSAGES", "1.5"),
    ("FLUSH_MESSAGES", "1_000"),
    ("SYNC_REPLICA", "maybe"),
    ("SYNC_REPLICA", "2"),
    ("REPLICA", ""),
    ("MAX_RETRIES", "-1"),
    ("MAX_RETRIES", "three"),
    ("MAX_RETRIES", "9" * 5000),
    ("RETRY_BACKOFF", "-1s"),
    ("RETRY_BACKOFF", "nan"),
    ("RETRY_BACKOFF", "inf"),
    ("RETRY_BACKOFF", "1e400"),
    ("RETRY_BACKOFF", "9" * 400),
    ("RETRY_BACKOFF_MAX", "s"),
    ("RETRY_BACKOFF_MULTIPLIER", "0"),
    ("RETRY_BACKOFF_MULTIPLIER", "nan"),
    ("RETRY_BACKOFF_MULTIPLIER", "x2"),
    ("RETENTION", "48 hours and a bit"),
    ("RETENTION", "٤٨h"),
]


@pytest.mark.parametrize("prefix", ["WECLAW_", "WEBCLAW_"])
@pytest.mark.parametrize(("suffix", "text"), BAD_ENVIRONMENT)
def test_a_bad_variable_is_named_as_it_was_spelled(
    monkeypatch: pytest.MonkeyPatch, prefix: str, suffix: str, text: str
) -> None:
    monkeypatch.setenv(prefix + suffix, text)
    with pytest.raises(ValueError, match=f"variable {prefix}{suffix}="):
        store_options({}), queue_options({})


@pytest.mark.parametrize(
    ("suffix", "text", "why"),
    [
        ("RETENTION", "x", "is not a duration; write 5s, 500ms, 48h or a plain number"),
        ("MAX_RETRIES", "-1", "makes no sense: it must be at least 0, not -1"),
        ("REPLICA", "", "makes no sense: it must name a file, not ''"),
    ],
)
def test_a_bad_variable_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, suffix: str, text: str, why: str
) -> None:
    """Its name stands there once."""
    monkeypatch.setenv(f"WECLAW_{suffix}", text)
    with pytest.raises(ValueError) as caught:
        store_options({}), queue_options({})
    said = f"the environment variable WECLAW_{suffix}={text!r} {why}; nothing was opened;"
    assert str(caught.value) == f"{said} correct or unset it"


def test_the_right_spelling_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WECLAW_FLUSH_MODE", "os")
    monkeypatch.setenv("WEBCLAW_FLUSH_MODE", "nonsense")
    assert store_options({}).flush == "os"


def test_an_argument_goes_before_the_environment_which_is_then_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WECLAW_FLUSH_MODE", "nonsense")
    monkeypatch.setenv("WECLAW_MAX_RETRIES", "nonsense")
    assert store_options({"flush": "batch"}).flush == "batch"
    assert queue_options({"retry": RetryPolicy(max_retries=1)}).retry.max_retries == 1


def test_the_environment_fills_what_a_policy_of_the_callers_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WECLAW_RETRY_BACKOFF", "1s")
    monkeypatch.setenv("WECLAW_MAX_RETRIES", "7")
    assert RetryPolicy(max_retries=2) == RetryPolicy(2, 1.0)
    assert queue_options({"retry": RetryPolicy(backoff=3)}).retry == RetryPolicy(7, 3.0)
    assert queue_options({}).retry.backoff == 1.0
    kept = RetryPolicy()
    monkeypatch.setenv("WECLAW_RETRY_BACKOFF", "soon")
    assert pickle.loads(pickle.dumps(kept)) == kept
    assert dataclasses.replace(kept, jitter=0.5).backoff == 1.0
    with pytest.raises(ValueError, match=r"WECLAW_RETRY_BACKOFF='soon'.*unset it"):
        RetryPolicy()


def test_the_delay_of_no_retry_is_refused() -> None:
    for number, error in ((0, ValueError), (-1, ValueError), ("1", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="retry_number"):
            RetryPolicy().delay(number)  # type: ignore[arg-type]


BAD_STORE: list[tuple[str, Any, type[Exception]]] = [
    ("flush", "fsync", ValueError),
    ("flush", None, TypeError),
    ("flush_interval_ms", 0, ValueError),
    ("flush_interval_ms", "500", TypeError),
    ("flush_messages", 0, ValueError),
    ("flush_messages", 1.5, TypeError),
    ("flush_messages", True, TypeError),
    ("retention", -1, ValueError),
    ("retention", math.nan, ValueError),
    ("retention", "48h", TypeError),
    ("retention_bytes", -1, ValueError),
    ("retention_bytes", 1.0, TypeError),
    ("max_bytes", 0, ValueError),
    ("max_bytes", "1M", TypeError),
    ("max_message_bytes", 0, ValueError),
    ("max_message_bytes", 2**30 + 1, ValueError),
    ("max_message_bytes", None, TypeError),
    ("segment_bytes", 100_000, ValueError),
    ("segment_bytes", 2**15, ValueError),
    ("segment_bytes", 2**31, ValueError),
    ("segment_bytes", 65536.0, TypeError),
    ("codec", "yaml", ValueError),
    ("codec", 1, TypeError),
    ("replica", "", ValueError),
    ("replica", "a\0b", ValueError),
    ("replica", "a\udcff.wq", ValueError),
    ("replica", ["ssh", "a\udcff.wq"], ValueError),
    ("replica", True, TypeError),
    ("replica", [], ValueError),
    ("replica", ["ssh", 1], ValueError),
    ("replica", [""], ValueError),
    ("replica", 1, TypeError),
    ("sync_replica", 1, TypeError),
    ("replica_timeout", 0, ValueError),
    ("replica_timeout", math.inf, ValueError),
    ("readonly", "yes", TypeError),
    ("consumer", "", ValueError),
    ("consumer", 1, TypeError),
]

BAD_QUEUE: list[tuple[str, Any, type[Exception]]] = [
    ("topic", "", ValueError),
    ("topic", "x" * 256, ValueError),
    ("topic", "a\0", ValueError),
    ("topic", "\ud800", ValueError),
    ("topic", None, TypeError),
    ("topic", b"t", TypeError),
    ("group", "", ValueError),
    ("maxsize", 1.5, TypeError),
    ("maxsize", None, TypeError),
    ("maxsize", True, TypeError),
    ("visibility_timeout", 0, ValueError),
    ("visibility_timeout", -1, ValueError),
    ("visibility_timeout", math.inf, ValueError),
    ("visibility_timeout", "60", TypeError),
    ("retry", 3, TypeError),
    ("retry", None, TypeError),
    ("on_dead", 1, TypeError),
    ("start", "middle", ValueError),
    ("start", -1, ValueError),
    ("start", None, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_STORE)
def test_a_bad_argument_of_a_store_is_refused_by_name(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        store_options({name: value})


@pytest.mark.parametrize("kind", ["Queue", "AsyncQueue"])
def test_a_name_that_is_no_option_is_refused_for_who_was_given_it(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{kind}\(\) got an unexpected .* 'maxsiz'"):
        getattr(weclaw, kind)(tmp_path / "q.wq", maxsiz=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value", "error"), BAD_QUEUE)
def test_a_bad_argument_of_a_queue_is_refused_by_name(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        queue_options({name: value})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="'flsh'"):
        store_options({"flsh": "sync"})


def test_values_are_brought_to_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_options({"replica": Path("copy.wq")}).replica == str(tmp_path / "copy.wq")
    assert store_options({"replica": ["ssh", "host"]}).replica == ("ssh", "host")
    assert store_options({"replica": False}).replica is False
    assert store_options({"retention": math.inf}).retention is None
    assert store_options({"retention": None}).retention is None
    assert queue_options({"maxsize": -1}).maxsize == 0
    assert queue_options({"visibility_timeout": None}).visibility_timeout is None


def test_only_arguments_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    first = store_options({"retention": 5, "max_bytes": 100, "flush": "sync"})
    assert first.conflicts(store_options({"retention": 6, "flush": "os"})) == ["retention"]
    assert first.conflicts(store_options({"retention": 5.0, "codec": "json"})) == []
    monkeypatch.setenv("WECLAW_RETENTION", "7")
    assert first.conflicts(store_options({})) == []


def test_options_survive_pickling() -> None:
    store = store_options({"retention": 5})
    queue = queue_options({"retry": RetryPolicy(jitter=0.5)})
    assert pickle.loads(pickle.dumps((store, queue))) == (store, queue)
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET
    assert repr(UNSET) == "UNSET"


def test_waits_grow_5_10_20_and_are_capped() -> None:
    policy = RetryPolicy()
    assert [policy.delay(n) for n in range(1, 7)] == [5, 10, 20, 40, 60, 60]
    assert policy.delay(100_000) == 60
    assert RetryPolicy(backoff=0).delay(100_000) == 0
    assert RetryPolicy(backoff=100, max_backoff=30).delay(1) == 30
    assert RetryPolicy(backoff=100).delay(1) == 60
    assert RetryPolicy(max_backoff=2).delay(1) == 2


@pytest.mark.parametrize(
    ("suffix", "text", "waits"), [("RETRY_BACKOFF_MAX", "2s", 2), ("RETRY_BACKOFF", "2m", 60)]
)
def test_the_longest_wait_holds_for_the_first_one_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, suffix: str, text: str, waits: int
) -> None:
    """Either variable makes sense without the other."""
    monkeypatch.setenv(f"WECLAW_{suffix}", text)
    assert queue_options({}).retry.delay(1) == waits


@given(st.integers(1, 50), st.floats(0, 1))
def test_jitter_lengthens_or_shortens_by_its_share_at_most(number: int, jitter: float) -> None:
    plain = RetryPolicy().delay(number)
    wait = RetryPolicy(jitter=jitter).delay(number)
    assert plain * (1 - jitter) - 1e-9 <= wait <= plain * (1 + jitter) + 1e-9


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_retries", -1, ValueError),
        ("max_retries", 1.5, TypeError),
        ("max_retries", None, TypeError),
        ("backoff", -1, ValueError),
        ("backoff", "5s", TypeError),
        ("multiplier", 0.5, ValueError),
        ("multiplier", math.nan, ValueError),
        ("max_backoff", math.inf, ValueError),
        ("jitter", 1.5, ValueError),
        ("jitter", -0.1, ValueError),
        ("max_crashes", -1, ValueError),
    ],
)
def test_a_policy_without_sense_is_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        RetryPolicy(**{name: value})


def test_a_policy_is_frozen_and_comparable() -> None:
    assert RetryPolicy(backoff=5) == RetryPolicy(backoff=5.0)
    with pytest.raises(AttributeError):
        RetryPolicy().backoff = 1.0  # type: ignore[misc]


def test_checks_of_single_values() -> None:
    assert check_seconds("delay", 0) == 0.0
    assert check_timeout("timeout", None) is None
    assert check_timeout("timeout", math.inf) is None
    assert check_timeout("timeout", 1e300) is None
    assert check_timeout("timeout", 0) == 0.0
    assert check_count("priority", 9, 0, 9) == 9
    assert check_name("topic", "任务") == "任务"
    for value in (-1, math.nan, math.inf, 10**400):
        with pytest.raises(ValueError, match="delay"):
            check_seconds("delay", value)
    for value in (-1, 0):
        with pytest.raises(ValueError, match="lease must be more than 0 and at most"):
            check_seconds("lease", value, positive=True)
    with pytest.raises(ValueError, match="timeout"):
        check_timeout("timeout", -0.1)
    with pytest.raises(ValueError, match="priority must be 0 to 9"):
        check_count("priority", 10, 0, 9)
    with pytest.raises(TypeError, match="delay"):
        check_seconds("delay", True)

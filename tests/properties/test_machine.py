"""A model and a real queue do the same at random; after every step they must agree.

The real one is used by two processes. Crashes are real (SIGKILL), reopenings too, with the scratch
folder as it is, deleted, or full of random bytes.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.properties import actor
from tests.properties.model import MAX_RETRIES, Item, State, Topic

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.properties.actor"])

ACTORS = st.integers(0, 1)
KEYS = st.sampled_from((None, None, "red", "blue"))
PRIORITIES = st.sampled_from((0, 0, 0, 1, 5, 9))
IDS = st.sampled_from((None, None, None, "alpha", "beta", "gamma"))
TOPICS = st.sampled_from(("default", "default", "default", "second"))
HEADERS = st.sampled_from((None, None, {"h": 1}))
SIZES = st.sampled_from((0, 0, 10, 1000, 30_000))
DELAYS = st.sampled_from((0, 0, 0, 0, 3600))
SETTLINGS = st.sampled_from(
    ("ack", "ack", "ack", "nack", "nack", "wait", "defer", "fail", "release")
)
OPTIONS = st.fixed_dictionaries(
    {"key": KEYS, "priority": PRIORITIES, "id": IDS, "headers": HEADERS, "delay": DELAYS}
)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="weclaw-machine-"))
        self.path = self.directory / "tasks.wq"
        self.options: dict[str, Any] = {}
        self.actors: list[Any] = [None, None]
        self.owners = [0, 1]
        self.topics: dict[str, Topic] = {}
        self.bodies = 0

    # The two sides.

    def tell(self, who: int, *command: Any) -> Any:
        if self.actors[who] is None:
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=actor.act, args=(theirs, str(self.path), self.options), daemon=True
            )
            process.start()
            theirs.close()
            self.actors[who] = (process, mine)
            self.owners[who] = max(self.owners) + 1
        _, pipe = self.actors[who]
        pipe.send(command)
        assert pipe.poll(30), f"{command[0]} hangs"
        fine, answer = pipe.recv()
        assert fine, f"{command}: {answer}"
        return answer

    def end(self, who: int, *, crash: bool) -> None:
        if self.actors[who] is None:
            return
        if not crash:
            self.tell(who, "close")
        process, pipe = self.actors[who]
        if crash:
            process.kill()
        process.join()
        pipe.close()
        self.actors[who] = None
        for topic in self.topics.values():
            topic.end_of_owner(self.owners[who], crash=crash)

    def teardown(self) -> None:
        for who in (0, 1):
            if self.actors[who] is not None:
                process, pipe = self.actors[who]
                process.kill()
                process.join()
                pipe.close()
        shutil.rmtree(self.directory)

    def body(self, size: int) -> dict[str, Any]:
        self.bodies += 1
        return {"n": self.bodies, "pad": bytes(size)}

    def any(self, *kinds: str) -> bool:
        return any(
            state.what in kinds
            for topic in self.topics.values()
            for item in topic.items
            for state in item.groups.values()
        )

    def group_of(self, topic: str, choice: int) -> str:
        names = list(self.topics[topic].groups)
        return names[choice % len(names)]

    def held(self, who: int, topic: str, group: str) -> list[tuple[Item, State]]:
        return [
            (item, state)
            for item, state in self.topics[topic].of(group)
            if state.what == "leased" and state.owner == self.owners[who]
        ]

    def busy(self, who: int) -> bool:
        """Whether the process has a message in hand that was in a crash: it gets no second."""
        return any(
            state.cc and state.what == "leased" and state.owner == self.owners[who]
            for topic in self.topics.values()
            for item in topic.items
            for state in item.groups.values()
        )

    @initialize(
        flush=st.sampled_from(("sync", "batch", "os")),
        segment_bytes=st.sampled_from((65536, 2**20)),
    )
    def begin(self, flush: str, segment_bytes: int) -> None:
        self.options = {"flush": flush, "segment_bytes": segment_bytes, "retention": 10**6}
        for name in actor.TOPICS:
            self.topics[name] = Topic()
            self.topics[name].add_group("default", "earliest")
            self.tell(0, "add_group", name, "default", "earliest")

    # Putting.

    def _putting(self, topic: str, options: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in options.items() if v}
        model = self.topics[topic]
        task = given.get("id")
        if task is not None and model.kept(task) is not None:
            states = [s.what for s in model.kept(task).groups.values()]  # type: ignore[union-attr]
            if "gone" in states:  # Purged in one group only: whether it is free is not said.
                del given["id"]
        elif task is not None and model.latest:
            del given["id"]  # Nor what a group that began later has to say in this.
        return given

    def _put_in_model(self, topic: str, task: str, body: Any, given: dict[str, Any]) -> None:
        model = self.topics[topic]
        if "id" in given:
            assert task == given["id"]
            if model.kept(task) is not None:
                return
        else:
            assert all(task != item.id for item in model.items), "an id was given twice"
        model.put(task, body, given)

    @rule(who=ACTORS, topic=TOPICS, options=OPTIONS, size=SIZES)
    def put(self, who: int, topic: str, options: dict[str, Any], size: int) -> None:
        given = self._putting(topic, options)
        body = self.body(size)
        self._put_in_model(topic, self.tell(who, "put", topic, body, given), body, given)

    @rule(who=ACTORS, topic=TOPICS, many=st.lists(OPTIONS, max_size=5), size=SIZES)
    def put_many(self, who: int, topic: str, many: list[dict[str, Any]], size: int) -> None:
        puts = [(self.body(size), self._putting(topic, options)) for options in many]
        ids = self.tell(who, "put_many", topic, puts)
        assert len(ids) == len(puts)
        for task, (body, given) in zip(ids, puts, strict=True):
            self._put_in_model(topic, task, body, given)

    # Getting and settling.

    @precondition(lambda self: self.any("ready"))
    @rule(who=ACTORS, topic=TOPICS, choice=st.integers(0, 3), n=st.sampled_from((1, 1, 1, 2, 5)))
    def get(self, who: int, topic: str, choice: int, n: int) -> None:
        group = self.group_of(topic, choice)
        model = self.topics[topic]
        got = self.tell(who, "get", topic, group, n)
        note(f"got {[(m['id'], m['dc']) for m in got]}")
        for msg in got:
            busy = self.busy(who)
            picks = model.picks(group, busy)
            item = next((i for i in picks if i.id == msg["id"]), None)
            assert item is not None, f"{msg} came, expected one of {[i.id for i in picks]}"
            state = item.groups[group]
            assert msg["body"] == item.body
            assert (msg["key"], msg["priority"]) == (item.key, item.priority)
            assert msg["headers"] == item.headers
            state.dc += 1
            assert (msg["dc"], msg["rc"], msg["cc"]) == (state.dc, state.rc, state.cc)
            assert item.offset in (None, msg["offset"])
            item.offset = msg["offset"]
            state.what, state.owner = "leased", self.owners[who]
        if len(got) < n:
            busy = self.busy(who)
            left = model.candidates(group, busy)
            assert left == [], f"{[i.id for i in left]} could have come"

    def _choose(self, who: int, topic: str, group: str, choice: int) -> tuple[Item, State] | None:
        held = self.held(who, topic, group)
        return held[choice % len(held)] if held else None

    @precondition(lambda self: self.any("leased"))
    @rule(
        who=ACTORS,
        topic=TOPICS,
        group=st.integers(0, 3),
        choice=st.integers(0, 9),
        how=st.sampled_from(
            ("ack", "ack", "ack", "nack", "nack", "wait", "defer", "fail", "release")
        ),
    )
    def settle(self, who: int, topic: str, group: int, choice: int, how: str) -> None:
        name = self.group_of(topic, group)
        chosen = self._choose(who, topic, name, choice)
        if chosen is None:
            return
        item, state = chosen
        if how == "ack":
            result = ["result", item.body["n"], state.dc]
            self.tell(who, "settle", "ack", topic, name, item.id, result)
            state.ack(result)
        elif how in ("nack", "wait", "defer"):
            backoff = 0 if how == "nack" else 3600
            count = how != "defer"
            reason = f"reason {item.body['n']} {state.dc}"
            self.tell(who, "settle", "nack", topic, name, item.id, backoff, reason, count)
            state.what = "ready" if how == "nack" else "waiting"
            if count:
                state.rc += 1
                if state.rc > MAX_RETRIES:
                    state.what, state.reason = "dead", reason
        elif how == "fail":
            state.reason = f"failed {item.body['n']}"
            self.tell(who, "settle", "fail", topic, name, item.id, state.reason)
            state.what = "dead"
        else:
            self.tell(who, "settle", "release", topic, name, item.id)
            state.what = "ready"
        state.owner = None

    @rule(
        who=ACTORS,
        topic=TOPICS,
        group=st.integers(0, 3),
        n=st.integers(0, 3),
        puts=st.lists(st.tuples(TOPICS, OPTIONS), max_size=3),
        commit=st.sampled_from((True, True, True, False)),
    )
    def transaction(
        self, who: int, topic: str, group: int, n: int, puts: list[Any], commit: bool
    ) -> None:
        name = self.group_of(topic, group)
        held = self.held(who, topic, name)[:n]
        acks = [(item.id, ["tx", item.body["n"]]) for item, _ in held]
        # The library makes the ids of a transaction's puts; here they are given, to know them.
        made = []
        for to, options in puts:
            body = self.body(20)
            made.append((to, body, {**self._putting(to, options), "id": f"tx {body['n']}"}))
        self.tell(who, "transaction", topic, name, acks, made, commit)
        if commit:
            for (_, result), (_, state) in zip(acks, held, strict=True):
                state.ack(result)
                state.owner = None
            for to, body, given in made:
                self._put_in_model(to, given["id"], body, given)

    # The rest of what a user does.

    @precondition(lambda self: self.any("ready", "waiting", "done"))
    @rule(who=ACTORS, topic=TOPICS, choice=st.integers(0, 50))
    def cancel(self, who: int, topic: str, choice: int) -> None:
        items = self.topics[topic].items
        if not items:
            assert self.tell(who, "cancel", topic, "no such id") is False
            return
        item = items[choice % len(items)]
        if self.topics[topic].kept(item.id) not in (item, None):
            return
        if self.topics[topic].latest and not item.cancelled:
            return
        states = item.groups.values()
        if not item.cancelled and any(s.what == "dead" for s in states):
            return  # What a dead letter is to `cancel` is not said.
        left = [s.what for s in states if s.what != "gone"]
        wanted = not item.cancelled and all(what in ("ready", "waiting") for what in left)
        if states and not left:
            wanted = False  # it is gone already
        assert self.tell(who, "cancel", topic, item.id) is wanted
        if wanted:
            item.cancelled = True

    @precondition(lambda self: self.any("dead"))
    @rule(
        who=ACTORS,
        topic=TOPICS,
        group=st.integers(0, 3),
        how=st.sampled_from(("all", "limit", "one")),
        choice=st.integers(0, 9),
    )
    def redrive(self, who: int, topic: str, group: int, how: str, choice: int) -> None:
        name = self.group_of(topic, group)
        model = self.topics[topic]
        dead = [(i, s) for i, s in model.of(name) if s.what == "dead"]
        if how == "one":
            dead = dead[choice % len(dead) :][:1] if dead else []
            ids = [i.id for i, _ in dead]
            assert self.tell(who, "redrive", topic, name, ids, None) == len(dead)
        elif how == "limit" and len(dead) > 1:
            # Which letters a limit chooses is told by the letters that are left.
            assert self.tell(who, "redrive", topic, name, None, 1) == 1
            left = self.tell(who, "look", topic, name, [])["letters"]
            dead = [(i, s) for i, s in dead if i.id not in left]
            assert len(dead) == 1
        else:
            assert self.tell(who, "redrive", topic, name, None, None) == len(dead)
            if len(dead) > 1:
                # In which order they stand at the end is not said: it is as they come.
                self._order_of_redriven(who, topic, name, dead)
                return
        for _, state in dead:
            self._redriven(state, model.next())

    def _redriven(self, state: State, order: int) -> None:
        state.what, state.rc, state.cc, state.order = "ready", 0, 0, order
        state.redrives += 1

    def _order_of_redriven(self, who: int, topic: str, name: str, dead: list[Any]) -> None:
        model = self.topics[topic]
        peek = self.tell(who, "look", topic, name, [])["peek"]
        place = {task: n for n, task in enumerate(peek)}
        by_key = sorted(dead, key=lambda x: (place.get(x[0].id, len(peek)), x[0].number))
        for _, state in by_key:
            self._redriven(state, model.next())

    @precondition(lambda self: self.any("dead"))
    @rule(who=ACTORS, topic=TOPICS, group=st.integers(0, 3))
    def purge_letters(self, who: int, topic: str, group: int) -> None:
        name = self.group_of(topic, group)
        model = self.topics[topic]
        dead = [(i, s) for i, s in model.of(name) if s.what == "dead"][:1]
        assert self.tell(who, "purge_letters", topic, name, [i.id for i, _ in dead]) == len(dead)
        for _, state in dead:
            state.what = "gone"
            model.purged = True

    @precondition(lambda self: self.any("ready", "waiting"))
    @rule(who=ACTORS, topic=TOPICS, group=st.integers(0, 3), really=st.integers(0, 3))
    def purge(self, who: int, topic: str, group: int, really: int) -> None:
        if really:
            return
        name = self.group_of(topic, group)
        model = self.topics[topic]
        self.tell(who, "purge", topic, name)
        for _, state in model.of(name):
            if state.what in ("ready", "waiting"):
                state.what = "gone"
                model.purged = True

    @rule(who=ACTORS, topic=TOPICS, group=st.integers(0, 3), on=st.booleans())
    def pause(self, who: int, topic: str, group: int, on: bool) -> None:
        name = self.group_of(topic, group)
        self.tell(who, "pause", topic, name, on)
        self.topics[topic].groups[name] = on

    @precondition(lambda self: self.any("done"))
    @rule(
        who=ACTORS,
        topic=TOPICS,
        group=st.integers(0, 3),
        how=st.sampled_from(("ids", "offset", "earliest")),
        choice=st.integers(0, 50),
    )
    def replay(self, who: int, topic: str, group: int, how: str, choice: int) -> None:
        name = self.group_of(topic, group)
        model = self.topics[topic]
        if name in model.latest:
            return  # Whether what lay before its beginning can be replayed is not said.
        done = [(i, s) for i, s in model.of(name) if s.what == "done"]
        if how == "ids":
            done = done[choice % len(done) :][:2] if done else []
            given: dict[str, Any] = {"ids": [i.id for i, _ in done]}
        elif how == "offset":
            if not done:
                return
            first = done[choice % len(done)][0]
            given = {"offset": first.offset}
            done = [(i, s) for i, s in done if i.number >= first.number]
        else:
            given = {"offset": "earliest"}
        assert self.tell(who, "replay", topic, name, given) == len(done)
        for item, state in done:
            state.what, state.rc, state.cc = "ready", 0, 0
            state.order, state.result = item.number, None

    @precondition(lambda self: len(self.topics["default"].groups) < 3)
    @rule(who=ACTORS, start=st.sampled_from(("earliest", "latest")))
    def add_group(self, who: int, start: str) -> None:
        model = self.topics["default"]
        if model.purged or any(s.what == "waiting" for i in model.items for s in i.groups.values()):
            return  # What a new group gets of the purged, and when of the delayed, is not said.
        name = f"group {len(model.groups)}"
        self.tell(who, "add_group", "default", name, start)
        model.add_group(name, start)

    # Ends.

    @rule(who=ACTORS)
    def crash(self, who: int) -> None:
        self.end(who, crash=True)

    @rule(who=ACTORS)
    def reopen(self, who: int) -> None:
        self.end(who, crash=False)

    @rule(
        crash=st.tuples(st.booleans(), st.booleans()),
        scratch=st.sampled_from(("as is", "deleted", "random bytes", "other inode")),
        seed=st.integers(0, 1000),
    )
    def all_end(self, crash: tuple[bool, bool], scratch: str, seed: int) -> None:
        for who in (0, 1):
            self.end(who, crash=crash[who])
        folder = Path(f"{self.path}.d")
        if scratch == "deleted":
            shutil.rmtree(folder)
        elif scratch == "random bytes":
            rng = random.Random(seed)
            for file in folder.rglob("*"):
                if file.is_file():
                    file.write_bytes(rng.randbytes(min(file.stat().st_size, 100_000)))
        elif scratch == "other inode":
            shutil.copy(self.path, self.directory / "copy")
            (self.directory / "copy").replace(self.path)

    @rule(who=ACTORS)
    def verify(self, who: int) -> None:
        assert self.tell(who, "verify") == []

    # They agree.

    @invariant()
    def agree(self) -> None:
        for name, topic in self.topics.items():
            ids = list({item.id: None for item in topic.items})
            for group in topic.groups:
                who = (self.bodies + len(group)) % 2
                real = self.tell(who, "look", name, group, [*ids, "no such id"])
                self._compare(name, topic, group, ids, real)

    def _compare(self, name: str, topic: Topic, group: str, ids: list[str], real: Any) -> None:
        assert real["damaged"] == 0
        statuses = {"no such id": "unknown"}
        results: dict[str, Any] = {"no such id": ("unknown",)}
        for task in ids:
            item = topic.kept(task)
            newest = next(i for i in reversed(topic.items) if i.id == task)
            if not newest.cancelled and group not in newest.groups:
                # Before the beginning of a "latest" group: what it says of these is not said.
                del real["statuses"][task], real["results"][task]
                continue
            status = "unknown" if item is None else topic.status(group, item)
            statuses[task] = status
            if status == "done":
                results[task] = ("result", item.groups[group].result)  # type: ignore[union-attr]
            elif status == "dead":
                results[task] = ("dead", task)
            else:
                results[task] = ("unknown",) if status == "unknown" else ("empty",)
        where = f"{name}/{group}"
        assert real["statuses"] == statuses, _differ(where, real["statuses"], statuses)
        assert real["results"] == results, _differ(where, real["results"], results)
        counts = topic.counts(group)
        assert real["stats"] == counts, f"{where}: stats {real['stats']}, expected {counts}"
        assert real["qsize"] == counts[0] + counts[1]
        letters = {
            i.id: (i.body, s.reason, s.redrives, i.key, i.headers)
            for i, s in topic.of(group)
            if s.what == "dead"
        }
        assert real["letters"] == letters, _differ(where, real["letters"], letters)
        assert real["letter count"] == len(letters)
        assert (name, group) in real["groups"]
        for item, state in topic.of(group):
            if state.open and item.offset is not None:
                assert item.offset >= real["offset"], f"{item.id} is open before q.offset"
        ready = {i.id for i in topic.items if topic.status(group, i) == "ready"}
        open_ = {i.id for i, s in topic.of(group) if s.what in ("ready", "waiting")}
        assert ready <= set(real["peek"]) <= open_
        assert len(real["peek"]) == len(set(real["peek"]))


def _differ(where: str, real: dict[str, Any], expected: dict[str, Any]) -> str:
    found = [
        f"{key}: {real.get(key)}, expected {expected.get(key)}"
        for key in {**real, **expected}
        if real.get(key) != expected.get(key)
    ]
    return f"{where}: " + "; ".join(found)


COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}


def test_model_and_queue_agree():
    """Whatever is done, by two processes with crashes and reopenings, model and queue agree."""
    # No shrinking here: each example makes processes. The long one below shrinks.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(max_examples=8, stateful_step_count=40, phases=phases, **COMMON),
    )


@pytest.mark.slow
def test_model_and_queue_agree_for_long():
    """The same for many more and longer histories."""
    run_state_machine_as_test(
        QueueMachine, settings=settings(max_examples=300, stateful_step_count=120, **COMMON)
    )

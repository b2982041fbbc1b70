"""Imports point one way, each outside world has one door, and every module says what it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import weclaw_embedded

PACKAGE = Path(weclaw_embedded.__file__).resolve().parent
README = PACKAGE.parent.parent / "README.md"

#: Bottom up. A module imports only from those above it in this list; those of one line are of one
#: height and do not know each other, except where EXCEPTIONS says so.
LAYERS = [
    ["errors", "_version"],
    ["_clock", "_locks", "_format", "_stream", "_values", "_jsonable", "_reclaim_rule"],
    ["_files"],
    ["_disk", "_watch", "_names", "_lost_header"],
    ["_codecs", "_record_types"],
    ["_record_put"],
    ["_checks", "_records"],
    ["_options"],
    ["_segments"],
    ["_slots"],
    ["_scan", "_layout"],
    ["_lost_slot"],
    ["_finding"],
    ["_reading", "_lost_end"],
    ["_log_end"],
    ["_recovery"],
    ["_appending"],
    ["wal"],
    ["_index_rows", "_index_topics"],
    ["_index_state"],
    ["_index_queues"],
    ["_index_moves"],
    ["_index_change"],
    ["_index_notes"],
    ["_index_keep", "_index_ask"],
    ["_index_fold", "_index_forget"],
    ["_index_many"],
    ["_index"],
    ["_wake", "_shared"],
    ["_rebuild", "_scratch"],
    ["_paths"],
    ["_opening"],
    ["_copy"],
    ["_channel"],
    ["_feeder", "_receiver"],
    ["_session"],
    ["_part"],
    ["_upkeep"],
    ["_folding", "_damage", "_together", "_durability", "_file_options"],
    ["_waiting", "_holding", "_with_replica"],
    ["_engine"],
    ["_registry", "_readonly", "_delivery", "_rounds"],
    ["_replication"],
    ["_replicated"],
    ["_settling", "_taking", "_handed_out"],
    ["_putting"],
    ["_queries", "_reclaim", "_mend", "_order", "_pending"],
    ["_healing"],
    ["_restore"],
    ["_message"],
    ["dlq", "_survey"],
    ["_handle"],
    ["_asking", "_transaction", "_encoding"],
    ["queue"],
    ["_store"],
    ["replica"],
    ["_io_calls"],
    ["_io_turns"],
    ["_pool", "_io"],
    ["_async", "_dropin"],
    ["_async_queue"],
    ["aio", "threads", "worker"],
    ["client"],
    ["__init__"],
]

#: Imports against the direction, all of them inside a function or for type checkers only, and why.
EXCEPTIONS = {
    ("_upkeep", "_reclaim"): "upkeep runs by itself on the engine's timer",
    ("_durability", "_readonly"): "a file that was deleted in use is only looked at",
    ("_engine", "_replicated"): "turns in a file with a replica are of another kind",
    ("_with_replica", "_replicated"): "what the replica is promised is waited for there",
    ("_damage", "_healing"): "what is damaged is healed where it is noticed",
    ("queue", "_store"): "Queue(path) opens the store it belongs to",
}

#: The door to the operating system's files.
DOOR = {"_files", "_locks", "_names"}

#: What looks at the operating system's files beside it, and why. Calls are of `os`, `shutil`,
#: `tempfile`, `mmap`, `fcntl` and the builtin `open`; looking at names (os.stat, os.listdir,
#: os.fstat) is no change and free to all.
DOORS = {
    "_clock": {"open": "the boot's id is a file of the kernel's"},
    "_disk": {"open": "the mounts and the disk's number are files of the kernel's"},
    "_index": {
        "os.open": "a descriptor of LMDB's own file, to keep room behind its last page",
        "os.close": "the same",
    },
    "_shared": {
        "os.open": "the page is made where it is, so that a full disk can be opened",
        "mmap.mmap": "words shared by processes are memory, not a file",
    },
    "_scratch": {
        "os.mkdir": "the scratch folder",
        "open": "the mark of a clean close is read",
        "os.open": "the mark of a clean close",
    },
    "_readonly": {
        "os.access": "whether the page may be read",
        "tempfile.mkdtemp": "the index of a looker, in a folder of its own",
    },
    "_copy": {
        "os.open": "a copy that is made anew, beside its place",
    },
    "_channel": {
        "os.open": "what the receiver says on standard error is kept",
        "os.close": "the same",
        "open": "the replica's address, noted beside the file",
        "os.read": "pipes to the receiver",
        "os.set_blocking": "pipes to the receiver",
        "os.memfd_create": "what a receiver says that is only asked something",
        "os.pread": "and reading it again",
        "os.killpg": "the receiver, and what it has started itself",
        "os.waitid": "the receiver",
    },
    "_receiver": {
        "os.read": "standard streams",
        "os.write": "standard streams",
    },
    "_replication": {
        "os.close": "the feeder's pipe",
    },
    "_restore": {
        "os.rename": "a damaged file is moved aside",
    },
    "replica": {
        "os.dup": "standard streams",
        "os.dup2": "standard streams",
        "os.fdopen": "standard streams",
    },
    "_wake": {
        "os.open": "pipes",
        "os.close": "pipes",
        "os.read": "pipes",
        "os.unlink": "pipes",
    },
    "dlq": {"open": "export writes text to the descriptor that _files gave"},
}
LOOKS = {"os.stat", "os.fstat", "os.listdir", "os.lstat", "os.getpid", "os.fspath", "os.fsdecode"}
FREE = {"os.fsencode", "os.major", "os.minor", "os.register_at_fork", "os.urandom", "os.cpu_count"}


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py"))


def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{name}.py").read_text("utf-8"))


def type_checking(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`, which is never run."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.update(inner for part in node.body for inner in ast.walk(part))
    return found


def imports(name: str) -> list[tuple[str, bool]]:
    """(module of the package, whether at the top of the file) of everything imported when run."""
    found = []
    parsed = tree(name)
    unused = type_checking(parsed)
    known = set(modules())
    at_top = set(ast.iter_child_nodes(parsed))
    for node in ast.walk(parsed):
        if not isinstance(node, ast.ImportFrom) or node in unused:
            continue
        inside = node.level == 1 or (node.module or "").startswith("weclaw_embedded")
        if not inside:
            continue
        target = (node.module or "").removeprefix("weclaw_embedded").lstrip(".").split(".")[0]
        names = [target] if target else [alias.name for alias in node.names]
        found += [(one if one in known else "__init__", node in at_top) for one in names]
    return found


def height(name: str) -> int:
    return next(n for n, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_its_place() -> None:
    """The list of layers names each module of the package once."""
    assert sorted(name for layer in LAYERS for name in layer) == modules()


@pytest.mark.parametrize("name", modules())
def test_imports_point_one_way(name: str) -> None:
    """A module imports only from those below it; the exceptions are reasoned and not at the top."""
    for target, at_top in imports(name):
        if (name, target) in EXCEPTIONS:
            assert not at_top, f"{name} imports {target} at its top"
        else:
            assert height(target) < height(name), f"{name} imports {target}"


def test_every_exception_is_still_one() -> None:
    """What is no longer imported against the direction is no longer excused."""
    for name, target in EXCEPTIONS:
        assert any(one == target for one, _ in imports(name)), f"{name} no longer imports {target}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    """Its docstring begins with a sentence."""
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if path.name == "_version.py":
        return
    assert said, path
    assert len(said.split("\n\n")[0]) > 20, said


def test_only_the_index_knows_lmdb() -> None:
    """LMDB is imported by the files of the index and by nothing else."""
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^\s*(import|from) lmdb\b", path.read_text("utf-8"), re.MULTILINE):
            assert path.stem.startswith("_index"), path


def test_only_the_door_to_time_reads_the_clocks_that_are_written_down() -> None:
    """Wall clock and boot time come from `_clock`; time.monotonic is for waiting only."""
    for name in set(modules()) - {"_clock"}:
        text = (PACKAGE / f"{name}.py").read_text("utf-8")
        wall = re.findall(r"\btime\.(?:time|time_ns|clock_gettime\w*)\(", text)
        # `_names` asks how old a leftover of a killed creator is.
        assert len(wall) <= (1 if name == "_names" else 0), f"{name}: {wall}"


@pytest.mark.parametrize("name", [name for name in modules() if name not in DOOR])
def test_files_are_changed_through_one_door(name: str) -> None:
    """Nothing but the door opens, changes or syncs files, except what is reasoned above."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            first, _, second = called.partition(".")
            of_files = first in ("os", "shutil", "tempfile", "fcntl") and "." not in second
            if of_files or called == "mmap.mmap" or (called == "open" and name != "_store"):
                found.add(called)
    found -= LOOKS | FREE
    allowed = set(DOORS.get(name, {}))
    assert found <= allowed, f"{name} goes past the door: {sorted(found - allowed)}"
    assert allowed <= found, f"{name} no longer needs: {sorted(allowed - found)}"


def test_all_is_sorted_and_is_what_is_public() -> None:
    """`__all__` of the package: each name once, in order, and every public name is in it."""
    names = weclaw_embedded.__all__
    assert names == sorted(set(names), key=names.index)
    assert names == sorted(names)
    # Modules are attributes of their package once they are imported.
    public = {
        name
        for name, value in vars(weclaw_embedded).items()
        if not name.startswith("_") and not isinstance(value, type(ast))
    }
    assert public == set(names) - {"__version__"}


@pytest.mark.parametrize("name", modules())
def test_all_of_a_module_holds(name: str) -> None:
    """Where a module has `__all__`, each of its names is there."""
    module = __import__(f"weclaw_embedded.{name}", fromlist=["_"]) if name != "__init__" else None
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.{public}"


def test_an_engine_that_only_looks_has_all_that_one_has_that_writes(tmp_path: Path) -> None:
    """What a part of the engine makes of its own is there whichever way the file was opened."""
    path = tmp_path / "q.wq"
    with weclaw_embedded.Queue(path) as q, weclaw_embedded.Queue(path, readonly=True) as looker:
        q.put("x")
        q.get(block=False).ack()
        writes, looks = vars(q._store._engine), vars(looker._store._engine)
        assert writes.keys() <= looks.keys()


def test_the_readmes_table_names_every_module() -> None:
    """Reading the source begins with a table that is complete."""
    section = README.read_text("utf-8").partition("## Reading the source")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    ranges = {"_index_rows": [n for n in modules() if n.startswith("_index_")]}
    for first, covered in ranges.items():
        if first in named:
            named.update(covered)
    missing = set(modules()) - named - {"__init__", "_version"}
    assert not missing, f"README names no {sorted(missing)}"


def test_the_design_names_every_thread() -> None:
    """Its table of threads has each name that a thread is given, and no other."""
    said = (README.parent / "docs" / "design.md").read_text("utf-8")
    table = said.partition("\n| thread |")[2].partition("\n\n")[0]
    told = {
        re.split(r"[-_]\d", name)[0] for name in re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)
    }
    given = {
        node.value.rstrip("-")
        for name in modules()
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Constant) and re.fullmatch(r"weclaw-[a-z-]+", str(node.value))
    }
    assert told == given - {"weclaw-replica"}  # a file, in memory, of what a receiver says

"""Runs the tests that ship with Python against our queues, by substitution.

A test module is loaded from its source with a namespace in the place of the module it tests: ours
for what we stand in for, the standard library's for all else. Each queue made gets a file of its
own, because the tests say `Queue()`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import types
import unittest
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

#: Where the queues of the present test are; set by the fixture `folder` of conftest.py.
folder: list[str] = []
_numbers = itertools.count()
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def without_path(cls: Any) -> Any:
    """The class, with a `path` of its own for each instance. Written, not synced: speed."""

    def __init__(self: Any, maxsize: float = 0) -> None:  # noqa: N807  it becomes one
        path = os.path.join(folder[-1], f"{next(_numbers)}.wq")
        cls.__init__(self, maxsize, path=path, flush="os")
        _made.add(self)

    return type(cls.__name__, (cls,), {"__init__": __init__})


def close_all() -> None:
    """Close the queues that the present test has made."""
    for queue in list(_made):
        queue.close()
    _made.clear()


class Namespace(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: types.ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def load(name: str, replaced: Mapping[str, types.ModuleType]) -> types.ModuleType:
    """The test module `name`, not as it is imported but with other modules in its `import`s."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        pytest.skip(f"this Python comes without {name}", allow_module_level=True)
    importlib.import_module(name.rpartition(".")[0])
    module = types.ModuleType(f"drop_in_{name.rpartition('.')[2]}")
    module.__file__ = spec.origin
    before = {key: sys.modules.get(key) for key in replaced}
    sys.modules.update(replaced)
    try:
        with open(spec.origin, encoding="utf-8") as source:
            exec(compile(source.read(), spec.origin, "exec"), module.__dict__)
    finally:
        for key, real in before.items():
            if real is not None:
                sys.modules[key] = real
    return module


def cases(module: types.ModuleType, excluded: Mapping[str, str]) -> dict[str, Any]:
    """The test cases of a module. `excluded`: "Class", "Class.test" or ".test" -> the reason."""
    found: dict[str, Any] = {}
    for name, cls in list(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, unittest.TestCase)):
            continue
        tests = unittest.defaultTestLoader.getTestCaseNames(cls)
        if not tests:
            continue
        if name in excluded:
            found[f"test_nothing_of_{name}"] = _skipped(excluded[name])
            continue
        for test in tests:
            for key in (f"{name}.{test}", f".{test}"):
                if key in excluded:
                    setattr(cls, test, unittest.skip(excluded[key])(getattr(cls, test)))
        found[name] = cls
    assert found, f"{module.__file__} holds no tests"
    return found


def _skipped(reason: str) -> Any:
    def test() -> None:
        pytest.skip(reason)

    return test

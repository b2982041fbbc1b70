"""CPython's tests of `queue.Queue` and its kin, run against `weclaw_embedded.threads`.

What is left out is listed in `EXCLUDED`, each with its reason.
"""

from __future__ import annotations

import queue
import types

from tests.drop_in.substitute import Namespace, cases, load, without_path

from weclaw_embedded import threads

NO_SIMPLE_QUEUE = "SimpleQueue is not among what we stand in for"
TWICE = "the C and the Python version are one and the same here"

EXCLUDED = {
    # Overrides `_put` and `_get`, hooks for subclasses that keep the items elsewhere.
    "PyFailingQueueTest": "replaces private methods of queue.Queue",
    "CFailingQueueTest": "replaces private methods of queue.Queue",
    "PySimpleQueueTest": NO_SIMPLE_QUEUE,
    "CSimpleQueueTest": NO_SIMPLE_QUEUE,
    "CQueueTest": TWICE,
    "CLifoQueueTest": TWICE,
    "CPriorityQueueTest": TWICE,
}

_ours = Namespace(
    queue,
    {
        "Queue": without_path(threads.Queue),
        "PriorityQueue": without_path(threads.PriorityQueue),
        "LifoQueue": without_path(threads.LifoQueue),
        "Empty": threads.Empty,
        "Full": threads.Full,
        "ShutDown": threads.ShutDown,
    },
)

_module: types.ModuleType = load("test.test_queue", {})
for _name in ("PyQueueTest", "PyLifoQueueTest", "PyPriorityQueueTest"):
    getattr(_module, _name).queue = _ours

globals().update(cases(_module, EXCLUDED))

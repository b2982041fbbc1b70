"""Works off what app.py has accepted; see there. Ctrl-C or SIGTERM stop it in an orderly way. It
needs nothing but weclaw_embedded.
"""

from __future__ import annotations

import logging
import os

from model import complete

import weclaw_embedded as weclaw

PATH = os.environ.get("TASKS", "tasks.wq")


def handle(msg: weclaw.Message) -> str:
    """What is returned is kept as the task's result; what is raised is tried again."""
    return complete(msg["prompt"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with weclaw.Queue(PATH) as q:
        weclaw.Worker(q, handle, concurrency=4).run()

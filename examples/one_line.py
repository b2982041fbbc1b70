"""A program that was written for `asyncio.Queue`, after one line was changed (and its import).

    python one_line.py "first prompt" "second prompt" …

Kill it in the middle and run it again, without arguments: it goes on with what was left. It needs
nothing but weclaw_embedded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from weclaw_embedded import aio

sys.path.insert(0, str(Path(__file__).parent / "service"))
from model import complete


async def work(queue: aio.Queue[str]) -> None:
    while True:
        prompt = await queue.get()
        answer = await asyncio.to_thread(complete, prompt)
        print(f"{prompt}: {answer}", flush=True)
        queue.task_done()


async def main(prompts: list[str]) -> None:
    queue: aio.Queue[str] = aio.Queue(path="one_line.wq")  # was: asyncio.Queue()
    for prompt in prompts:
        await queue.put(prompt)
    workers = [asyncio.create_task(work(queue)) for _ in range(3)]
    await queue.join()
    for worker in workers:
        worker.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

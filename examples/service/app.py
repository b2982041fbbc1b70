"""A service that answers at once and works later.

    POST /tasks {"prompt": "…"}   -> 202 {"id": …}, when the task is on disk
    GET  /tasks/{id}              -> 200 {"status": "done", "result": …}, or how far it is

Run `python app.py` here and `python worker.py` beside it, as many of them as you like. Kill any of
them at any moment: no task that was answered with 202 is lost. A client that got no answer sends
the same `Idempotency-Key` again, and the task is there once.

It needs the extra `examples` (starlette, uvicorn): in the repository, pip install '.[examples]'
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is missing: in the repository, pip install '.[examples]'")

import weclaw_embedded as weclaw

PATH = os.environ.get("TASKS", "tasks.wq")


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with weclaw.AsyncQueue(PATH) as q:
        app.state.tasks = q
        yield


def refused(why: str) -> JSONResponse:
    """The client's mistake, not ours. What it sent may hold what UTF-8 has no bytes for."""
    told = why.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": told}, status_code=400)


async def submit(request: Request) -> JSONResponse:
    try:
        task = await request.json()
        prompt = task["prompt"]
        if not isinstance(prompt, str):
            raise TypeError("the worker asks the model about a text")
    except (ValueError, KeyError, TypeError, RecursionError):
        return refused('send {"prompt": "…"}')
    try:
        task_id = await request.app.state.tasks.put(
            {"prompt": prompt}, id=request.headers.get("Idempotency-Key"), timeout=1.0
        )
    except weclaw.Full:
        return JSONResponse({"error": "busy"}, status_code=503, headers={"Retry-After": "5"})
    except (ValueError, weclaw.MessageTooLargeError) as error:
        # The id or the prompt can't be kept: too long, or half a character. Nothing was written.
        return refused(str(error))
    return JSONResponse({"id": task_id}, status_code=202, headers={"Location": f"/tasks/{task_id}"})


async def poll(request: Request) -> JSONResponse:
    q = request.app.state.tasks
    task_id = request.path_params["task_id"]
    # A client may wait here for up to half a minute: ?wait=30
    try:
        wait_s = float(request.query_params.get("wait", "0"))
    except ValueError:
        wait_s = math.nan
    if not wait_s >= 0:
        return refused("wait takes seconds, 0 or more")
    try:
        result = await q.result(task_id, timeout=min(30.0, wait_s))
        return JSONResponse({"status": "done", "result": result})
    except weclaw.Empty:
        return JSONResponse({"status": await q.status(task_id)}, status_code=202)
    except weclaw.DeadLetterError as error:
        return JSONResponse({"status": "dead", "reason": error.letter.reason}, status_code=500)
    except KeyError:
        return JSONResponse({"status": "unknown"}, status_code=404)
    except ValueError as error:  # no task can have this id
        return refused(str(error))


app = Starlette(
    routes=[
        Route("/tasks", submit, methods=["POST"]),
        Route("/tasks/{task_id}", poll),
    ],
    lifespan=lifespan,
)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")

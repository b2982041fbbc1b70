"""`jsonable`: the nearest that JSON has to any value, for exports and the command line.

Role: one rule for bodies, results and headers wherever they leave as JSON, so that a program that
reads one place reads all of them. It is for looking: nothing reads it back into a queue.

    bytes            {"base64": "…"}
    datetime         ISO 8601
    NaN, infinities  "nan" "inf" "-inf"
    tuple            list; a named tuple: object
    other keys       their JSON as text; bytes: base64
    anything else    its repr()
"""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from typing import Any

__all__ = ["dumps", "jsonable"]


def jsonable(value: Any) -> Any:
    """The value as JSON can write it. Never raises for what a queue can hold."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: jsonable(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {_key(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return repr(value)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON of any value, readable by people: letters stay letters."""
    return json.dumps(jsonable(value), ensure_ascii=False, indent=indent)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (bytes, bytearray)):
        return base64.b64encode(key).decode("ascii")
    return json.dumps(jsonable(key))

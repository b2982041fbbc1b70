"""Stands for the language model: slow, and worth not calling twice."""

from __future__ import annotations

import os
import time

SECONDS = float(os.environ.get("MODEL_SECONDS", "0.2"))


def complete(prompt: str) -> str:
    """An answer to the prompt."""
    time.sleep(SECONDS)
    log = os.environ.get("MODEL_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(prompt.replace("\n", " ") + "\n")
    words = prompt.split()
    return f"{len(words)} words, the longest is {max(words, key=len, default='none')!r}"

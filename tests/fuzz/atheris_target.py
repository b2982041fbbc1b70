"""Fuzzing for hours, by hand: needs `pip install atheris`, which is no part of the test setup.

    python tests/fuzz/atheris_target.py record corpus/ -max_total_time=3600

The first argument is one of the targets (header slot envelopes record stream value body file frames
said); the others are libFuzzer's. What crashes is kept by libFuzzer as crash-…; try it again with
that file as the only argument after the target. Bytes that found a defect become a test in
test_fuzz.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def main() -> None:
    names = ["header", "slot", "envelopes", "record", "stream", "value", "body"]
    names += ["file", "frames", "said"]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: {sys.argv[0]} {{{','.join(names)}}} [libFuzzer options]")
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    with atheris.instrument_imports(include=["weclaw_embedded"]):
        from tests.fuzz import targets
    target = getattr(targets, sys.argv.pop(1))

    def one(data: bytes) -> None:
        target(bytes(data))

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""A line on the terminal that says how far a batch has come."""

from __future__ import annotations

import sys
import time


class Progress:
    """Called with (requests that have ended, requests in all, tokens produced)."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._width = 0

    def __call__(self, done: int, total: int, tokens: int) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        filled = 20 * done // max(total, 1)
        bar = "#" * filled + "." * (20 - filled)
        line = f"[{bar}] {done}/{total} requests, {tokens} tokens, {tokens / seconds:.1f} tokens/s"
        self._width = max(self._width, len(line))
        print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._width:
            print(file=sys.stderr)

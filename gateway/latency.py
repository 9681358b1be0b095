"""This module measures what the gateway itself adds to a call, so that an operator sees it.

    request read ──► … ──► engine asked ──► engine answered ──► … ──► Step stored
    └───────── added ────┘                └───────── added ──────────────┘

Owns: the times of the last calls. Does not own: the engine's time (`Call`).
"""

from __future__ import annotations

from collections import deque

import numpy as np

REMEMBERED_CALLS = 4096


class AddedLatency:
    """Owned by the app's lifespan."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_CALLS)

    def note(self, seconds: float) -> None:
        """A call was answered; all its time but the engine's."""
        self._seconds.append(seconds)

    def statistics(self) -> dict[str, float | int | None]:
        """Of the last calls, in milliseconds."""
        n = len(self._seconds)
        p50, p99 = np.percentile(self._seconds, (50, 99)) * 1000 if n else (None, None)
        return {
            "calls": n,
            "p50_ms": None if p50 is None else round(float(p50), 3),
            "p99_ms": None if p99 is None else round(float(p99), 3),
        }

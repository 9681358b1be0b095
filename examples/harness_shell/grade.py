"""The score of a rollout: what the agent said last is the answer, or it is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def grade(folder: Path, transcript: list[dict[str, Any]], task: Mapping[str, Any]) -> float:
    """1.0 or 0.0; `transcript` has the calls of the rollout in order."""
    if not transcript:
        return 0.0
    said = transcript[-1]["messages"][-1].get("content") or ""
    return float(said.strip() == task["answer"])

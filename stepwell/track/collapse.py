"""This module notices a run whose score collapsed, and names the first suspect.

    scores of evaluations, or else rewards of training, oldest first
        └─ the last is less than half of the best ─► "fell from 0.35 to 0.00 after step 20; …"

Owns the rule and its words. Does not own where they are shown (`run/train.py`, `show/doctor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 5
"""Optimizer steps whose rewards make one score: a single batch says little."""
KEPT = 0.5
"""Share of the best score below which the last one is a collapse."""
NOISE = 0.05
"""Difference of scores between 0 and 1 that chance may make."""


def find_collapse(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the finding in one sentence; None where the score did not collapse.

    Args:
        records: Lines of metrics.jsonl in order, step 0 included.
    """
    named, scores = (
        "the evaluation score",
        [(int(r["step"]), score) for r in records if (score := _score(r)) is not None],
    )
    if len(scores) < 2:
        named, scores = "the training reward", _rewards(records)
    if len(scores) < 2:
        return None
    step, best = max(scores, key=lambda score: score[1])
    last = scores[-1][1]
    if best <= 0 or last >= KEPT * best or best - last < NOISE:
        return None
    about = ""
    if (size := _newest(records, "lora/relative_norm")) is not None:
        about += f"; |sBA|/|W| {size:.2g}"
    rate = _newest(records, "lr")
    suspect = "" if rate is None else f": the learning rate ({rate:g}) is the first suspect"
    return f"{named} fell from {best:.2f} to {last:.2f} after step {step}{about}{suspect}"


def _score(record: Mapping[str, Any]) -> float | None:
    """The score of an evaluation; of traffic that of the last versions together, which is there if
    it is of enough rollouts: four of one version fall from 1 to 0 by chance."""
    is_pooled = record.get("val/pooled/rollouts") is not None
    score = record.get("val/pooled/score" if is_pooled else "val/score")
    return None if score is None else float(score)


def _rewards(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(last step, mean reward) of each whole window."""
    key = "reward/mean"
    known = [(int(r["step"]), r[key]) for r in records if r.get(key) is not None]
    windows = [known[at : at + WINDOW] for at in range(0, len(known) - WINDOW + 1, WINDOW)]
    return [(window[-1][0], float(np.mean([r for _, r in window]))) for window in windows]


def _newest(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((float(r[key]) for r in reversed(records) if r.get(key) is not None), None)

"""Base of all forms: a way to compute one optimizer step, and what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stepwell.datapool.types import Step

ROWS_PER_MICRO_BATCH = 8
"""Rows of a micro-batch in the plain and TRL's forms: `per_device_train_batch_size` of transformers
and TRL."""

LR = 1e-6


class Form(ABC):
    """One way to compute an update."""

    name: str
    computed: int = 0
    """Tokens that went through the model in the last step."""

    @abstractmethod
    def step(self, steps: Sequence[Step]) -> float:
        """One optimizer step; the gradient's norm, before clipping."""


def advantages(steps: Sequence[Step]) -> list[float]:
    """One per step, the same for all of a trajectory: ±1 by turns."""
    uids = {uid: i for i, uid in enumerate(dict.fromkeys(s.trajectory_uid for s in steps))}
    return [1.0 if uids[s.trajectory_uid] % 2 else -1.0 for s in steps]

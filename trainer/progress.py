"""How far a run has come: what a checkpoint and a recorded batch carry besides model and prompts.

Owns the numbers. Does not own when they change (`loop.py`) or the files (`checkpoint.py`,
`recording.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from stepwell.trainer.advantages import Baselines
from stepwell.trainer.validation import Evaluation


@dataclass(slots=True)
class Progress:
    """What a checkpoint must carry besides the model and the prompt source."""

    updates: int = 0
    """Optimizer steps so far."""
    version: int = 0
    """The policy version that was published last."""
    published: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Version -> updates when it was published."""
    train_s: float = 0.0
    """Wall time of training, evaluations not counted."""
    kl_coef: float | None = None
    """Coefficient of the KL to the reference, once it has been adapted."""
    baselines: Baselines = field(default_factory=dict)
    """Of `algorithm.adv_estimator: reinforce_running`."""
    evaluations: list[Evaluation] = field(default_factory=list)
    unapplied: list[int] = field(default_factory=list)
    """Of `updates`, by number, those that left the policy as it was: a gradient that was not
    finite, the critic's warm-up."""

    def lose(self, newest: int, updates_per_sync: int) -> None:
        """Versions up to `newest` were published by a trainer that crashed: their weights are lost,
        and what they sampled counts as one publication old when it is taken up again."""
        for version in range(self.version + 1, newest + 1):
            self.published[version] = self.updates - updates_per_sync
        self.version = newest

    def known(self) -> dict[int, int]:
        """`published`, without the versions that were lost."""
        known, newest = dict[int, int](), 0
        for version, updates in sorted(self.published.items()):
            if updates >= newest:
                known[version] = newest = updates
        return known

    def applied(self, updates: int) -> int:
        """Of so many updates, those that changed the policy: what lag is counted in."""
        return updates - bisect_right(self.unapplied, updates)

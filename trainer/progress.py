"""Progress of a run: what a checkpoint and a recorded batch carry besides model and prompts.

Owns the numbers. Does not own when they change (`updater.py`, `publish/publisher.py`) or the files
(`checkpoint.py`, `recording.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields

from stepwell.trainer.algorithms.advantages.base import Baselines
from stepwell.trainer.validation import Evaluation


@dataclass(slots=True)
class Progress:
    """Numbers that a checkpoint carries besides the model and the prompt source."""

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
    """State of `algorithm.adv_estimator` from batch to batch."""
    evaluations: list[Evaluation] = field(default_factory=list)
    unapplied: list[int] = field(default_factory=list)
    """Numbers of the updates that left the policy as it was: a gradient that was not
    finite, no token to train, the critic's warm-up."""
    rolled_back: dict[int, int] = field(default_factory=dict)
    """Version that a roll-back published -> the version whose weights it has."""

    def become(self, other: Progress) -> None:
        """Take over the numbers of a checkpoint, or of a recording."""
        for f in fields(self):
            setattr(self, f.name, getattr(other, f.name))

    def lose(self, newest: int, updates_per_sync: int) -> None:
        """Versions up to `newest` were published by a trainer that crashed: their weights are lost,
        and what they sampled counts as one publication old when it is taken up again."""
        for version in range(self.version + 1, newest + 1):
            self.published[version] = self._before(self.updates, updates_per_sync)
        self.version = newest

    def known(self) -> dict[int, int]:
        """`published`, without the versions that were lost."""
        known, newest = dict[int, int](), 0
        for version, updates in sorted(self.published.items()):
            if updates >= newest:
                known[version] = newest = updates
        return known

    def roll_back(self, version: int, to: int, updates_per_sync: int) -> None:
        """The weights of now are those of `to`, served as `version`. What the versions between the
        two sampled is off-policy from now on, as if it were a publication older than `to`."""
        self.rolled_back[version] = to
        for bad in range(to + 1, version):
            self.published[bad] = self._before(self.published.get(to, 0), updates_per_sync)
        self.published[version] = self.updates
        self.version = version

    def is_good(self, version: int) -> bool:
        """True if no roll-back went back beyond `version`."""
        return not any(to < version < new for new, to in self.rolled_back.items())

    def weights_of(self, version: int) -> int:
        """The version that `version` has the weights of: itself, unless it was a roll-back."""
        return self.rolled_back.get(version, version)

    def applied(self, updates: int) -> int:
        """Return how many of so many updates changed the policy: lag is counted in these."""
        return updates - bisect_right(self.unapplied, updates)

    def _before(self, updates: int, applied: int) -> int:
        """Number of updates at which the policy was `applied` applied ones older than at `updates`;
        negative: older than the run."""
        wanted = self.applied(updates) - applied
        while self.applied(updates) > wanted:
            updates -= 1
        return updates

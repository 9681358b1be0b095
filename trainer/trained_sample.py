"""This module writes down what a sample of trajectories was trained with, token by token, so that
people see what each optimizer step learnt from.

    optimizer step 12 ──► some of its groups ──► RUN/trained/000000000012.jsonl

Bounded in time (`SAMPLE_TOKENS` a step) and on disk (`trainer.sample_mb`). Does not own the file
(`datapool/files/trained.py`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.backends.base import TokenBatch
from stepwell.datapool.files.trained import TrainedTrajectory, write_trained
from stepwell.datapool.types import Group, Step

log = logging.getLogger(__name__)

SAMPLE_TOKENS = 65_536
"""Response tokens of one optimizer step's sample, unless its first trajectory has more."""
COLUMNS = ("advantages", "weights", "prox_log_probs", "ref_log_probs", "values")


class TrainedSample:
    """
    Args:
        folder: of the run.
        groups: of each optimizer step; 0 writes nothing.
        most_mb: the oldest files go beyond so many MiB.
    """

    def __init__(self, folder: Path, groups: int, most_mb: int) -> None:
        self._folder = folder
        self._groups = groups
        self._most = most_mb << 20

    def write(
        self, step: int, batch: TokenBatch, groups: Sequence[Group], about: Mapping[str, Any]
    ) -> None:
        """Write the sample of optimizer step `step`, which was on these groups of the batch. A disk
        that takes nothing, or metadata that JSON cannot hold, end no run: this is for people."""
        if not self._groups or not isinstance(batch, TokenBatch):  # a trainer's own batch
            return
        chosen = random.Random(step).sample(range(len(groups)), min(self._groups, len(groups)))
        sample = [groups[i] for i in sorted(chosen)]
        try:
            write_trained(self._folder, step, about, _trained(batch, sample), self._most)
        except (OSError, TypeError) as e:
            log.warning("the sample of optimizer step %d is not written: %s", step, e)


def _trained(batch: TokenBatch, groups: Sequence[Group]) -> Iterator[TrainedTrajectory]:
    where = {(s.trajectory_uid, s.step_index): i for i, s in enumerate(batch.steps)}
    n_tokens = 0
    for trajectory in (t for group in groups for t in group.trajectories):
        n_tokens += sum(len(step.response_ids) for step in trajectory.steps)
        yield TrainedTrajectory(
            trajectory, tuple(_columns(batch, where, step) for step in trajectory.steps)
        )
        if n_tokens >= SAMPLE_TOKENS:
            return


def _columns(batch: TokenBatch, where: Mapping[tuple[str, int], int], step: Step) -> dict[str, Any]:
    i = where.get((step.trajectory_uid, step.step_index))
    if i is None:  # left out of the batch: it was not trained
        return {}
    start, end = batch.offsets[i : i + 2].tolist()
    columns = {n: batch.columns[n][start:end].numpy() for n in COLUMNS if n in batch.columns}
    coefs = [batch.columns[n][start:end] for n in ("coef", "sft_coef") if n in batch.columns]
    if coefs:
        columns["mask"] = np.any([c.numpy() != 0 for c in coefs], axis=0).astype(np.float32)
    return columns

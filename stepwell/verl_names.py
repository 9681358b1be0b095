"""This module gives a run's figures verl's names, beside ours, in trackers (`logging.names: verl`).

A figure has one only where verl's is the same figure; docs/metrics.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stepwell.config import RunConfig
from stepwell.trainer.metrics import Tracker

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("training/global_step",),
    "reward/mean": ("critic/score/mean",),
    "reward/min": ("critic/score/min",),
    "reward/max": ("critic/score/max",),
    "advantage/mean": ("critic/advantages/mean",),
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "policy/entropy": ("actor/entropy",),
    "policy/kl_k1": ("actor/ppo_kl",),
    "policy/dual_clip_frac": ("actor/pg_clipfrac_lower",),
    "critic/loss": ("critic/vf_loss",),
    "critic/clip_frac": ("critic/vf_clipfrac",),
    "critic/value_mean": ("critic/values/mean",),
    "critic/return_mean": ("critic/returns/mean",),
    "critic/explained_variance": ("critic/vf_explained_var",),
    "rollout_probs_diff/mean": ("training/rollout_probs_diff_mean",),
    "rollout_probs_diff/max": ("training/rollout_probs_diff_max",),
    "rollout_probs_diff/std": ("training/rollout_probs_diff_std",),
    "tool_calls/mean": ("tool_call_counts/mean",),
    "time/step_s": ("timing_s/step", "perf/time_per_step"),
    "time/score_s": ("timing_s/reward",),
    "time/prepare_s": ("timing_s/old_log_prob",),
    "time/train_s": ("timing_s/update_actor",),
    "time/publish_s": ("timing_s/update_weights",),
    "time/checkpoint_s": ("timing_s/save_checkpoint",),
}
"""Our name -> verl's. `response_length/…`, `prompt_length/…`, `num_turns/…`, `critic/grad_norm` and
`critic/lr` are verl's already."""
REWARDS: Final[Mapping[str, tuple[str, ...]]] = {
    f"reward/{figure}": (f"critic/rewards/{figure}",) for figure in ("mean", "min", "max")
}
"""Without a KL in the reward: verl's rewards are scores minus that."""
POLICY_LOSS: Final[Mapping[str, tuple[str, ...]]] = {"loss": ("actor/pg_loss",)}
"""Where the loss is the policy's alone."""
KL_LOSS: Final[Mapping[str, tuple[str, ...]]] = {
    "kl/ref": ("actor/kl_loss",),
    "kl/coef": ("actor/kl_coef",),
}
"""With `algorithm.kl.place: loss`."""
KL_REWARD: Final[Mapping[str, tuple[str, ...]]] = {
    "kl/ref": ("actor/reward_kl_penalty",),
    "kl/coef": ("actor/reward_kl_penalty_coeff",),
}
"""With `algorithm.kl.place: reward`."""
_CLIPPED: Final = ("policy/clip_frac_low", "policy/clip_frac_high")
_VALIDATION: Final = re.compile(r"val/(.+)/(mean@\d+)")


class VerlNames:
    """A tracker that is given verl's names, too."""

    def __init__(self, tracker: Tracker, config: RunConfig) -> None:
        algorithm = config.algorithm
        place = algorithm.kl.place
        self._tracker = tracker
        tables = [NAMES]
        if place != "reward":
            tables.append(REWARDS)
        if place != "none":
            tables.append(KL_LOSS if place == "loss" else KL_REWARD)
        elif not algorithm.loss.entropy_coeff and (config.data is None or config.data.sft is None):
            tables.append(POLICY_LOSS)
        self._tables = tables

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        aliases = {
            alias: record[name]
            for table in self._tables
            for name in table.keys() & record.keys()
            for alias in table[name]
        }
        if all(isinstance(record.get(name), int | float) for name in _CLIPPED):
            aliases["actor/pg_clipfrac"] = sum(record[name] for name in _CLIPPED)
        for name, value in record.items():
            if (found := _VALIDATION.fullmatch(name)) is not None:
                aliases[f"val-core/{found[1]}/reward/{found[2]}"] = value
        self._tracker.write(step, {**aliases, **record})

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self._tracker.table(step, name, columns, rows)

    def close(self, failed: bool) -> None:
        self._tracker.close(failed)

"""This module gives a run's figures verl's names, beside ours, in trackers (`logging.names: verl`).

A figure has one only where verl's is the same figure; docs/metrics.md has the table. Source:
`verl/trainer/ppo/{metric_utils,core_algos,ray_trainer}.py` and `verl/workers` at b178a3c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stepwell.config.run import RunConfig
from stepwell.trainer.metrics import Tracker

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("training/global_step",),
    "data/epoch": ("training/epoch",),
    "reward/mean": ("critic/score/mean",),
    "reward/min": ("critic/score/min",),
    "reward/max": ("critic/score/max",),
    "advantage/mean": ("critic/advantages/mean",),
    "grad_norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "critic/loss": ("critic/vf_loss",),
    "critic/clip_frac": ("critic/vf_clipfrac",),
    "critic/value_mean": ("critic/vpred_mean",),
    "critic/return_mean": ("critic/returns/mean",),
    "critic/explained_variance": ("critic/vf_explained_var",),
    "rollout_probs_diff/mean": ("training/rollout_probs_diff_mean",),
    "rollout_probs_diff/max": ("training/rollout_probs_diff_max",),
    "rollout_probs_diff/std": ("training/rollout_probs_diff_std",),
    "tool_calls/mean": ("tool_call_counts/mean",),
    "time/step_s": ("timing_s/step", "perf/time_per_step"),
    "time/score_s": ("timing_s/reward",),
    "time/train_s": ("timing_s/update_actor",),
    "time/publish_s": ("timing_s/update_weights",),
    "time/checkpoint_s": ("timing_s/save_checkpoint",),
}
"""Our name -> verl's. `response_length/…`, `prompt_length/…`, `critic/grad_norm` and `critic/lr`
are verl's already."""
REWARDS: Final[Mapping[str, tuple[str, ...]]] = {
    f"reward/{figure}": (f"critic/rewards/{figure}",) for figure in ("mean", "min", "max")
}
"""Without a KL in the reward: verl's rewards are scores minus that."""
POLICY_LOSS: Final[Mapping[str, tuple[str, ...]]] = {"loss": ("actor/pg_loss",)}
"""Name that holds where the loss is the policy's alone."""
TOKEN_MEAN: Final[Mapping[str, tuple[str, ...]]] = {"policy/entropy": ("actor/entropy",)}
"""With `loss_agg_mode: token-mean`: ours are means over tokens, verl's are taken as the loss is."""
KL_COEF: Final[Mapping[str, tuple[str, ...]]] = {"kl/coef": ("actor/kl_coef",)}
"""With `algorithm.kl.place: loss`."""
KL_LOSS: Final[Mapping[str, tuple[str, ...]]] = {"kl/ref": ("actor/kl_loss",)}
"""With that and `loss_agg_mode: token-mean`."""
KL_REWARD: Final[Mapping[str, tuple[str, ...]]] = {
    "kl/ref": ("actor/reward_kl_penalty",),
    "kl/coef": ("actor/reward_kl_penalty_coeff",),
}
"""With `algorithm.kl.place: reward`."""
PPO_KL: Final[Mapping[str, tuple[str, ...]]] = {"policy/kl_k1": ("actor/ppo_kl",)}
"""Name for every policy loss but `kl_cov`, of which verl reports the mean of |log r|."""
DUAL_CLIP: Final[Mapping[str, tuple[str, ...]]] = {
    "policy/dual_clip_frac": ("actor/pg_clipfrac_lower",)
}
"""Name for `ppo` alone; verl's `pg_clipfrac_lower` of `geo_mean` is another figure."""
CLIPPED_AS_VERL: Final = frozenset({"ppo", "gspo", "cispo"})
"""Policy losses of which verl's `pg_clipfrac` counts both sides, as the sum of ours does."""
_CLIPPED: Final = ("policy/clip_frac_low", "policy/clip_frac_high")
_VALIDATION: Final = re.compile(r"val/(.+)/(mean@\d+)")


class VerlNames:
    """A tracker that is given verl's names, too."""

    def __init__(self, tracker: Tracker, config: RunConfig) -> None:
        loss, place = config.algorithm.loss, config.algorithm.kl.place
        of_tokens = loss.loss_agg_mode == "token-mean"
        with_sft = config.data is not None and config.data.sft is not None
        alone = place == "none" and not loss.entropy_coeff and not with_sft
        chosen = (
            (NAMES, True),
            (REWARDS, place != "reward"),
            (POLICY_LOSS, alone),
            (TOKEN_MEAN, of_tokens),
            (KL_COEF, place == "loss"),
            (KL_LOSS, place == "loss" and of_tokens),
            (KL_REWARD, place == "reward"),
            (PPO_KL, loss.policy != "kl_cov"),
            (DUAL_CLIP, loss.policy == "ppo"),
        )
        self._tracker = tracker
        self._tables = [table for table, holds in chosen if holds]
        self._counts_both_sides = loss.policy in CLIPPED_AS_VERL

    def __str__(self) -> str:
        return str(self._tracker)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        aliases = {
            alias: record[name]
            for table in self._tables
            for name in table.keys() & record.keys()
            for alias in table[name]
        }
        clipped = [record.get(name) for name in _CLIPPED]
        if self._counts_both_sides and all(isinstance(x, int | float) for x in clipped):
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

"""This module turns scored groups into optimizer steps, so that the loop, a replay and a test train
by the same mathematics.

    groups ──prepare──► columns of the batch: π_prox, advantages, weights, coef ──► Prepared
                                                                                       │
              metrics ◄── Progress.updates + 1 ◄── loss, gradient, optimizer ◄──step───┘

Synchronous, and knows no engine and no pool: what `prepare` and `step` do follows from the groups,
the model and `progress` alone. Owns the columns, and the count of updates. Does not own formulas
(`algorithms/`), the model (`backends/`), where groups come from (`batches.py`) or who gets the
weights (`publisher.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepwell.backends.base import TokenBatch, TrainingBackend
from stepwell.backends.torch.critic import Critic
from stepwell.datapool.types import Group
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.kl import kl_in_reward, next_coef
from stepwell.trainer.algorithms.losses import loss_columns, make_loss_fn, untruncated
from stepwell.trainer.algorithms.off_policy.correction import correct
from stepwell.trainer.algorithms.off_policy.lag import lags, proximal_log_probs
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.progress import Progress
from stepwell.trainer.validation import tool_use


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with everything that its loss needs."""

    batch: TokenBatch
    mini_batches: list[tuple[list[int], list[Group]]]
    """For each optimizer step, the steps of the batch by number, and the groups they are of."""
    metrics: dict[str, float]


class Updater:
    """Trains one model, and its critic; see the module's docstring.

    Args:
        critic: of an estimator that needs one.
        seed: of the draws that a loss makes, with the number of the update.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        async_training: AsyncTrainingConfig,
        backend: TrainingBackend,
        critic: Critic | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._algorithm = algorithm
        self._async = async_training
        self.critic = critic
        self._seed = seed
        self._loss_fn = make_loss_fn(algorithm.loss, algorithm.kl)
        self.backend = backend
        self.progress = Progress()

    def prepare(self, groups: Sequence[Group]) -> Prepared:
        """The columns of a batch, at the weights of now: π_prox is taken once, before the first of
        its optimizer steps."""
        algorithm, progress = self._algorithm, self.progress
        owner = [i for i, g in enumerate(groups) for _ in g.steps]
        parts = np.array_split(range(len(groups)), self._async.require_batches)
        mini_of_group = {int(g): m for m, part in enumerate(parts) for g in part}
        mini_of_step = [mini_of_group[g] for g in owner]

        batch: TokenBatch = self.backend.convert([s for g in groups for s in g.steps])
        columns = batch.columns
        prox = proximal_log_probs(
            lambda: self.backend.compute_log_probs(batch),
            columns["rollout_log_probs"],
            algorithm.off_policy,
        )
        gap = self._log_prob_gap(batch, prox)
        if not self._async.use_rollout_log_probs:
            columns["rollout_log_probs"] = prox
        columns["prox_log_probs"] = prox
        token_rewards, metrics = self._hold_to_reference(groups, batch)
        if self.critic is not None:
            columns["values"] = self.critic.values(batch)
        advantages = compute_advantages(
            groups,
            algorithm,
            token_rewards=token_rewards,
            values=columns.get("values"),
            baselines=progress.baselines,
        )
        progress.baselines = advantages.baselines
        columns |= advantages.columns
        metrics |= advantages.metrics
        mask = None
        if algorithm.loss.mask_truncated:
            mask = untruncated(batch.steps, batch.lengths)
            metrics["policy/truncated_share"] = 1 - float(mask.mean())
        correction = correct(
            prox,
            columns["rollout_log_probs"],
            batch.lengths,
            lags(
                [s.policy_version for s in batch.steps],
                # A copy: a publication may end meanwhile, in the event loop's thread.
                {v: progress.applied(u) for v, u in progress.published.copy().items()},
                updates_now=progress.applied(progress.updates),
                updates_per_sync=self._async.trigger_parameter_sync_step,
            ),
            staleness_threshold=self._async.staleness_threshold,
            config=algorithm.off_policy,
            advantages=columns["advantages"],
            mask=mask,
        )
        columns["weights"] = correction.weights
        metrics |= correction.metrics
        columns |= loss_columns(
            batch,
            algorithm.loss,
            mini_batches=mini_of_step,
            mask=mask,
            seed=self._seed + progress.updates,
        )
        if gap is not None:
            metrics["log_prob_gap"] = gap
        used = sorted(set(mini_of_step))
        return Prepared(
            batch,
            [
                (
                    [i for i, m in enumerate(mini_of_step) if m == number],
                    [groups[int(g)] for g in parts[number]],
                )
                for number in used
            ],
            metrics,
        )

    def step(self, batch: TokenBatch, indices: Sequence[int]) -> dict[str, float]:
        """One optimizer step over the steps `indices`, and its count; its metrics. A publication
        may be written as soon as this returns."""
        update = self._update(batch, indices)
        self.progress.updates += 1
        if update.get("skipped"):
            self.progress.unapplied.append(self.progress.updates)
        return update

    def state_dict(self) -> dict[str, Any]:
        """Of the models, for a checkpoint."""
        critic = self.critic.state_dict() if self.critic is not None else None
        return {"backend": self.backend.state_dict(), "critic": critic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Models and progress of a checkpoint."""
        self.backend.load_state_dict(state["backend"])
        if self.critic is not None and state["critic"] is not None:
            self.critic.load_state_dict(state["critic"])
        self.progress.become(state["progress"])

    def close(self) -> None:
        self.backend.close()
        if self.critic is not None:
            self.critic.close()

    def _update(self, batch: TokenBatch, indices: Sequence[int]) -> dict[str, float]:
        loss_fn = replace(self._loss_fn, kl_coef=self._kl_coef)
        update: dict[str, float] = {}
        if self.critic is not None:
            update |= self.critic.update(batch, indices)
            if not self.critic.warm:
                return update | {"skipped": 1.0}
        update |= self.backend.train_step(batch, loss_fn, indices)
        if self._algorithm.kl.place == "loss":
            update["kl/coef"] = self._kl_coef
            trajectories = {batch.steps[i].trajectory_uid for i in indices}
            self._adapt_kl(update.get("kl/ref", math.nan), len(trajectories))
        return update

    def _hold_to_reference(
        self, groups: Sequence[Group], batch: TokenBatch
    ) -> tuple[Tensor | None, dict[str, float]]:
        """The KL penalty as rewards of tokens, if that is its place, and its metrics."""
        kl, columns = self._algorithm.kl, batch.columns
        if kl.place == "none":
            return None, {}
        columns["ref_log_probs"] = self.backend.compute_ref_log_probs(batch)
        if kl.place == "loss":
            return None, {}
        coef, prox, ref = self._kl_coef, columns["prox_log_probs"], columns["ref_log_probs"]
        penalty, measured = kl_in_reward(groups, batch.lengths, prox, ref, kl, coef)
        self._adapt_kl(measured, sum(len(g.trajectories) for g in groups))
        return penalty, {"kl/ref": measured, "kl/coef": coef}

    @property
    def _kl_coef(self) -> float:
        adapted = self.progress.kl_coef
        return self._algorithm.kl.kl_coef if adapted is None else adapted

    def _adapt_kl(self, measured: float, trajectories: int) -> None:
        kl = self._algorithm.kl
        if kl.target_kl is not None:
            self.progress.kl_coef = next_coef(self._kl_coef, measured, trajectories, kl)

    def _log_prob_gap(self, batch: TokenBatch, prox: Tensor) -> float | None:
        """max |log π - log μ| over tokens that the very weights being trained sampled: how exactly
        engine and trainer agree, μ as the engine said. None if the batch has no such token."""
        progress = self.progress
        published = progress.published[progress.version]
        if progress.applied(published) != progress.applied(progress.updates):
            return None
        if self._algorithm.off_policy.proximal == "rollout":
            return None  # nothing was recomputed to compare with
        fresh = batch.expand(
            [
                float(s.policy_version == progress.version and not s.version_spans)
                for s in batch.steps
            ]
        ).bool()
        gap = (prox - batch.columns["rollout_log_probs"])[fresh].abs()
        gap = gap[torch.isfinite(gap)]
        return float(gap.max()) if len(gap) else None


def record_of(progress: Progress, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
    """What is told of an optimizer step on `groups`, whatever the mathematics."""
    trajectories = [t for g in groups for t in g.trajectories]
    return {
        "step": progress.updates,
        "time_s": progress.train_s,
        "policy_version": progress.version,
        "reward/mean": float(np.mean([t.reward for t in trajectories])),
        "tool_use": tool_use(groups),
        "groups": len(groups),
        "trajectories": len(trajectories),
        "steps_per_trajectory": sum(len(t.steps) for t in trajectories) / len(trajectories),
        "tokens_per_s": sum(s.n_tokens for g in groups for s in g.steps) / seconds,
    }

"""This module turns scored groups into optimizer steps, so that the loop, a replay and a test train
by the same mathematics.

    groups ──prepare──► columns of the batch: advantages, coef, π_prox and weights ──► Prepared
                                                                                          │
              metrics ◄── Progress.updates + 1 ◄── loss, gradient, optimizer ◄───step─────┘

Where the batch is one optimizer step, the step's own forward pass is π_prox and the weights follow
from it, so `prepare` leaves both to `step` (`off_policy/proximal.py` says when).

Synchronous, and knows no engine and no pool: what `prepare` and `step` do follows from the groups,
the model and `progress` alone. Owns the columns, and the count of updates. Does not own formulas
(`algorithms/`), the model (`backends/`), where groups come from (`batches.py`) or who gets the
weights (`publish/`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stepwell.backends.base import NO_PICTURES, TokenBatch, TrainingBackend
from stepwell.backends.torch.critic import Critic
from stepwell.datapool.types import Group
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.branches import of_kinds
from stepwell.trainer.algorithms.kl import kl_in_reward, next_coef
from stepwell.trainer.algorithms.losses import (
    BatchLoss,
    JointLoss,
    coefficients,
    loss_columns,
    make_loss_fn,
    seen,
    untruncated,
)
from stepwell.trainer.algorithms.off_policy.correction import (
    PROBS_DIFF,
    TokenWeights,
    correct,
    lags,
    probs_diff,
)
from stepwell.trainer.algorithms.off_policy.proximal import is_first_forward, proximal_log_probs
from stepwell.trainer.checkpoint import BACKEND, CRITIC
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.config.rollout import BranchKind
from stepwell.trainer.progress import Progress
from stepwell.trainer.sampling import is_sft
from stepwell.trainer.trajectory_metrics import tool_use, trajectory_metrics


class MiniBatch(NamedTuple):
    """Steps that one optimizer step is taken on."""

    steps: list[int]
    """Numbers of the steps in the batch."""
    groups: list[Group]
    """Groups the steps belong to."""
    epoch: int
    """Passes over the batch before this one."""


Weighed: TypeAlias = "tuple[dict[str, Tensor], dict[str, float]]"
"""Columns `prox_log_probs`, `rollout_log_probs` and `weights`, and what they say of the batch."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with everything that its loss needs."""

    batch: TokenBatch
    mini_batches: list[MiniBatch]
    """One for each optimizer step, in order."""
    metrics: dict[str, float]
    weigh: Callable[[Tensor], Weighed] | None = None
    """Finishes the columns and metrics of the batch once its optimizer step has found log π_prox,
    [T]; None: they are there."""


class Updater:
    """Trains one model and its critic; see the module's docstring.

    Args:
        critic: trained beside the model, for an estimator that needs one.
        seed: seeds the draws of a loss, together with the number of the update.
        branches: kinds of calls that are trained; all of them by default.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        async_training: AsyncTrainingConfig,
        backend: TrainingBackend,
        critic: Critic | None = None,
        *,
        seed: int = 0,
        branches: Sequence[BranchKind] = get_args(BranchKind),
    ) -> None:
        self._branches = branches if set(branches) < set(get_args(BranchKind)) else None
        self._algorithm = algorithm
        self._async = async_training
        self.critic = critic
        self._seed = seed
        self._loss_fn = make_loss_fn(algorithm.loss, algorithm.kl)
        self._sft_loss = make_loss_fn(algorithm.sft.loss)
        self._token_weights: TokenWeights | None = None
        if backend.returns_columns and is_first_forward(algorithm, async_training):
            self._token_weights = TokenWeights(
                algorithm.off_policy,
                async_training.staleness_threshold,
                async_training.use_rollout_log_probs,
            )
        self.backend = backend
        self.progress = Progress()

    def prepare(
        self, groups: Sequence[Group], pictures: Mapping[str, bytes] = NO_PICTURES
    ) -> Prepared:
        """Compute the columns of a batch at the weights of now: π_prox is one policy for all of
        its optimizer steps, over which rollouts and conversations are spread alike.

        Args:
            pictures: PNG by digest, of those that the steps name.
        """
        number = self._async.require_batches
        rl, sft = [g for g in groups if not is_sft(g)], [g for g in groups if is_sft(g)]
        # From both ends: where neither can be divided, the one is long where the other is short.
        minis = [*_parts(len(rl), number), *(number - 1 - m for m in _parts(len(sft), number))]
        ordered = [*rl, *sft]
        mini_of_step = [m for g, m in zip(ordered, minis, strict=True) for _ in g.steps]
        batch, metrics, weigh = (
            self._prepare_rl(rl, mini_of_step, pictures) if rl else (None, {}, None)
        )
        if batch is None or sft:
            batch = self._with_conversations(batch, ordered, minis, mini_of_step, pictures)
        first = [
            MiniBatch(
                [i for i, m in enumerate(mini_of_step) if m == mini],
                [g for g, m in zip(ordered, minis, strict=True) if m == mini],
                0,
            )
            for mini in sorted(set(mini_of_step))
        ]
        draw = np.random.default_rng([self._seed, self.progress.updates])
        again = [
            first[i]._replace(epoch=epoch)
            for epoch in range(1, self._async.ppo_epochs)
            for i in draw.permutation(len(first))
        ]
        return Prepared(batch, first + again, metrics, weigh)

    def _with_conversations(
        self,
        rolled_out: TokenBatch | None,
        groups: Sequence[Group],
        minis: Sequence[int],
        mini_of_step: Sequence[int],
        pictures: Mapping[str, bytes],
    ) -> TokenBatch:
        """The batch of all `groups`: what was `rolled_out`, with its columns, and conversations
        behind it, each of the two weighted by its share of a mini-batch's groups (`JointLoss`).
        """
        batch = self._convert(groups, pictures)
        first = 0 if rolled_out is None else len(rolled_out.steps)
        begin = int(batch.offsets[first])
        total = Counter(minis)
        of_sft = Counter(m for g, m in zip(groups, minis, strict=True) if is_sft(g))
        share = batch.expand([of_sft[m] / total[m] for m in mini_of_step])
        coef = coefficients(
            batch.lengths[first:].tolist(),
            [s.trajectory_uid for s in batch.steps[first:]],
            self._algorithm.sft.loss,
            mini_batches=mini_of_step[first:],
        )
        batch.columns["sft_coef"] = torch.cat([torch.zeros(begin), coef]) * share
        if rolled_out is not None:
            nobody = torch.full((batch.n_tokens - begin,), torch.nan)
            batch.columns |= {k: torch.cat([v, nobody]) for k, v in rolled_out.columns.items()}
            coef = torch.cat([rolled_out.columns["coef"], torch.zeros_like(nobody)])
            batch.columns["coef"] = coef * (1 - share)
        return batch

    def _convert(self, groups: Sequence[Group], pictures: Mapping[str, bytes]) -> TokenBatch:
        steps = [s for g in groups for s in g.steps]
        batch: TokenBatch
        if any(step.pictures for step in steps):
            batch = self.backend.convert_with_pictures(steps, pictures)
        else:
            batch = self.backend.convert(steps)
        return batch

    def _prepare_rl(
        self,
        groups: Sequence[Group],
        mini_of_step: Sequence[int],
        pictures: Mapping[str, bytes],
    ) -> tuple[TokenBatch, dict[str, float], Callable[[Tensor], Weighed] | None]:
        """The columns and metrics of what was rolled out, whose steps are the first, and
        `Prepared.weigh`."""
        algorithm, progress = self._algorithm, self.progress
        batch = self._convert(groups, pictures)
        mini_of_step, columns = mini_of_step[: len(batch.steps)], batch.columns
        mu, prox, recomputed = columns["rollout_log_probs"], None, False
        mask, shares = self._mask(batch)
        takes_no_step = (self.critic is not None and not self.critic.warm) or (
            mask is not None and not mask.any()
        )
        if self._token_weights is None or takes_no_step:

            def recompute() -> Tensor:
                nonlocal recomputed
                recomputed = True
                return self.backend.compute_log_probs(batch)

            prox = proximal_log_probs(recompute, mu, algorithm.off_policy)
            columns["prox_log_probs"] = prox
        token_rewards, metrics = self._hold_to_reference(groups, batch, mask)
        metrics |= {**shares, "off_policy/recomputed": float(recomputed)}
        if self.critic is not None:
            columns["values"] = self.critic.values(batch)
        advantages = compute_advantages(
            groups,
            algorithm,
            token_rewards=token_rewards,
            values=columns.get("values"),
            baselines=progress.baselines,
            mask=mask,
        )
        progress.baselines = advantages.baselines
        columns |= advantages.columns
        metrics |= advantages.metrics
        step_lags = lags(
            batch.steps,
            # A copy: a publication may end meanwhile, in the event loop's thread.
            {v: progress.applied(u) for v, u in progress.published.copy().items()},
            updates_now=progress.applied(progress.updates),
            updates_per_sync=self._async.trigger_parameter_sync_step,
        )
        # Counted of the Steps: where the engine's log-probs are not used, all are known below.
        without = float(sum(s.rollout_log_probs is None for s in batch.steps))
        advantage_column = columns["advantages"]
        sampled_now = self._sampled_now(batch)

        def weigh(prox: Tensor) -> Weighed:
            prox = prox[: len(mu)]  # conversations come behind
            behaviour = mu if self._async.use_rollout_log_probs else prox
            weights, measured = correct(
                prox,
                behaviour,
                batch.lengths,
                step_lags,
                staleness_threshold=self._async.staleness_threshold,
                config=algorithm.off_policy,
                advantages=advantage_column,
                mask=mask,
            )
            measured["off_policy/missing_steps"] = without
            # How exactly engine and trainer agree, μ as the engine said: above it may be π_prox.
            measured = {n: x for n, x in measured.items() if not n.startswith(PROBS_DIFF)}
            by_trainer = algorithm.off_policy.proximal == "recompute"
            told = torch.isfinite(mu) if mask is None else torch.isfinite(mu) & (mask != 0)
            if by_trainer and told.any():
                measured |= probs_diff(prox[told], mu[told])
            gap = (prox - mu)[sampled_now].abs()
            gap = gap[torch.isfinite(gap)]
            if by_trainer and len(gap):
                measured["log_prob_gap"] = float(gap.max())
            found = {"prox_log_probs": prox, "rollout_log_probs": behaviour}
            return {**found, "weights": weights}, measured

        if prox is None:
            columns["lag"] = batch.expand(step_lags)
        else:
            found, measured = weigh(prox)
            columns |= found
            metrics |= measured
        columns |= loss_columns(
            batch,
            algorithm.loss,
            mini_batches=mini_of_step,
            mask=mask,
            seed=self._seed + progress.updates,
        )
        return batch, metrics, weigh if prox is None else None

    def step(self, prepared: Prepared, indices: Sequence[int]) -> dict[str, float]:
        """Take one optimizer step over the steps `indices`, count it and return its metrics. A
        publication may be written as soon as this returns."""
        batch = prepared.batch
        update = self._update(batch, indices)
        if prepared.weigh is not None:
            columns, metrics = prepared.weigh(batch.columns["prox_log_probs"])
            for name, column in columns.items():
                batch.columns[name] = pad(column, (0, batch.n_tokens - len(column)), value=math.nan)
            update |= metrics
        self.progress.updates += 1
        if update.get("skipped"):
            self.progress.unapplied.append(self.progress.updates)
        return update

    def leave_out(self) -> None:
        """Count the optimizer steps of a batch that is not trained, so that the next has another
        number."""
        self.progress.updates += self._async.updates_per_batch

    @property
    def saves_beside(self) -> bool:
        """True if models are written while training goes on."""
        return self.backend.saves_beside

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Begin to write the models into the draft of a checkpoint, and return what is small."""
        critic = None if self.critic is None else self.critic.save_state(folder / CRITIC)
        return {"backend": self.backend.save_state(folder / BACKEND), "critic": critic}

    def wait_saved(self) -> None:
        """Return when the models are on disk. Called beside the other methods.

        Raises:
            OSError, RuntimeError: they cannot be written.
        """
        self.backend.wait_saved()
        if self.critic is not None:
            self.critic.wait_saved()

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Models and progress of the checkpoint in `folder`."""
        self.backend.load_state(folder / BACKEND, state["backend"])
        if self.critic is not None and state["critic"] is not None:
            self.critic.load_state(folder / CRITIC, state["critic"])
        self.progress.become(state["progress"])

    def free_cache(self) -> None:
        """Give memory that the models keep between two steps back to the device, for engines on
        it."""
        self.backend.free_cache()
        if self.critic is not None:
            self.critic.free_cache()

    def close(self) -> None:
        self.backend.close()
        if self.critic is not None:
            self.critic.close()

    def _update(self, batch: TokenBatch, indices: Sequence[int]) -> dict[str, float]:
        unknown = "prox_log_probs" not in batch.columns
        rl_loss = replace(
            self._loss_fn,
            kl_coef=self._kl_coef,
            token_weights=self._token_weights if unknown else None,
        )
        loss_fn: BatchLoss | JointLoss = rl_loss
        rl = list(indices)
        if (coef := batch.columns.get("sft_coef")) is not None:
            rl = [i for i in indices if not coef[batch.offsets[i]]]
            loss_fn = JointLoss(self._sft_loss, rl_loss if rl else None)
        update: dict[str, float] = {}
        if self.critic is not None and rl:
            returns = (batch.columns["returns"][slice(*batch.offsets[i : i + 2])] for i in rl)
            if any(column.isfinite().any() for column in returns):  # else all are masked
                update |= self.critic.update(batch, rl)
            if not self.critic.warm:
                indices = sorted({*indices} - {*rl})
                if not indices:
                    return update | {"skipped": 1.0}
        coefs = [batch.columns[name] for name in ("coef", "sft_coef") if name in batch.columns]
        if not any(c[slice(*batch.offsets[i : i + 2])].any() for i in indices for c in coefs):
            # Of a gradient that is 0 Adam makes a step all the same, by what it remembers.
            return update | {"skipped": 1.0, "loss": 0.0, "grad_norm": 0.0}
        update |= self.backend.train_step(batch, loss_fn, indices)
        if rl and self._algorithm.kl.place == "loss":
            update["kl/coef"] = self._kl_coef
            trajectories = {batch.steps[i].trajectory_uid for i in rl}
            self._adapt_kl(update.get("kl/ref", math.nan), len(trajectories))
        return update

    def _mask(self, batch: TokenBatch) -> tuple[Tensor | None, dict[str, float]]:
        """0 on tokens that are not trained, [T]; None: all are. And the shares that are not."""
        loss, steps, lengths = self._algorithm.loss, batch.steps, batch.lengths
        masks: dict[str, Tensor | None] = {
            "superseded": seen(steps, lengths) if loss.mask_superseded else None,
            "truncated": untruncated(steps, lengths, self._branches)
            if loss.mask_truncated
            else None,
            "untrained_branches": of_kinds(steps, lengths, self._branches)
            if self._branches
            else None,
        }
        found = {name: mask for name, mask in masks.items() if mask is not None}
        shares = {f"policy/{name}_share": 1 - float(mask.mean()) for name, mask in found.items()}
        return (torch.stack([*found.values()]).prod(0) if found else None), shares

    def _hold_to_reference(
        self, groups: Sequence[Group], batch: TokenBatch, mask: Tensor | None
    ) -> tuple[Tensor | None, dict[str, float]]:
        """The KL penalty as rewards of tokens, if that is its place, and its metrics."""
        kl, columns = self._algorithm.kl, batch.columns
        if kl.place == "none":
            return None, {}
        columns["ref_log_probs"] = self.backend.compute_ref_log_probs(batch)
        if kl.place == "loss":
            return None, {}
        coef, prox, ref = self._kl_coef, columns["prox_log_probs"], columns["ref_log_probs"]
        penalty, measured = kl_in_reward(groups, batch.lengths, prox, ref, kl, coef, mask)
        self._adapt_kl(measured, sum(len(g.trajectories) for g in groups))
        return penalty, {"kl/ref": measured, "kl/coef": coef}

    @property
    def _kl_coef(self) -> float:
        kl, adapted = self._algorithm.kl, self.progress.kl_coef
        # Without a target that of the configuration holds, also in a run that had one before.
        return kl.kl_coef if kl.target_kl is None or adapted is None else adapted

    def _adapt_kl(self, measured: float, trajectories: int) -> None:
        kl = self._algorithm.kl
        if kl.target_kl is not None:
            self.progress.kl_coef = next_coef(self._kl_coef, measured, trajectories, kl)

    def _sampled_now(self, batch: TokenBatch) -> Tensor:
        """Tokens that the very weights being trained sampled, [T] bool."""
        progress = self.progress
        published = progress.published[progress.version]
        current = progress.applied(published) == progress.applied(progress.updates)
        sampled = [
            float(current and s.policy_version == progress.version and not s.version_spans)
            for s in batch.steps
        ]
        return batch.expand(sampled).bool()


def _parts(n: int, parts: int) -> list[int]:
    """The part of each of `n` things that are cut into `parts` as even as can be, in order."""
    return [m for m, part in enumerate(np.array_split(range(n), parts)) for _ in part]


def record_of(
    progress: Progress,
    groups: Sequence[Group],
    times: Mapping[str, float],
    prepared: Sequence[Group],
) -> dict[str, Any]:
    """Return the record of an optimizer step on `groups`, without the figures of its mathematics.

    Args:
        times: of `Phases`.
        prepared: the groups of its batch, of all its optimizer steps.
    """
    sft, rl = [g for g in groups if is_sft(g)], [g for g in groups if not is_sft(g)]
    record: dict[str, Any] = trajectory_metrics(rl) if rl else {}
    if sft:
        record["sft/share"] = len(sft) / len(groups)
        record["sft/tokens"] = sum(len(s.response_ids) for g in sft for s in g.steps)
    trained = n_tokens(groups)
    rates = {
        "tokens_per_s": (trained, "step"),
        "tokens_per_s/train": (trained, "train"),
        "tokens_per_s/prepare": (n_tokens(prepared), "prepare"),
    }
    return {
        "step": progress.updates,
        "time_s": progress.train_s,
        "policy_version": progress.version,
        **record,
        "tool_use": tool_use(rl),
        "groups": len(groups),
        "trajectories": sum(len(g.trajectories) for g in groups),
        **{
            name: n / seconds
            for name, (n, stage) in rates.items()
            if (seconds := times.get(f"time/{stage}_s", 0.0)) > 0
        },
    }


def n_tokens(groups: Sequence[Group]) -> int:
    """Prompt and response tokens of their steps, a shared prefix counted each time."""
    return sum(s.n_tokens for g in groups for s in g.steps)

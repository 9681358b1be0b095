"""The loss of a micro-batch, and the columns that make it a plain sum.

    loss = Σ_t coef_t · (w_t · L_t + kl_coef · KL_t - entropy_coeff · H_t)      coef = mask · α / N

`coefficients` folds mask · α / N into one number per token, from counts taken before the
importance weights w: what is left is a plain sum, so any split into micro-batches and any row
form (a row per step, per branch, a prefix tree) gives the same loss and gradient. One trajectory
is one sample, however many steps its tokens are spread over.

Owns the sum, its coefficients and its diagnostics. Does not own: L (`policy_losses/`), w
(`off_policy/`), A (`advantages/`), KL (`kl.py`), rows and micro-batches (`backends/`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stepwell.backends.base import LossOutput, Mean, TokenBatch
from stepwell.datapool.types import Step, superseded
from stepwell.trainer.algorithms.branches import Kinds, answer
from stepwell.trainer.algorithms.kl import KlConfig, kl_estimate
from stepwell.trainer.algorithms.off_policy.correction import TokenWeights
from stepwell.trainer.algorithms.policy_losses.base import (
    MAX_LOG_RATIO,
    BatchTokens,
    PolicyLoss,
)
from stepwell.trainer.config import LossConfig
from stepwell.trainer.errors import ColumnError


def loss_columns(
    batch: TokenBatch,
    config: LossConfig,
    *,
    mini_batches: Sequence[int],
    mask: Tensor | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The columns that `config`'s loss needs beside advantages, weights and log-probs: `coef`, and
    what its policy loss prepares.

    Args:
        batch: with the columns `prox_log_probs` and `advantages` where the loss selects tokens.
        mini_batches: the mini-batch (one optimizer step) of each step, S values.
        mask: [T], 0 where a token is not to be trained; all ones if None.
        seed: of draws.
    """
    lengths = batch.lengths
    coef = coefficients(
        lengths.tolist(),
        [s.trajectory_uid for s in batch.steps],
        config,
        mask=mask,
        mini_batches=mini_batches,
    )
    columns = {"coef": coef}
    if (prepare := config.chosen.prepare) is not None:
        if config.chosen.selects:
            _require(batch.columns, "prox_log_probs", "advantages")
        index = torch.repeat_interleave(lengths)
        mini_batch = torch.as_tensor(mini_batches)[index]
        shuffled = partial(torch.randperm, generator=torch.Generator().manual_seed(seed))
        tokens = BatchTokens(batch.columns, index, mini_batch, coef != 0, shuffled)
        columns |= prepare(tokens, config)
    return columns


def untruncated(steps: Sequence[Step], lengths: Tensor, branches: Kinds | None = None) -> Tensor:
    """The mask of `mask_truncated`, [T]: 0 on a trajectory whose answer was cut off at the token
    limit, whoever scored it. Source: overlong filtering, DAPO, arXiv:2503.14476 §3.4.

    Args:
        lengths: response tokens of each step, [S].
        branches: kinds of calls that are trained; None: all of them.
    """
    last = {
        uid: own[answer(own, branches)]
        for uid, of in _by_trajectory(steps).items()
        for own in [sorted(of, key=lambda s: s.step_index)]
    }
    kept = [float(last[s.trajectory_uid].finish_reason != "length") for s in steps]
    return torch.tensor(kept).repeat_interleave(lengths)


def seen(steps: Sequence[Step], lengths: Tensor) -> Tensor | None:
    """The mask of `mask_superseded`, [T]: 0 on replies that nobody saw. None: there are none."""
    unseen = {uid: superseded(own) for uid, own in _by_trajectory(steps).items()}
    if not any(unseen.values()):
        return None
    kept = [float(s.step_index not in unseen[s.trajectory_uid]) for s in steps]
    return torch.tensor(kept).repeat_interleave(lengths)


def _by_trajectory(steps: Sequence[Step]) -> dict[str, list[Step]]:
    trajectories: dict[str, list[Step]] = {}
    for step in steps:
        trajectories.setdefault(step.trajectory_uid, []).append(step)
    return trajectories


def coefficients(
    step_lengths: Sequence[int],
    trajectories: Sequence[Hashable],
    config: LossConfig,
    *,
    mask: Tensor | None = None,
    mini_batches: Sequence[int] | None = None,
) -> Tensor:
    """mask · α / N for every response token, [T] float32.

    Args:
        step_lengths: response tokens of each step, S values.
        trajectories: which trajectory each step belongs to, S values.
        mask: [T], 0 where a token is not to be trained; all ones if None.
        mini_batches: the mini-batch (one optimizer step) of each step, S values; N is counted
            within each. One for all if None.

    A trajectory or sequence without a trained token counts nowhere. Sums to 1 over a mini-batch
    under the means. Sources: `token-mean` DAPO, arXiv:2503.14476; `sequence-mean-token-mean` GRPO,
    arXiv:2402.03300; the `-norm` ones Dr.GRPO, arXiv:2503.20783.
    """
    lengths = torch.as_tensor(step_lengths, dtype=torch.int64)
    n_tokens = int(lengths.sum())
    for name, values in (("trajectories", trajectories), ("mini_batches", mini_batches)):
        if values is not None and len(values) != len(lengths):
            raise ColumnError(f"{name} has {len(values)} values for {len(lengths)} steps")
    if mask is not None and mask.shape != (n_tokens,):
        raise ColumnError(f"mask has shape {tuple(mask.shape)} for {n_tokens} response tokens")
    trained = torch.ones(n_tokens) if mask is None else (mask != 0).to("cpu", torch.float32)

    batch_of_step = _codes(mini_batches) if mini_batches is not None else torch.zeros_like(lengths)
    if config.loss_agg_mode.startswith("sequence"):
        sample_of_step = torch.arange(len(lengths))
    else:
        # A trajectory split over mini-batches is a sample of each of them.
        sample_of_step = _codes(list(zip(trajectories, batch_of_step.tolist(), strict=True)))
    sample = torch.repeat_interleave(sample_of_step, lengths)
    batch = torch.repeat_interleave(batch_of_step, lengths)

    tokens_in_sample = _count(sample, trained)
    if config.loss_agg_mode.startswith("token"):
        alpha = torch.ones(n_tokens, dtype=torch.float64)
        n = alpha if config.loss_agg_mode == "token-sum" else _count(batch, trained)[batch]
    else:
        batch_of_sample = torch.zeros(len(tokens_in_sample), dtype=torch.int64)
        batch_of_sample[sample_of_step] = batch_of_step
        n = _count(batch_of_sample, (tokens_in_sample > 0).float())[batch]
        if config.loss_agg_mode in ("trajectory-mean", "sequence-mean-token-mean"):
            alpha = 1 / tokens_in_sample[sample].clamp(min=1)
        else:
            alpha = torch.full(
                (n_tokens,), 1 / (config.loss_scale_factor or 1.0), dtype=torch.float64
            )
    return (trained * alpha / n.clamp(min=1)).float()


def _codes(values: Sequence[Hashable]) -> Tensor:
    """Equal values get equal integers, from 0 in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return torch.tensor([seen.setdefault(v, len(seen)) for v in values], dtype=torch.int64)


def _count(index: Tensor, weights: Tensor) -> Tensor:
    """Sum of `weights` by `index`, in float64: exact for any count a batch can hold."""
    return torch.bincount(index, weights=weights.double())


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The `LossFn` of a configuration. Callable, stateless, picklable."""

    config: LossConfig
    policy: PolicyLoss
    kl: KlConfig = field(default_factory=KlConfig)
    kl_coef: float = 0.0
    """Weight of the KL term; used if `kl.place` is "loss"."""
    token_weights: TokenWeights | None = None
    """Takes this very forward pass, detached, for π_prox and weighs by it; None: the columns
    `prox_log_probs` and `weights` say."""

    @property
    def entropy(self) -> Literal["none", "value", "gradient"]:
        """Form in which the backend computes the policy's entropy."""
        if self.config.entropy_coeff > 0:
            return "gradient"
        return "value" if self.config.report_entropy else "none"

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        """Σ coef · (w · L + kl_coef · KL - entropy_coeff · H) over the tokens of a micro-batch.

        KL and entropy carry no importance weight: they ask nothing of the behaviour policy.
        """
        c = self.config
        policy = self.policy
        in_loss = self.kl.place == "loss"
        names = ("coef", "weights", *policy.columns, *(("ref_log_probs",) if in_loss else ()))
        found: dict[str, Tensor] = {}
        if self.token_weights is not None:
            before = log_probs.detach()
            found = {"prox_log_probs": before, "weights": self.token_weights(before, columns)}
            columns = {**columns, **found}
        needed = dict(zip(names, _require(columns, *names), strict=True))
        # A masked token must not leak a NaN through 0 · NaN, in the value or in the gradient.
        trained = needed["coef"] != 0
        live = trained.nonzero().squeeze(-1)  # once: a GPU is waited for
        x = {name: column[live] for name, column in needed.items()}
        log_probs = log_probs[live]
        coef = x["coef"]
        terms = policy.compute(log_probs, x, c)
        loss = (coef * x["weights"] * terms.loss).sum()
        reported = {f"policy/{name}": flag.detach() for name, flag in terms.flags.items()}
        if terms.ratio is not None:
            reported["policy/ratio"] = terms.ratio.detach()
        if "prox_log_probs" in x:
            log_ratio = (log_probs - x["prox_log_probs"]).detach()
            ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
            reported["policy/kl_k1"] = -log_ratio
            reported["policy/kl_k3"] = ratio - 1 - log_ratio
        if in_loss:
            kl = kl_estimate(log_probs, x["ref_log_probs"], self.kl.estimator)
            loss = loss + self.kl_coef * (coef * kl).sum()
            reported["kl/ref"] = kl.detach()
        if entropy is not None:
            entropy = entropy[live]
            if c.entropy_coeff > 0:
                loss = loss - c.entropy_coeff * (coef * entropy).sum()
            reported["policy/entropy"] = entropy.detach()
        count = trained.sum().double()
        means = {k: Mean(v.double().sum(), count) for k, v in reported.items()}
        return LossOutput(loss, means, found)


@dataclass(frozen=True, slots=True)
class JointLoss:
    """The loss of an update with conversations (SFT) in it: L = Σ_c λ_c · L_c over the channels,
    each a mean of its own. Column `coef` holds λ · mask · α / N of rolled-out tokens and 0 on
    others, `sft_coef` the same of conversations.

    λ_c is the channel's share of the groups of the update, so that a group counts the same in
    whatever mixture it comes. Conversations have no importance weight, KL and entropy.
    """

    sft: BatchLoss
    rl: BatchLoss | None = None
    """None: nothing else is in the batch."""

    @property
    def entropy(self) -> Literal["none", "value", "gradient"]:
        """Form in which the backend computes the policy's entropy."""
        return "none" if self.rl is None else self.rl.entropy

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        """The sum over the tokens of a micro-batch; metric `sft/loss` is L_sft without its λ."""
        coef = columns["sft_coef"]
        own = {"coef": coef, "weights": torch.ones_like(coef)}
        loss = self.sft(log_probs, None, own).loss
        metrics = {"sft/loss": Mean(loss.detach().double(), coef.double().sum())}
        if self.rl is None:
            return LossOutput(loss, metrics)
        rl = self.rl(log_probs, entropy, columns)
        return LossOutput(loss + rl.loss, {**metrics, **rl.metrics}, rl.columns)


def _require(columns: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    if missing := [name for name in names if name not in columns]:
        raise ColumnError(
            f"the batch has no column {', '.join(map(repr, missing))} (it has "
            f"{', '.join(map(repr, columns)) or 'none'}); write it before train_step"
        )
    return [columns[name] for name in names]


def make_loss_fn(
    config: LossConfig, kl: KlConfig | None = None, kl_coef: float | None = None
) -> BatchLoss:
    """The loss function (a `LossFn`) that a backend's `train_step` takes."""
    kl = kl or KlConfig()
    return BatchLoss(config, config.chosen, kl, kl.kl_coef if kl_coef is None else kl_coef)

"""π_prox, the centre of the trust region: where its log-probs come from.

    proximal: rollout      the engine's log-probs; recomputed where a step brought none
    proximal: recompute    `is_first_forward`: the optimizer step's own forward pass, detached
                           otherwise: a forward pass before the first optimizer step on the batch

A batch that is one optimizer step is trained by the very weights that π_prox is of. Then a pass of
its own computes what the step computes again; it is saved wherever nothing needs π_prox sooner.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig, OffPolicyConfig


def is_first_forward(algorithm: AlgorithmConfig, async_training: AsyncTrainingConfig) -> bool:
    """Return whether π_prox may be read off the optimizer step's own forward pass: a batch is one
    step, and rewards, weights and masks need no log-prob but the token's own."""
    return (
        async_training.updates_per_batch == 1
        and algorithm.off_policy.proximal == "recompute"
        and algorithm.off_policy.weighs_tokens_alone
        and algorithm.kl.place != "reward"
        and (algorithm.loss.chosen.prepare is None or not algorithm.loss.chosen.selects)
    )


def proximal_log_probs(
    recompute: Callable[[], Tensor], rollout_log_probs: Tensor, config: OffPolicyConfig
) -> Tensor:
    """log π_prox before the first optimizer step, [T].

    With `proximal: rollout` it is the behaviour policy, recomputed only for want of log-probs.

    Args:
        recompute: log π of every response token under the weights of now.
        rollout_log_probs: log μ, NaN where a step brought none.
    """
    if config.proximal == "recompute":
        return recompute()
    known = torch.isfinite(rollout_log_probs)
    if known.all():
        return rollout_log_probs.clone()
    return torch.where(known, rollout_log_probs, recompute())

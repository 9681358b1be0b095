"""The section `validation`: how the policy is validated (`trainer/validation.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stepwell.trainer.config.calls import CallSampling


class ValidationConfig(CallSampling):
    """Validation of the policy: on `data.val`, or, where agents come by themselves, by the rewards
    of the traffic that is held out (`gateway.holdout`). `temperature`, `top_p`, `top_k` and
    `max_tokens` that are null are `rollout`'s."""

    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 = only before and after."""
    before_train: bool = True
    """Evaluate the model that training begins with."""
    only: bool = False
    """Evaluate the model, or the checkpoint that `run.resume` names, and end."""
    n: int = Field(default=1, ge=1)
    """Rollouts per prompt; the score is their mean."""
    mode: Literal["concurrent", "blocking"] = "concurrent"
    """`concurrent`: evaluations between the first and the last run beside training. `blocking`:
    training waits for them, and their time does not count as its own. Either way the rollouts of an
    evaluation come from one policy version: the next publication waits until they have ended."""
    pass_reward: float = 1.0
    """A rollout with this reward or more passes, for pass@k."""

"""The section `validation`: how the policy is validated (`trainer/validation.py`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stepwell.trainer.section import CallSampling


class ValidationConfig(CallSampling):
    """How the policy is validated: on `data.val`, or, where agents come by themselves, by the
    rewards of the traffic that is held out (`gateway.holdout`). `temperature`, `top_p`, `top_k` and
    `max_tokens` that are null are `rollout`'s."""

    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 = only before and after."""
    n: int = Field(default=1, ge=1)
    """Rollouts per prompt; the score is their mean."""
    mode: Literal["concurrent", "blocking"] = "concurrent"
    """`concurrent`: evaluations between the first and the last run beside training. `blocking`:
    training waits for them, and their time does not count as its own."""
    pin: Literal["hold", "drop"] = "hold"
    """How the rollouts of a concurrent evaluation come from one policy version. `hold`: the next
    publication waits until they have ended (training goes on, its data gets older). `drop`: weights
    are published on time, and rollouts that saw them are left out and counted as `mixed`."""
    pass_reward: float = 1.0
    """A rollout with this reward or more passes, for pass@k."""
    pass_at: tuple[int, ...] = ()
    """k of pass@k, none above `n`; empty = powers of two and `n`."""
    metric: str = Field(default="score", min_length=1)
    """What `trainer.keep_best` goes by: `score`, or a figure such as `val/gsm8k/pass@4`."""
    samples: int = Field(default=64, ge=0)
    """Rows of the sample table given to wandb; the file of an evaluation has all of them."""

    @model_validator(mode="after")
    def _enough_rollouts(self) -> Self:
        if any(not 1 <= k <= self.n for k in self.pass_at):
            raise ValueError(
                f"pass_at is {list(self.pass_at)} with n {self.n}; pass@k needs 1 <= k <= n"
            )
        return self

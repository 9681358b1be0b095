"""How the policy is validated (`trainer/validation.py`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stepwell.trainer.config.base import Section


class ValidationConfig(Section):
    """How the policy is validated; the keys are in the section `trainer`."""

    eval_every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 = only before and after."""
    eval_rollouts: int = Field(default=1, ge=1)
    """Rollouts per evaluation prompt; the score is their mean."""
    eval_mode: Literal["concurrent", "blocking"] = "concurrent"
    """`concurrent`: evaluations between the first and the last run beside training. `blocking`:
    training waits for them, and their time does not count as its own."""
    eval_pin: Literal["hold", "drop"] = "hold"
    """How the rollouts of a concurrent evaluation come from one policy version. `hold`: the next
    publication waits until they have ended (training goes on, its data gets older). `drop`: weights
    are published on time, and rollouts that saw them are left out and counted as `mixed`."""
    eval_pass_reward: float = 1.0
    """A rollout with this reward or more passes, for pass@k."""
    eval_pass_at: tuple[int, ...] = ()
    """k of pass@k, none above `eval_rollouts`; empty = powers of two and `eval_rollouts`."""
    eval_metric: str = Field(default="score", min_length=1)
    """What `keep_best` goes by: `score`, or a figure such as `val/gsm8k/pass@4`."""
    eval_samples: int = Field(default=64, ge=0)
    """Rows of the sample table given to wandb; the file of an evaluation has all of them."""

    @model_validator(mode="after")
    def _enough_rollouts(self) -> Self:
        if any(not 1 <= k <= self.eval_rollouts for k in self.eval_pass_at):
            raise ValueError(
                f"eval_pass_at is {list(self.eval_pass_at)} with eval_rollouts "
                f"{self.eval_rollouts}; pass@k needs 1 <= k <= eval_rollouts"
            )
        return self

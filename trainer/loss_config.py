"""Config sections of the loss: `LossConfig` and `OffPolicyConfig`.

Apart from `losses.py` and `off_policy.py` so that reading a configuration loads no torch.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

Aggregation: TypeAlias = Literal[
    "token-mean", "trajectory-mean", "trajectory-sum", "trajectory-sum-norm"
]


class LossConfig(BaseModel):
    """Clipped policy-gradient loss (`trainer/losses.py`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio π/π_prox earns nothing below 1 - clip_low (A < 0)."""
    clip_high: float = Field(default=0.28, ge=0)
    """… and nothing above 1 + clip_high (A > 0); larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss at A < 0, in units of |A|, however large the ratio; null = unbounded."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    report_entropy: bool = True
    """Measure the policy's entropy even when it carries no bonus (one softmax more)."""
    aggregation: Aggregation = "token-mean"
    """What N and α are: `token-mean` N = tokens of the mini-batch; `trajectory-mean` N =
    trajectories and α = 1 / tokens of the trajectory; `trajectory-sum` N = trajectories;
    `trajectory-sum-norm` the same with α = 1 / sum_norm (Dr.GRPO)."""
    sum_norm: float | None = Field(default=None, gt=0)
    """Constant token count that `trajectory-sum-norm` divides by, e.g. the response budget."""

    @model_validator(mode="after")
    def _sum_norm_set(self) -> LossConfig:
        if (self.aggregation == "trajectory-sum-norm") != (self.sum_norm is not None):
            raise ValueError(
                f"sum_norm is {self.sum_norm} with aggregation {self.aggregation!r}; "
                "set it with 'trajectory-sum-norm' and only there"
            )
        return self


class OffPolicyConfig(BaseModel):
    """Importance weight of a step by its lag (`trainer/off_policy.py`).

    The lag from which a step counts as off-policy is `async_training.staleness_threshold`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cap: float | None = Field(default=1.0, gt=0)
    """Off-policy weight min(cap, ρ); 1 only ever weighs down, null leaves ρ unbounded."""
    on_policy_cap: float | None = Field(default=None, gt=0)
    """Truncate on-policy steps too, min(C, ρ), for engines that differ from the trainer
    numerically; null = weight 1."""
    granularity: Literal["token", "step", "sequence"] = "token"
    """What shares one ρ: each token; a step, by the geometric mean of its tokens; or a step,
    by their product (exact for the whole reply, and of far higher variance)."""
    band: tuple[float, float] | None = None
    """Weight 0 where ρ (of the granularity) lies outside [low, high]; null = no mask."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Weight 0 for a whole step when any of its tokens has ρ below this; null = no veto."""
    mask_on_policy: bool = False
    """`band` and `veto` hold for on-policy steps too."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Off-policy weights are multiplied by decay^(lag - staleness_threshold); 1 = no decay."""
    missing: Literal["drop", "decay"] = "drop"
    """An off-policy step without behaviour log-probs: weight 0, or
    missing_decay^(lag - staleness_threshold). Either way it is counted."""
    missing_decay: float = Field(default=0.5, gt=0, lt=1)

    @model_validator(mode="after")
    def _band_in_order(self) -> OffPolicyConfig:
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"band is {list(self.band)}; give [low, high] with 0 <= low < high")
        return self

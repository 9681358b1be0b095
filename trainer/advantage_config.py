"""Config section `algorithm.advantage`. Apart from `advantages.py`, so that it loads no torch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

AdvantageName: TypeAlias = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
]
Credit: TypeAlias = Literal["trajectory", "step", "token"]


class AdvantageConfig(BaseModel):
    """How rewards become advantages (`trainer/advantages.py`). A bare name is short for
    `{name: …}`: `advantage: rloo`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: AdvantageName = "grpo"
    """The estimator, by verl's name. `gae` trains a critic (`algorithm.critic`); `remax` runs one
    greedy rollout more per prompt as the baseline, which is not trained."""
    credit: Credit | None = None
    """What gets one advantage. `trajectory`: its step rewards are summed and all its tokens share
    one. `step`: each step gets its discounted return-to-go (process rewards); `token`: each token,
    a step's reward being earned at its last token. null = `token` for gae, otherwise
    `trajectory`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per unit of credit: per step, or per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ: 1 = Monte Carlo return - value, 0 = one-step TD error."""
    whiten: bool = True
    """Scale the batch's advantages to mean 0 and variance 1 over tokens, where the estimator says
    so: reinforce_plus_plus, reinforce_plus_plus_baseline, gae."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> AdvantageConfig:
        if self.name == "gae" and self.credit == "trajectory":
            raise ValueError("credit is 'trajectory' with name 'gae'; choose 'step' or 'token'")
        if self.unit == "trajectory" and self.gamma != 1:
            raise ValueError(
                f"gamma is {self.gamma:g} but a trajectory's rewards are summed; "
                "set credit to 'step' or 'token', or leave gamma at 1"
            )
        if self.name != "gae" and self.lam != 1:
            raise ValueError(f"lam is {self.lam:g} but name is {self.name!r}; only gae has one")
        return self

    @property
    def unit(self) -> Credit:
        """`credit`, with its default by name."""
        return self.credit or ("token" if self.name == "gae" else "trajectory")

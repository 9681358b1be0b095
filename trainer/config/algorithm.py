"""The section `algorithm`: advantage, loss, KL to a reference, off-policy correction, critic.

The formulas are in `advantages.py`, `losses.py`, `policy_losses.py`, `kl.py` and `off_policy.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from stepwell.backends.config import CriticConfig
from stepwell.trainer.config.base import Section

AdvantageName: TypeAlias = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reinforce_running",
    "gae",
]
Credit: TypeAlias = Literal["trajectory", "step", "token"]


class AdvantageConfig(Section):
    """How rewards become advantages (`trainer/advantages.py`); the keys are in `algorithm`."""

    adv_estimator: AdvantageName = "grpo"
    """The estimator, by verl's name. `gae` trains a critic (`algorithm.critic`); `remax` runs one
    greedy rollout more per prompt as the baseline, which is not trained; `reinforce_running` is for
    groups of one, as traffic has them: its baseline is the mean reward of late."""
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
    so: reinforce_plus_plus, reinforce_plus_plus_baseline, gae. `reinforce_running` divides only."""

    @model_validator(mode="after")
    def _fits(self) -> AdvantageConfig:
        if self.adv_estimator == "gae" and self.credit == "trajectory":
            raise ValueError(
                "credit is 'trajectory' with adv_estimator 'gae'; choose 'step' or 'token'"
            )
        if self.unit == "trajectory" and self.gamma != 1:
            raise ValueError(
                f"gamma is {self.gamma:g} but a trajectory's rewards are summed; "
                "set credit to 'step' or 'token', or leave gamma at 1"
            )
        if self.adv_estimator != "gae" and self.lam != 1:
            raise ValueError(
                f"lam is {self.lam:g} but adv_estimator is {self.adv_estimator!r}; only gae has one"
            )
        return self

    @property
    def unit(self) -> Credit:
        """`credit`, with its default by estimator."""
        return self.credit or ("token" if self.adv_estimator == "gae" else "trajectory")


Aggregation: TypeAlias = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
    "trajectory-mean",
    "trajectory-sum",
    "trajectory-sum-norm",
]

POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "gpg", "sft")
"""Names that `loss.policy` takes; the formulas are in `trainer/policy_losses.py`."""

_CLIPS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
)
"""clip_ratio_low and clip_ratio_high where they differ from PPO's: GSPO's paper (its ratio is a
geometric mean over the whole sequence), and CISPO without a lower bound up to 5
(arXiv:2510.13786)."""


class SapoConfig(Section):
    """Temperatures of SAPO's gate; the higher, the narrower the trust region."""

    tau_positive: float = Field(default=1.0, gt=0)
    """Where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Where A <= 0; above tau_positive, since pushing tokens down is what destabilises."""


class CovConfig(Section):
    """Which tokens `clip_cov` and `kl_cov` select, by cov = (A - mean A)(log π - mean log π)."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens of a mini-batch that is selected; one at the least."""
    low: float = 1.0
    """`clip_cov` draws among tokens with low < cov < high; `kl_cov` takes the highest."""
    high: float = 5.0
    """See `low`."""
    kl_coef: float = Field(default=1.0, ge=0)
    """`kl_cov`: weight of |log π - log π_prox| on the selected tokens."""

    @model_validator(mode="after")
    def _in_order(self) -> CovConfig:
        if not self.low < self.high:
            raise ValueError(f"cov.low is {self.low}, cov.high {self.high}; low is the smaller")
        return self


class LossConfig(Section):
    """Policy-gradient loss (`trainer/losses.py`)."""

    policy: str = "ppo"
    """`ppo`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `gpg`, `sft`, or the dotted path
    `module:NAME` of a `stepwell.trainer.policy_losses.Policy`."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio π/π_prox earns nothing below 1 - clip_ratio_low (A < 0). Default 0.2; `gspo` 3e-4;
    `cispo` 1, which is no bound."""
    clip_ratio_high: float = Field(default=0.28, ge=0)
    """… and nothing above 1 + clip_ratio_high (A > 0); larger than clip_ratio_low is DAPO's
    clip-higher. Default 0.28; `gspo` 4e-4; `cispo` 4."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """`ppo`: bound of the loss at A < 0, in units of |A|, however large the ratio; null =
    unbounded."""
    sapo: SapoConfig = SapoConfig()
    cov: CovConfig = CovConfig()
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    report_entropy: bool = True
    """Measure the policy's entropy even when it carries no bonus (one softmax more)."""
    loss_agg_mode: Aggregation = "token-mean"
    """What N and α are. `token-mean`: N = tokens of the mini-batch. `trajectory-mean`: N =
    trajectories and α = 1 / tokens of the trajectory; `trajectory-sum` α = 1;
    `trajectory-sum-norm` α = 1 / loss_scale_factor (Dr.GRPO). `sequence-mean-token-mean`,
    `…-token-sum`, `…-token-sum-norm`: the same with one step's response, a sequence, in
    place of a trajectory."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Constant token count that the `-norm` aggregations divide by, e.g. the response budget."""

    @model_validator(mode="before")
    @classmethod
    def _clip_of_policy(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (clip := _CLIPS.get(str(data.get("policy")))):
            return {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1], **data}
        return data

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICY_LOSSES and ":" not in value:
            raise ValueError(
                f"policy is {value!r}; choose one of {', '.join(POLICY_LOSSES)} or give a dotted "
                "path module:NAME"
            )
        return value

    @model_validator(mode="after")
    def _scale_factor_set(self) -> LossConfig:
        if self.loss_agg_mode.endswith("-norm") != (self.loss_scale_factor is not None):
            raise ValueError(
                f"loss_scale_factor is {self.loss_scale_factor} with loss_agg_mode "
                f"{self.loss_agg_mode!r}; set it with 'trajectory-sum-norm' or "
                "'sequence-mean-token-sum-norm', and only there"
            )
        return self


KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


class KlConfig(Section):
    """Penalty for leaving the reference policy, the frozen start model (`trainer/kl.py`)."""

    place: Literal["none", "loss", "reward"] = "none"
    """`loss` adds coef · KL to the loss of every token; `reward` takes it off the rewards."""
    estimator: KlEstimator = "k3"
    """k1, k2, k3 (low variance, never negative), abs; with `+` the value of that estimator and
    the gradient of k2, which is the unbiased one."""
    kl_coef: float = Field(default=1e-3, gt=0)
    """Weight of the penalty; where it starts, with `target_kl`."""
    target_kl: float | None = Field(default=None, gt=0)
    """Adapt the coefficient so that the measured KL stays near this; null = fixed."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Trajectories in which an error of 20 % or more moves the coefficient by 20 %."""

    @model_validator(mode="after")
    def _gradient_only_in_loss(self) -> KlConfig:
        if self.place == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"estimator is {self.estimator!r} with place 'reward', where nothing is "
                f"differentiated; write {self.estimator.removesuffix('+')!r}"
            )
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "staleness_aware": {"clip": (0.2, 0.28)},
        "none": {"granularity": "none", "missing": "keep"},
        "bypass": {"granularity": "none", "missing": "keep", "proximal": "rollout"},
        "decoupled": {"cap": None, "weigh_on_policy": True},
        "tis": {"cap": 2.0, "weigh_on_policy": True},
        "geometric_tis": {"cap": 2.0, "weigh_on_policy": True, "granularity": "step"},
        "sequence_tis": {"cap": 2.0, "weigh_on_policy": True, "granularity": "sequence"},
        "mis": {
            "cap": None,
            "weigh_on_policy": True,
            "band": (0.0, 2.0),
            "mask_on_policy": True,
        },
        "sequence_mis": {
            "cap": None,
            "weigh_on_policy": True,
            "granularity": "sequence",
            "band": (0.0, 2.0),
            "mask_on_policy": True,
        },
        "geometric_mis": {
            "granularity": "none",
            "band_granularity": "step",
            "band": (0.999, 1.001),
            "mask_on_policy": True,
        },
        "icepop": {
            "cap": None,
            "weigh_on_policy": True,
            "band": (0.5, 5.0),
            "mask_on_policy": True,
        },
        "opsm": {"granularity": "none", "opsm": 1e-4, "mask_on_policy": True},
    }
)
"""`off_policy.method` -> what it sets of the other fields. A field that is given wins."""

Method: TypeAlias = Literal[
    "staleness_aware",
    "none",
    "bypass",
    "decoupled",
    "tis",
    "geometric_tis",
    "sequence_tis",
    "mis",
    "sequence_mis",
    "geometric_mis",
    "icepop",
    "opsm",
]


class OffPolicyConfig(Section):
    """Importance weight of a step by its lag (`trainer/off_policy.py`).

    The lag from which a step counts as off-policy is `async_training.staleness_threshold`.
    """

    method: Method = "staleness_aware"
    """A preset of the fields below; what is given beside it wins. `staleness_aware`: the
    defaults. `none`: no weight, no mask. `tis`, `mis`, `icepop`: token-level truncation at 2,
    masking above 2, masking outside [0.5, 5]; `geometric_…`, `sequence_…` with ρ shared over a
    step. `decoupled`: plain ρ. `bypass`: π_prox is the behaviour policy, nothing is recomputed.
    `opsm`: bad steps that the policy has left are masked."""
    proximal: Literal["recompute", "rollout"] = "recompute"
    """π_prox, the centre of the trust region: the policy before the batch, recomputed, or the
    behaviour policy itself (saves a forward pass; ρ is then 1)."""
    granularity: Literal["none", "token", "step", "sequence"] = "token"
    """What shares one weight: each token; a step, by the geometric mean of its tokens; or a
    step, by their product (exact for the whole reply, and of far higher variance). `none`:
    every weight is 1, only masks act."""
    cap: float | None = Field(default=1.0, gt=0)
    """Off-policy weight min(cap, ρ); 1 only ever weighs down, null leaves ρ unbounded."""
    floor: float = Field(default=0.0, ge=0)
    """… and at least this."""
    weigh_on_policy: bool = False
    """On-policy steps are weighed likewise, for engines that differ from the trainer
    numerically; otherwise their weight is 1."""
    on_policy_cap: float | None = Field(default=None, gt=0)
    """A cap of their own for on-policy steps; implies `weigh_on_policy`."""
    band: tuple[float, float] | None = None
    """Weight 0 where ρ lies outside [low, high]; null = no mask."""
    band_granularity: Literal["token", "step", "sequence"] | None = None
    """The ρ that `band` looks at; null = that of the weight, token if there is none."""
    max_divergence: float | None = Field(default=None, gt=0)
    """Weight 0 where the divergence from the behaviour policy is larger; null = no mask."""
    divergence: Literal["k2", "k3"] = "k3"
    """Its estimator: ½ log²ρ, or ρ - 1 - log ρ."""
    divergence_over: Literal["token", "mean", "sum", "max"] = "mean"
    """Each token by itself, or the mean, sum or maximum over the step."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Weight 0 for a whole step when any of its tokens has ρ below this; null = no veto."""
    clip: tuple[float, float] | None = None
    """PPO's clip [low, high], around the behaviour policy: weight 0 where A > 0 and ρ > 1 + high,
    or A < 0 and ρ < 1 - low. There the policy has gone since where A sends it; null = no clip."""
    opsm: float | None = Field(default=None, ge=0)
    """Weight 0 where A < 0 and the step's mean of log μ/π_prox is above this; null = no mask."""
    mask_on_policy: bool = False
    """`band`, `max_divergence`, `veto`, `clip` and `opsm` hold for on-policy steps too."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Off-policy weights are multiplied by decay^(lag - staleness_threshold); 1 = no decay."""
    normalize: bool = False
    """Divide all weights by their mean over the batch: stale steps then count less only beside
    fresher ones."""
    missing: Literal["drop", "decay", "keep"] = "drop"
    """An off-policy step without behaviour log-probs: weight 0,
    missing_decay^(lag - staleness_threshold), or 1. In any case it is counted."""
    missing_decay: float = Field(default=0.5, gt=0, lt=1)
    """Base of that power."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {**PRESETS.get(str(data.get("method", "staleness_aware")), {}), **data}
        return data

    @model_validator(mode="after")
    def _bounds_in_order(self) -> OffPolicyConfig:
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"band is {list(self.band)}; give [low, high] with 0 <= low < high")
        if self.clip is not None and not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0):
            raise ValueError(
                f"clip is {list(self.clip)}; give [low, high] with 0 <= low <= 1 and high >= 0"
            )
        if self.cap is not None and self.floor > self.cap:
            raise ValueError(f"floor ({self.floor:g}) is larger than cap ({self.cap:g})")
        if self.granularity == "none" and self.on_policy_cap is not None:
            raise ValueError(
                f"on_policy_cap is {self.on_policy_cap:g} with granularity 'none', where every "
                "weight is 1; choose token, step or sequence"
            )
        return self


class AlgorithmConfig(AdvantageConfig):
    critic: CriticConfig = CriticConfig()
    """Used with `adv_estimator: gae` alone."""
    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()

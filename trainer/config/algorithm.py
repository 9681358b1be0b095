"""The section `algorithm`: advantage, loss, KL to a reference, off-policy correction, critic.

Here are the keys that all members of a family share. What one member has alone, its hyper-
parameters and its formula, is in its file below `trainer/algorithms/` or in a plug-in's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stepwell.backends.config import CriticConfig
from stepwell.backends.masks import check_mask_name
from stepwell.backends.registry import Registry
from stepwell.datapool.config import Section
from stepwell.trainer.algorithms.advantages.base import Credit, Estimator
from stepwell.trainer.algorithms.advantages.gdpo import GdpoOptions
from stepwell.trainer.algorithms.kl import KlConfig
from stepwell.trainer.algorithms.off_policy.base import OffPolicyMethod
from stepwell.trainer.algorithms.options import Options, own_options
from stepwell.trainer.algorithms.policy_losses.base import PolicyLoss
from stepwell.trainer.algorithms.policy_losses.ppo import PPO
from stepwell.trainer.algorithms.registry import ESTIMATORS, METHODS, POLICY_LOSSES

OwnOptions: TypeAlias = Annotated[SerializeAsAny[Options], Field(validate_default=True)]


def _known(registry: Registry[Any]) -> AfterValidator:
    """A name of the registry's."""

    def check(name: str) -> str:
        registry.load(name)
        return name

    return AfterValidator(check)


def _own(registry: Registry[Any], key: str) -> PlainValidator:
    """The hyper-parameters of the member that `key` names."""

    def read(value: Any, info: ValidationInfo) -> Options:
        name = info.data.get(key)  # none if it is wrong, which is told already
        return own_options(registry.load(name).options, value, name) if name else Options()

    return PlainValidator(read)


class AdvantageConfig(Section):
    """Advantages, computed from rewards (`algorithms/advantages/`); the keys are in `algorithm`."""

    own_keys: ClassVar[Mapping[str, Registry[Any]]] = {"adv_options": ESTIMATORS}

    adv_estimator: Annotated[str, _known(ESTIMATORS)] = "grpo"
    """grpo, dr_grpo, rloo, opo, gpg, grpo_passk, gdpo, remax, reinforce_plus_plus,
    reinforce_plus_plus_baseline, gae (verl's names), reinforce_running, or a plug-in's `Estimator`
    by name or dotted path. `gae` trains a critic (`algorithm.critic`); `remax` runs one greedy
    rollout more per prompt as the baseline, which is not trained; `reinforce_running` is for groups
    of one, as traffic has them: its baseline is the mean reward of late."""
    adv_options: Annotated[OwnOptions, _own(ESTIMATORS, "adv_estimator")] = Options()
    """Hyper-parameters that the estimator has alone."""
    credit: Credit | None = None
    """Unit that gets one advantage. `trajectory`: its step rewards are summed and all its tokens
    share one. `step`: each step gets its discounted return-to-go (process rewards); `token`: each
    token, a step's reward being earned at its last token. null = `token` for gae, otherwise
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
        if self.estimator.critic and self.credit == "trajectory":
            raise ValueError(
                f"credit is 'trajectory' with adv_estimator {self.adv_estimator!r}; choose 'step' "
                "or 'token'"
            )
        if self.unit == "trajectory" and self.gamma != 1:
            raise ValueError(
                f"gamma is {self.gamma:g} but a trajectory's rewards are summed; "
                "set credit to 'step' or 'token', or leave gamma at 1"
            )
        if not self.estimator.critic and self.lam != 1:
            raise ValueError(
                f"lam is {self.lam:g} but adv_estimator is {self.adv_estimator!r}; only gae has one"
            )
        if self.takes_parts and self.unit != "trajectory":
            raise ValueError(
                f"credit is {self.unit!r}, but adv_options.reward_keys name parts of the reward of "
                "a whole trajectory; leave credit at 'trajectory'"
            )
        return self

    @property
    def takes_parts(self) -> bool:
        """Parts of the reward are trained, and not the reward itself."""
        return isinstance(self.adv_options, GdpoOptions) and bool(self.adv_options.reward_keys)

    @property
    def estimator(self) -> Estimator:
        """Load the estimator that `adv_estimator` names."""
        return ESTIMATORS.load(self.adv_estimator)

    @property
    def unit(self) -> Credit:
        """`credit`, with its default by estimator."""
        return self.credit or self.estimator.credit


Aggregation: TypeAlias = Literal[
    "token-mean",
    "token-sum",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
    "trajectory-mean",
    "trajectory-sum",
    "trajectory-sum-norm",
]


class LossConfig(Section):
    """Policy-gradient loss (`algorithms/losses.py`, `algorithms/policy_losses/`)."""

    own_keys: ClassVar[Mapping[str, Registry[Any]]] = {"options": POLICY_LOSSES}

    policy: Annotated[str, _known(POLICY_LOSSES)] = "ppo"
    """ppo, gspo, cispo, sapo, clip_cov, kl_cov, geo_mean, dppo_tv, dppo_kl, dro, gpg, sft, or a
    plug-in's `PolicyLoss` by name or dotted path."""
    options: Annotated[OwnOptions, _own(POLICY_LOSSES, "policy")] = Options()
    """Hyper-parameters that the policy loss has alone."""
    clip_ratio_low: float = Field(default=PPO.clip[0], ge=0, le=1)
    """The ratio r = π/π_prox earns nothing below 1 - clip_ratio_low (A < 0). The default is the
    policy loss's own: `gspo` 3e-4; `cispo` 1, which is no bound. Of `geo_mean` it bounds log r
    (0.4), of `dppo_tv` and `dppo_kl` the divergence (0.15, 0.05). Acts only where r ≠ 1:
    `async_training.require_batches` or `async_training.ppo_epochs` > 1, or `off_policy.method:
    bypass`."""
    clip_ratio_high: float = Field(default=PPO.clip[1], ge=0)
    """… and nothing above 1 + clip_ratio_high (A > 0); larger than clip_ratio_low is DAPO's
    clip-higher. The default is the policy loss's own: `gspo` 4e-4; `cispo` 4. Acts where
    `clip_ratio_low` does."""
    clip_ratio_c: float | None = Field(default=PPO.clip_c, gt=1)
    """`ppo`: bound of the loss at A < 0, in units of |A|, however large the ratio (dual clip).
    `dppo_tv`, `dppo_kl`: bound of the ratio as a weight; 20. null = unbounded. Acts where
    `clip_ratio_low` does."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: a trajectory whose last reply was cut off at the token limit
    trains no token, whoever scored it. It counts in its group's baseline."""
    mask_superseded: bool = True
    """Replies that nobody saw train no token: another try of the same request took their place, as
    the gateway says (docs/design/gateway.md, Retries). Their trajectory's reward stays."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    report_entropy: bool = True
    """Measure the policy's entropy even when it carries no bonus (one softmax more)."""
    loss_agg_mode: Aggregation = "token-mean"
    """Aggregation of the loss: its N and α. `token-mean`: N = tokens of the mini-batch;
    `token-sum`: N = 1, so that a mini-batch moves the policy by as much as it holds.
    `trajectory-mean`: N = trajectories and α = 1 / tokens of the trajectory; `trajectory-sum` α =
    1; `trajectory-sum-norm` α = 1 / loss_scale_factor (Dr.GRPO). `sequence-mean-token-mean`,
    `…-token-sum`, `…-token-sum-norm`: the same with one step's response, a sequence, in place of a
    trajectory."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Constant token count that the `-norm` aggregations divide by, e.g. the response budget."""

    @model_validator(mode="before")
    @classmethod
    def _clip_of_policy(cls, data: Any) -> Any:
        """The policy loss's bounds, where none are given."""
        default = cls.model_fields["policy"].default
        policy = data.get("policy", default) if isinstance(data, Mapping) else None
        if not isinstance(policy, str):
            return data
        try:
            chosen = POLICY_LOSSES.load(policy)
        except ValueError:
            return data  # the field's own validator says so, with the key
        low, high = chosen.clip
        own = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": chosen.clip_c}
        return {**own, **data}

    @model_validator(mode="after")
    def _scale_factor_set(self) -> LossConfig:
        if self.loss_agg_mode.endswith("-norm") != (self.loss_scale_factor is not None):
            raise ValueError(
                f"loss_scale_factor is {self.loss_scale_factor} with loss_agg_mode "
                f"{self.loss_agg_mode!r}; set it with 'trajectory-sum-norm' or "
                "'sequence-mean-token-sum-norm', and only there"
            )
        return self

    @property
    def chosen(self) -> PolicyLoss:
        """Load the policy loss that `policy` names."""
        return POLICY_LOSSES.load(self.policy)


class OffPolicyConfig(Section):
    """Importance weight of a step by its lag (`algorithms/off_policy/`).

    The lag from which a step counts as off-policy is `async_training.staleness_threshold`.
    """

    own_keys: ClassVar[Mapping[str, Registry[Any]]] = {"options": METHODS}

    method: Annotated[str, _known(METHODS)] = "staleness_aware"
    """A preset of the fields below; what is given beside it wins. `staleness_aware`: the
    defaults. `none`: no weight, no mask. `tis`, `mis`, `icepop`: token-level truncation at 2,
    masking above 2, masking outside [0.5, 5]; `geometric_…`, `sequence_…` with ρ shared over a
    step. `decoupled`: plain ρ. `bypass`: π_prox is the behaviour policy, nothing is recomputed.
    `opsm`: bad steps that the policy has left are masked. Or a plug-in's `OffPolicyMethod` by name
    or dotted path."""
    options: Annotated[OwnOptions, _own(METHODS, "method")] = Options()
    """Hyper-parameters that the method has alone."""
    proximal: Literal["recompute", "rollout"] = "recompute"
    """π_prox, the centre of the trust region: the policy before the batch, or the behaviour policy
    itself (ρ is then 1). The policy before the batch takes a forward pass, unless the optimizer
    step's own will do (docs/design/training-math.md, "π_prox")."""
    granularity: Literal["none", "token", "step", "sequence"] = "token"
    """Unit that shares one weight: each token; a step, by the geometric mean of its tokens; or a
    step, by their product (exact for the whole reply, and of far higher variance). `none`: every
    weight is 1, only masks act."""
    cap: float | None = Field(default=1.0, gt=0)
    """Off-policy weight min(cap, ρ); 1 only ever weighs down, null leaves ρ unbounded."""
    weigh_on_policy: bool = False
    """On-policy steps are weighed likewise, for engines that differ from the trainer
    numerically; otherwise their weight is 1."""
    band: tuple[float, float] | None = None
    """Weight 0 where ρ lies outside [low, high]; null = no mask."""
    band_granularity: Literal["token", "step", "sequence"] | None = None
    """The ρ that `band` looks at; null = that of the weight, token if there is none."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Weight 0 for a whole step when any of its tokens has ρ below this; null = no veto."""
    clip: tuple[float, float] | None = None
    """PPO's clip [low, high], around the behaviour policy: weight 0 where A > 0 and ρ > 1 + high,
    or A < 0 and ρ < 1 - low. There the policy has gone since where A sends it; null = no clip."""
    opsm: float | None = Field(default=None, ge=0)
    """Weight 0 where A < 0 and the step's mean of log μ/π_prox is above this; null = no mask."""
    mask_on_policy: bool = False
    """`band`, `veto`, `clip` and `opsm` hold for on-policy steps too."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """Off-policy weights are multiplied by decay^(lag - staleness_threshold); 1 = no decay."""
    missing: Literal["drop", "decay", "keep"] = "drop"
    """An off-policy step without behaviour log-probs: weight 0, ½^(lag - staleness_threshold), or
    1. In any case it is counted."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        method = data.get("method", "staleness_aware") if isinstance(data, Mapping) else None
        if not isinstance(method, str):
            return data
        try:
            return {**METHODS.load(method).preset, **data}
        except ValueError:
            return data  # the field's own validator says so, with the key

    @model_validator(mode="after")
    def _bounds_in_order(self) -> OffPolicyConfig:
        if self.band is not None and not 0 <= self.band[0] < self.band[1]:
            raise ValueError(f"band is {list(self.band)}; give [low, high] with 0 <= low < high")
        if self.clip is not None and not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0):
            raise ValueError(
                f"clip is {list(self.clip)}; give [low, high] with 0 <= low <= 1 and high >= 0"
            )
        return self

    @property
    def weighs_tokens_alone(self) -> bool:
        """A token's weight follows from its own log-probs, and no other token's."""
        alone = ("none", "token", None)
        return (
            self.granularity in alone
            and (self.band is None or self.band_granularity in alone)
            and self.veto is None
            and self.opsm is None
            and self.chosen.weigh is None
        )

    @property
    def chosen(self) -> OffPolicyMethod:
        """Load the method that `method` names."""
        return METHODS.load(self.method)


class SftConfig(Section):
    """The loss on conversations that somebody has written (`data.sft`), -log π of what the
    assistant said: of `kind: sft`, and of the channel `sft` in `sampling.channels`."""

    loss_mask_type: str = "auto"
    """Method that finds the assistant's tokens (slime's `--loss-mask-type`): `prefix` with any chat
    template, also as qwen, qwen3, qwen3_5, llama3; `distill_qwen` with that of DeepSeek's distilled
    models; `auto` chooses by the template. Or the path of a class or function of your own,
    `package.module:Name` or `path/to/file.py:Name` (docs/design/data.md, "Messages")."""
    loss_agg_mode: Literal["token-mean", "trajectory-mean"] = "token-mean"
    """`token-mean`: a mean over the assistant's tokens of the update; `trajectory-mean`: each
    conversation counts the same."""

    @field_validator("loss_mask_type")
    @classmethod
    def _mask_is_known(cls, name: str) -> str:
        return check_mask_name(name)

    @property
    def loss(self) -> LossConfig:
        """The same as `algorithm.loss` is for what was rolled out."""
        return LossConfig(policy="sft", loss_agg_mode=self.loss_agg_mode, report_entropy=False)


class AlgorithmConfig(AdvantageConfig):
    kind: Literal["rl", "sft"] = "rl"
    """`rl`: rollouts are trained by their rewards. `sft`: the conversations of `data.sft` by their
    likelihood, and nothing is rolled out but for validation."""
    sft: SftConfig = SftConfig()
    critic: CriticConfig = CriticConfig()
    """Used with `adv_estimator: gae` alone."""
    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()

    @model_validator(mode="after")
    def _penalty_is_trained(self) -> AlgorithmConfig:
        if self.kl.place == "reward" and self.takes_parts:
            raise ValueError(
                "kl.place is 'reward', but adv_options.reward_keys train parts of the reward in "
                "its place, so nothing would hold the policy; set kl.place to 'loss'"
            )
        return self

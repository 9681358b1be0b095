"""Composes the packages' config sections into `RunConfig`.

Owns: the sections of the trainer itself, and what sections demand of each other. Does not own the
other sections: each package defines its own (`datapool/config.py`, `gateway/config.py`,
`backends/config.py`, …). Files are read in `presets.py`. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stepwell.backends.config import EngineConfig
from stepwell.backends.critic_config import CriticConfig
from stepwell.backends.registry import BACKENDS
from stepwell.backends.torch_config import TorchBackendConfig
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.types import TRAIN
from stepwell.gateway.config import GatewayConfig
from stepwell.trainer.advantage_config import AdvantageConfig
from stepwell.trainer.data_config import DataConfig
from stepwell.trainer.loss_config import KlConfig, LossConfig, OffPolicyConfig
from stepwell.trainer.rewards.config import RewardConfig
from stepwell.trainer.sampling_config import (
    AsyncTrainingConfig,
    SamplingConfig,
    ValidationConfig,
    check_sampling,
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Names the run; part of its folder."""
    dir: Path
    """Everything the run writes: metrics.jsonl, summary.json, weights, checkpoints, logs."""
    seed: int = Field(default=0, ge=0)
    resume: Literal["auto", "never"] | NonNegativeInt | Path = "auto"
    """`auto` goes on from the last checkpoint in `dir`; `never` removes the run and starts over;
    a step goes back to that one; a path starts from the checkpoint of another run."""


class RolloutConfig(Section):
    agent: str
    """Dotted path of `async def agent(task, base_url, api_key) -> float | None`."""
    n: int = Field(default=8, ge=1)
    """Rollouts per prompt (the group size of GRPO); `n_samples_per_prompt` is read too."""
    min_n: int = Field(default=2, ge=1)
    """A group is trained with fewer rollouts, down to this many; below it is dropped."""
    max_outstanding_groups: int = Field(default=16, ge=1)
    """Groups open or ready at once: how far generation may run ahead of training."""
    concurrency: int = Field(default=64, ge=1)
    """Agents running at once in one worker."""
    workers: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)
    """One rollout may take this long; then it is aborted with the reason "timeout"."""
    group_deadline_s: float = Field(default=300.0, gt=0)
    """A group is closed after this long with the rollouts it has."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries per rollout; the last failure aborts the rollout for good. An attempt that the worker,
    the gateway, its engines or the pool failed is made again and not counted."""
    reward: RewardConfig | None = None
    """Scores rollouts whose agent returned None: a reward function's name, or a section."""

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_n(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "n_samples_per_prompt" not in raw:
            return raw
        if "n" in raw:
            raise ValueError(
                f"n is {raw['n']} and n_samples_per_prompt is {raw['n_samples_per_prompt']}: both "
                "name the rollouts per prompt; set n alone"
            )
        return {("n" if key == "n_samples_per_prompt" else key): raw[key] for key in raw}

    @model_validator(mode="after")
    def _bounds(self) -> RolloutConfig:
        if self.min_n > self.n:
            raise ValueError(f"min_n ({self.min_n}) is larger than n ({self.n})")
        if self.timeout_s * self.max_attempts > self.group_deadline_s:
            raise ValueError(
                f"timeout_s × max_attempts = {self.timeout_s:g} × {self.max_attempts} exceeds "
                f"group_deadline_s ({self.group_deadline_s:g}); the last attempt could never finish"
            )
        return self


class TrainerSection(ValidationConfig):
    total_steps: int = Field(ge=1)
    """Optimizer steps."""
    backend: str = "torch"
    """Training backend: a name that `stepwell backends` lists, or a dotted path `module:Class`."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompt groups per optimizer step."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints. Groups are acked with the checkpoint that holds them."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints with the highest evaluation score kept besides; each evaluated step has one."""
    keep_weights: int = Field(default=2, ge=1)
    """Published weight versions kept on disk for the engines."""
    save_debug_rollout_data: str | None = None
    """Record every batch: a folder, or a file name with {rollout_id} in it."""
    load_debug_rollout_data: str | None = None
    """Train on a recording, without engine, gateway or pool; losses as in the recorded run."""
    starvation_timeout_s: float = Field(default=600.0, gt=0)
    """Without a ready group for this long the run stops and says what it waited for."""

    @field_validator("backend")
    @classmethod
    def _registered(cls, backend: str) -> str:
        return BACKENDS.check(backend)


class LoggingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online if WANDB_API_KEY is set, otherwise offline."""
    tensorboard: bool = False
    """Write event files to `run.dir`/tensorboard."""
    project: str = "stepwell"
    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """`auto`: live display on a terminal, otherwise a line per step."""


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    """Used with `advantage: gae` alone."""
    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()


class ClusterConfig(Section):
    address: str | None = None
    """A Ray cluster to join ("auto", "host:port"); null starts one on this machine."""
    object_store_mb: int = Field(default=256, ge=80)
    """Ray's shared memory on a cluster of our own."""
    placement: Literal["auto", "disaggregated", "colocated"] = "auto"
    """Trainer ranks and engines on GPUs of their own, or sharing them; `auto`: of their own where
    there are enough. Without GPUs every part is a plain actor. `stepwell train --dry-run` tells."""
    engines: int = Field(default=1, ge=1)
    """Engines that are launched; the gateway spreads requests over them."""
    gpus_per_engine: int = Field(default=1, ge=1)
    """Of an SGLang engine, on as few nodes as hold them (its `--tp-size` goes into
    engine.extra_args)."""


class ModelConfig(Section):
    path: Path
    """Hugging Face directory: weights, config and tokenizer with a chat template."""


class RunConfig(Section):
    """The whole configuration of `stepwell train`."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerSection
    backend: TorchBackendConfig = TorchBackendConfig()
    engine: EngineConfig
    gateway: GatewayConfig = GatewayConfig()
    pool: PoolConfig = PoolConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _batches_can_be_had(self) -> RunConfig:
        check_sampling(
            self.async_training,
            self.sampling,
            self.trainer,
            groups_per_step=self.trainer.groups_per_step,
            keep_best=self.trainer.keep_best,
            max_outstanding_groups=self.rollout.max_outstanding_groups,
        )
        return self

    @model_validator(mode="after")
    def _limits_stand_in_one_place(self) -> RunConfig:
        section = "channels.train" if TRAIN in self.pool.channels else "default"
        channel = self.pool.channel(TRAIN)
        own = {
            "max_queue_size": "async_training.max_queue_size",
            "max_outstanding_groups": "rollout.max_outstanding_groups",
        }
        for name, key in own.items():
            if (value := getattr(channel, name)) is not None:
                raise ValueError(
                    f"pool.{section}.{name} is {value}, but the run limits its train channel by "
                    f"{key}; set {key}={value} and remove the other"
                )
        return self

    @model_validator(mode="after")
    def _transport_fits(self) -> RunConfig:
        transport, lora = self.engine.weight_transport, getattr(self.backend, "lora", None)
        if transport == "lora" and lora is None:
            raise ValueError(
                "engine.weight_transport is 'lora', but backend.lora is not set: there is no "
                "adapter to publish; set backend.lora, or the transport to 'disk'"
            )
        refuses = self.engine.kind == "sglang" and "--enable-lora" not in self.engine.extra_args
        if transport == "lora" and refuses:
            raise ValueError(
                "engine.weight_transport is 'lora', but engine.extra_args has no '--enable-lora': "
                "SGLang would refuse adapters; add '--enable-lora', '--max-lora-rank' and "
                "'--lora-target-modules'"
            )
        return self

    @model_validator(mode="after")
    def _released_memory_cuts_calls(self) -> RunConfig:
        if not self.engine.release_memory:
            return self
        if not self.async_training.partial_rollout:
            raise ValueError(
                "engine.release_memory is true, which interrupts generation while the trainer "
                "computes, but async_training.partial_rollout is false; set it to true"
            )
        if self.cluster.placement == "disaggregated":
            raise ValueError(
                "engine.release_memory is true with cluster.placement 'disaggregated': there is "
                "no memory to share; set placement to 'colocated', or release_memory to false"
            )
        return self

    @model_validator(mode="after")
    def _bypass_has_log_probs(self) -> RunConfig:
        off_policy = self.algorithm.off_policy
        if off_policy.proximal == "rollout" and not self.async_training.use_rollout_log_probs:
            raise ValueError(
                f"algorithm.off_policy.method is {off_policy.method!r} with proximal 'rollout', "
                "but async_training.use_rollout_log_probs is false: there would be no log-probs "
                "to use; set it to true, or proximal to 'recompute'"
            )
        return self

    @model_validator(mode="after")
    def _paths_exist(self, info: ValidationInfo) -> RunConfig:
        if info.context is not None and not info.context["paths_exist"]:
            return self
        if not (self.model.path / "config.json").is_file():
            raise ValueError(
                f"model.path is {str(self.model.path)!r}, which has no config.json (looked in "
                f"{self.model.path.resolve()}); point it at a Hugging Face model directory"
            )
        return self

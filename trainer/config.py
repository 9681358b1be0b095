"""Composes the packages' config sections into `RunConfig` and reads it from YAML.

Owns: the sections of the trainer itself, the order of layers (preset < `--set` overrides) and the
wording of every configuration error. Does not own the other sections: each package defines its own
(`datapool/config.py`, `gateway/config.py`, `backends/config.py`, …). Loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from backends.config import EngineConfig
from backends.torch_config import TorchBackendConfig
from datapool.config import PoolConfig
from gateway.config import GatewayConfig
from trainer.data_config import DataConfig
from trainer.errors import ConfigError
from trainer.loss_config import LossConfig, OffPolicyConfig

_HERE = Path(__file__).resolve().parent
PRESET_DIRS = (Path("configs"), _HERE.parent / "configs", _HERE / "presets")
"""Where `--config NAME` looks: the working folder, the source checkout, the installed package."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Names the run; part of its folder."""
    dir: Path
    """Everything the run writes: metrics.jsonl, summary.json, weights, checkpoints, logs."""
    seed: int = Field(default=0, ge=0)
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the last checkpoint in `dir`; `never` removes the run and starts over."""


class AsyncTrainingConfig(Section):
    staleness_threshold: float = Field(default=0.1, ge=0)
    """Lag, in weight publications, beyond which a step is off-policy: kept, but down-weighted."""
    trigger_parameter_sync_step: int = Field(default=4, ge=1)
    """Optimizer steps between weight publications."""
    require_batches: int = Field(default=1, ge=1)
    """Batches (of `trainer.groups_per_step` groups) taken from the pool at once."""
    partial_rollout: bool = False
    """Interrupt generation at a weight update and resume it under the new weights."""
    use_rollout_log_probs: bool = True
    """Use the engine's log-probs as the behaviour policy; false recomputes them in the trainer."""
    max_queue_size: int | None = Field(default=None, ge=1)
    """Ready groups kept before the oldest is dropped; null = unlimited."""


class RolloutConfig(Section):
    agent: str
    """Dotted path of `async def agent(task, base_url, api_key) -> float | None`."""
    n: int = Field(default=8, ge=1)
    """Rollouts per prompt (the group size of GRPO)."""
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
    """Tries per rollout; the last failure aborts the rollout for good."""
    reward: str | None = None
    """Dotted path of a reward function for rollouts whose agent returned None."""

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


class TrainerSection(Section):
    total_steps: int = Field(ge=1)
    """Optimizer steps."""
    backend: str = "torch"
    """Training backend: a registered name or a dotted path `module:Class`."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompt groups per optimizer step."""
    eval_every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 = only before and after."""
    eval_rollouts: int = Field(default=1, ge=1)
    """Rollouts per evaluation prompt; the score is their mean."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints. Groups are acked with the checkpoint that holds them."""
    keep_checkpoints: int = Field(default=2, ge=1)
    keep_weights: int = Field(default=2, ge=1)
    """Published weight versions kept on disk for the engines."""
    starvation_timeout_s: float = Field(default=600.0, gt=0)
    """Without a ready group for this long the run stops and says what it waited for."""


class LoggingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online if WANDB_API_KEY is set, otherwise offline."""
    project: str = "stepwell"
    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """`auto`: live display on a terminal, otherwise a line per step."""


class AlgorithmConfig(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    loss: LossConfig = LossConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()


class ClusterConfig(Section):
    address: str | None = None
    """A Ray cluster to join ("auto", "host:port"); null starts one on this machine."""
    object_store_mb: int = Field(default=256, ge=80)
    """Ray's shared memory on a cluster of our own."""


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
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerSection
    backend: TorchBackendConfig = TorchBackendConfig()
    engine: EngineConfig
    gateway: GatewayConfig = GatewayConfig()
    pool: PoolConfig = PoolConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _paths_exist(self) -> RunConfig:
        if not (self.model.path / "config.json").is_file():
            raise ValueError(
                f"model.path is {str(self.model.path)!r}, which has no config.json; "
                "point it at a Hugging Face model directory"
            )
        return self


def find_config(name: str) -> Path:
    """The YAML file for `--config NAME` (a path, or a preset's name without `.yaml`)."""
    if Path(name).is_file():
        return Path(name)
    for folder in PRESET_DIRS:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = sorted({p.stem for folder in PRESET_DIRS for p in folder.glob("*.yaml")})
    hint = f"; did you mean {close[0]!r}?" if (close := _nearest(name, known)) else ""
    raise ConfigError(
        f"--config is {name!r}: no such file or preset{hint} (presets: {', '.join(known)})"
    )


def load_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a preset or file, apply `key=value` overrides, validate.

    Raises:
        ConfigError: one line per problem, each naming the key, the value and the remedy.
    """
    path = find_config(name)
    try:
        base = OmegaConf.load(path)
        if not isinstance(base, DictConfig):
            raise ConfigError(f"{path}: holds a {type(base).__name__}; write a mapping of sections")
        for override in overrides:
            key, sep, _ = override.partition("=")
            if not sep or not key:
                raise ConfigError(
                    f"override {override!r} is not KEY=VALUE, e.g. trainer.total_steps=5"
                )
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        raw = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(f"{path}: {str(e).splitlines()[0]}") from e
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as e:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _explain(e))) from None


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        parts, known = _locate(problem["loc"])
        key = ".".join(parts)
        if problem["type"] == "extra_forbidden":
            close = _nearest(parts[-1], known)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            yield f"{key} is not a known key; {hint}"
        elif problem["type"] == "missing":
            yield f"{key} is missing; add it"
        elif problem["type"] == "union_tag_invalid":
            context = problem["ctx"]
            tag = context["discriminator"].strip("'")
            yield f"{key}.{tag} is {context['tag']!r}; it should be {context['expected_tags']}"
        elif problem["type"] == "value_error":
            yield f"{key + ': ' if key else ''}{problem['ctx']['error']}"
        else:
            message = problem["msg"].removeprefix("Input should be ")
            yield f"{key} is {problem['input']!r:.80}; it should be {message}"


def _locate(location: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """The key as the file spells it, and the keys known beside it. pydantic puts the tag of a
    tagged union into the location (data.train.reasoning_gym.size); the file has no such key."""
    parts: list[str] = []
    known = list(RunConfig.model_fields)
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in map(str, location):
        tagged = [m for m in candidates if part in _tags(m)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            known = list(tagged[0].model_fields)
            continue
        parts.append(part)
        fields = {name: f for m in candidates for name, f in m.model_fields.items()}
        known = list(fields)
        candidates = _models_in(fields[part].annotation) if part in fields else []
    return parts, known


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    kind = model.model_fields.get("kind")
    return getattr(kind.annotation, "__args__", ()) if kind is not None else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in getattr(annotation, "__args__", ()) for m in _models_in(inner)]


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.5)

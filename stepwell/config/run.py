"""Composes the packages' config sections into `RunConfig`.

Owns: the sections of the run itself, and what sections demand of each other. Does not own the
other sections: each room defines its own (`datapool/config.py`, `gateway/config.py`, …). Files are
read in `config/load.py`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from stepwell.backends.config import MAX_SEED, EngineConfig, TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.hub import RUNS, is_hub_id
from stepwell.backends.registry import BACKEND_NAMES, ENGINE_NAMES
from stepwell.datapool.config import ChannelConfig, PoolConfig, Section, at_home
from stepwell.datapool.types import SFT, TRAIN
from stepwell.gateway.config import GatewayConfig
from stepwell.layout import ARCHIVE, POOL
from stepwell.trainer.config import (
    SLIME_FORM,
    AlgorithmConfig,
    AsyncTrainingConfig,
    DataConfig,
    HarborSource,
    PublishConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
    ValidationConfig,
    VerifiersSource,
    check_sampling,
    episodes_of,
)
from stepwell.trainer.config.harness import HARNESS
from stepwell.trainer.sampling import sft_channel, train_channel

STARVATION_S = 600.0
"""Seconds without a further ready group that end a run whose groups have no longer deadline."""
SERVED_BYTES = 1_000_000_000
"""`pool.memory_limit_bytes` of `stepwell serve`, where it is null."""


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Names the run; part of its folder. Default: as the file is called, else the agent's module.
    """
    dir: Path = Path(RUNS)
    """Everything the run writes: metrics.jsonl, summary.json, weights, checkpoints, logs. Default
    runs/NAME."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Random seed of every part that draws and has no seed of its own."""
    resume: Literal["auto", "never"] | NonNegativeInt | Path = "auto"
    """`auto` goes on from the last checkpoint in `dir`; `never` removes the run and starts over;
    a step goes back to that one; a path starts from the checkpoint of another run."""

    @field_validator("name")
    @classmethod
    def _name_is_a_folders(cls, value: str) -> str:
        if value in (".", ".."):  # what a start over removes would be that of the folder above
            raise ValueError(f"is {value!r}, which is another folder; give the run's own a name")
        return value

    @field_validator("resume", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):  # of YAML's yes and no; as text it would be a path
            raise PydanticCustomError("resume", "Input should be auto, never, a step or a path")
        return value

    @model_validator(mode="before")
    @classmethod
    def _dir_of_name(cls, raw: Any) -> Any:
        name = raw.get("name", "run") if isinstance(raw, Mapping) else None
        if isinstance(name, str) and "dir" not in raw:
            return {**raw, "dir": Path(RUNS) / name}
        return raw


_NOT_IN_PROJECTS = frozenset("/\\#?%:")


class LoggingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online if WANDB_API_KEY is set, otherwise offline."""
    tensorboard: bool = False
    """Write event files to `run.dir`/tensorboard."""
    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port at `gateway.host` where Prometheus reads the trainer's metrics, without a key; the
    gateway has its own at `/metrics`."""
    names: Literal["stepwell", "verl"] = "stepwell"
    """`verl`: wandb and TensorBoard get figures that verl has, too, under its names as well
    (docs/metrics.md); Prometheus and `metrics.jsonl` have ours alone."""
    project: str = Field(default="stepwell", min_length=1, max_length=128)
    """The project in wandb; WANDB_ENTITY names its team."""
    console: Literal["plain", "quiet"] = "plain"
    """A line per optimizer step, or evaluations and the summary alone."""

    @field_validator("project")
    @classmethod
    def _project_is_one(cls, value: str) -> str:
        if found := _NOT_IN_PROJECTS & {*value}:
            raise ValueError(
                f"is {value!r}, and wandb takes no {min(found)} in the name of a project; name the "
                "team of team/project by the variable WANDB_ENTITY"
            )
        return value


class ClusterConfig(Section):
    address: str | None = None
    """A Ray cluster to join ("auto", "host:port"); null starts one on this machine."""
    object_store_mb: int = Field(default=256, ge=80)
    """Ray's shared memory on a cluster of our own."""
    placement: Literal["auto", "disaggregated", "colocated"] = "auto"
    """Trainer ranks and engines on GPUs of their own, or sharing them; `auto`: of their own where
    there are enough. Without GPUs every part is a plain actor."""
    engines: int = Field(default=1, ge=1)
    """Engines that are launched; the gateway spreads requests over them."""
    gpus_per_engine: int = Field(default=1, ge=1)
    """GPUs of an SGLang engine, on as few nodes as hold them (`--tp-size`, unless
    engine.extra_args splits the model otherwise). Where it shares them with ranks, on one."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of every process of the run, ranks and engines on other nodes
    included, e.g. `NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, `PYTORCH_CUDA_ALLOC_CONF`. What
    `engine.env` says for engines goes before it."""


class ModelConfig(Section):
    path: Path
    """Hugging Face directory (weights, config, tokenizer with a chat template), or a model's id on
    the hub, such as `Qwen/Qwen3-0.6B`, which is downloaded into its cache. Where none is named, the
    quickstart's, with the quickstart's settings beneath those that are given; the command says
    which."""
    revision: str | None = None
    """Commit, tag or branch on the hub; null is the newest."""


class RunConfig(Section):
    """The whole configuration of `stepwell train` and `stepwell serve`."""

    run: RunSection = RunSection()
    model: ModelConfig
    data: DataConfig | None = None
    """Null where `rollout.agent` is: agents bring their own tasks. With `algorithm.kind: sft` what
    is given as `train`, or as text alone, is `sft`."""
    rollout: RolloutConfig = RolloutConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    validation: ValidationConfig = ValidationConfig()
    publish: PublishConfig = PublishConfig()
    backend: TorchBackendConfig = TorchBackendConfig()
    engine: EngineConfig
    gateway: GatewayConfig = GatewayConfig()
    pool: PoolConfig = PoolConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _said_once(cls, raw: Any) -> Any:
        """`model.path` and `run.seed` hold for every part that is given none of its own."""
        if not isinstance(raw, Mapping):
            return raw
        given = {name: dict(v) for name, v in raw.items() if isinstance(v, Mapping)}
        filled: dict[str, Any] = {name: given.get(name, v) for name, v in raw.items()}
        for name in ("engine", "backend", "gateway"):
            if name not in filled:
                filled[name] = given[name] = {}

        def fill(section: Any, key: str, value: Any) -> None:
            if isinstance(section, dict) and value is not None and section.get(key) is None:
                section[key] = value

        model, seed = given.get("model", {}).get("path"), given.get("run", {}).get("seed")
        model = str(at_home(Path(model))) if isinstance(model, str) else model
        fill(given.get("engine"), "model_path", model)
        fill(given.get("gateway"), "tokenizer_path", model)
        for section in (given.get("engine"), given.get("backend")):
            fill(section, "seed", seed)
        data = given.get("data", {})
        only_sft = given.get("algorithm", {}).get("kind") == "sft"
        if only_sft and isinstance(data.get("train"), Mapping):
            keys = data.get("sft") or {}  # some of its keys alone
            if isinstance(keys, Mapping) and not keys.keys() & {"kind", "path"}:
                data["sft"] = {**data.pop("train"), **keys}
        for name, source in list(given.get("data", {}).items()):
            if isinstance(source, Mapping):
                given["data"][name] = source = dict(source)
                fill(source, "shuffle_seed", seed)
        if (played := episodes_of(filled.get("data"))) is not None:
            rollout = filled.get("rollout", {})
            if isinstance(rollout, Mapping) and rollout.get("agent") in (None, HARNESS):
                own, keys = played.harness(model), rollout.get("harness") or {}
                if isinstance(keys, Mapping):
                    env = {**own["env"], **(keys.get("env") or {})}
                    filled["rollout"] = {**rollout, "harness": {**own, **keys, "env": env}}
        return filled

    @model_validator(mode="after")
    def _plug_ins_are_known(self) -> RunConfig:
        try:
            BACKEND_NAMES.entry(self.trainer.backend)
            ENGINE_NAMES.entry(self.engine.kind)
        except BackendConfigError as e:
            raise ValueError(str(e)) from e
        return self

    @model_validator(mode="after")
    def _batches_can_be_had(self) -> RunConfig:
        check_sampling(
            self.async_training,
            self.sampling,
            self.validation,
            train_batch_size=self.trainer.train_batch_size,
            keep_best=self.trainer.keep_best,
            max_outstanding_groups=self.max_outstanding_groups,
        )
        return self

    @property
    def max_outstanding_groups(self) -> int | None:
        """Groups open or ready at once; None: agents come by themselves, and nothing may hold them
        back."""
        by_themselves = self.rollout.agent is None and self.algorithm.kind == "rl"
        return None if by_themselves else self.rollout.max_outstanding_groups

    @property
    def starvation_timeout_s(self) -> float:
        """Seconds without a further ready group that end the run."""
        longest = max(STARVATION_S, self.rollout.group_deadline_s)
        return self.trainer.starvation_timeout_s or longest

    @property
    def only_scored(self) -> bool:
        """True if only agents give rewards: without one, a train group is of no use."""
        by_themselves = self.rollout.agent is None and self.algorithm.kind == "rl"
        return by_themselves and self.rollout.reward is None

    @property
    def sft_share(self) -> float:
        """Share of a batch's groups that are conversations (`data.sft`)."""
        if self.algorithm.kind == "sft":
            return 1.0
        channels = self.sampling.channels or {"train": 1.0}
        return channels.get("sft", 0.0) / sum(channels.values())

    @property
    def serves(self) -> bool:
        """True if there are engines and a gateway. Only a run that trains conversations alone and
        does not validate has none."""
        return self.sft_share < 1 or self.rollout.agent is not None

    @property
    def has_tasks(self) -> bool:
        """True if there are tasks to run an agent on."""
        data = self.data
        return data is not None and (data.train is not None or data.val is not None)

    @model_validator(mode="after")
    def _channels_have_data(self) -> RunConfig:
        kind, channels = self.algorithm.kind, self.sampling.channels
        if kind == "sft" and channels is not None and channels.keys() != {SFT}:
            raise ValueError(
                f"algorithm.kind is 'sft', where conversations alone are trained, but "
                f"sampling.channels is {channels}; set algorithm.kind to rl to mix them with "
                "rollouts, or sampling.channels to null"
            )
        if kind == "rl" and channels is not None and TRAIN not in channels:
            raise ValueError(
                f"sampling.channels is {channels}, without train: nothing that was rolled out "
                "would be trained; set algorithm.kind to sft instead, or give train a weight"
            )
        has_sft = self.data is not None and self.data.sft is not None
        if self.sft_share and not has_sft:
            key = "algorithm.kind is 'sft'" if kind == "sft" else f"sampling.channels is {channels}"
            raise ValueError(
                f"{key}, but data.sft is missing: there are no conversations; give some, e.g. "
                "data.sft: conversations.jsonl"
            )
        if has_sft and not self.sft_share:
            raise ValueError(
                f"data.sft is given, but sampling.channels is {channels or 'null'}: nobody trains "
                "on it; set sampling.channels to {train: 0.9, sft: 0.1} or the like, or "
                "algorithm.kind to sft"
            )
        where = self.trainer.save_debug_rollout_data or ""
        if self.sft_share and where.endswith(SLIME_FORM):
            raise ValueError(
                f"trainer.save_debug_rollout_data is {where!r}, of slime's form, which holds "
                f"rollouts alone, and data.sft is trained; name a file without {SLIME_FORM}"
            )
        if kind == "sft" and self.publish.guard is not None:
            raise ValueError(
                "publish.guard judges versions by the rewards of rollouts, and with algorithm.kind "
                "'sft' there are none; set publish.guard to null"
            )
        return self

    @property
    def trained_channels(self) -> dict[str, ChannelConfig]:
        """The pool's channels that are trained, as the trainer needs them."""
        channels = {
            TRAIN: train_channel(
                self.pool.channel(TRAIN),
                self.async_training,
                self.sampling,
                self.max_outstanding_groups,
                only_scored=self.only_scored,
            )
        }
        if self.sft_share:
            batch = self.trainer.train_batch_size * self.async_training.require_batches
            channels[SFT] = sft_channel(self.pool.channel(SFT), batch)
        return channels

    @property
    def pool_of_run(self) -> PoolConfig:
        """The pool as this run starts it: what is trained limited as the trainer needs it."""
        # Absolute: an actor's working directory need not be ours.
        journal = self.pool.journal_dir or self.run.dir.absolute() / POOL
        channels = {**self.pool.channels, **self.trained_channels}
        archive = self.pool.archive.dir or self.run.dir / ARCHIVE
        places = {
            "journal_dir": journal,
            "archive": self.pool.archive.model_copy(update={"dir": archive.absolute()}),
        }
        return self.pool.model_copy(update={"channels": channels, **places})

    @property
    def pool_of_served(self) -> PoolConfig:
        """The same for `stepwell serve`. Until a trainer is attached, agents do not wait for one,
        and what is recorded takes memory up to a limit only. A pool without a journal has nowhere
        else to put it: there they wait."""
        pool = self.pool_of_run
        if pool.durability == "none":
            return pool
        train = pool.channel(TRAIN).model_copy(update={"limit_without_consumer": False})
        memory = pool.memory_limit_bytes or SERVED_BYTES
        channels = {**pool.channels, TRAIN: train}
        return pool.model_copy(update={"channels": channels, "memory_limit_bytes": memory})

    @model_validator(mode="after")
    def _agents_and_tasks_come_together(self) -> RunConfig:
        agent, only_sft = self.rollout.agent, self.algorithm.kind == "sft"
        if agent is not None and only_sft and not self.has_tasks:
            raise ValueError(
                f"rollout.agent is {agent!r}, which with algorithm.kind 'sft' only validates, but "
                "data.val is missing; give tasks, or set rollout.agent to null"
            )
        wanted = self.data is not None and (self.data.train is not None or only_sft)
        if agent is not None and not wanted:
            raise ValueError(
                f"rollout.agent is {agent!r}, but data is missing: there are no tasks to run it "
                "on; give some, e.g. data: tasks.jsonl, or set rollout.agent to null if agents "
                "call the gateway by themselves"
            )
        sources = () if self.data is None else (self.data.train, self.data.val)
        of_harbor = any(isinstance(s, HarborSource) for s in sources)
        if self.rollout.harness is None and of_harbor:
            raise ValueError(
                "data is of kind harbor, whose tasks a harness works on, but rollout.harness is "
                "missing; name one, e.g. rollout.harness: claude_code"
            )
        harness = self.rollout.harness
        if any(isinstance(s, VerifiersSource) for s in sources):
            preset = None if harness is None else harness.preset
            name, other = ("agent", agent) if agent != HARNESS else ("harness", preset)
            if other is not None:
                raise ValueError(
                    "data is of kind verifiers, whose episodes are the rollouts, but "
                    f"rollout.{name} is {other!r}; leave it out (verifiers' own harness is in "
                    "data.train.config)"
                )
        pictures = [key for s in sources if (key := getattr(s, "image_key", None)) is not None]
        for name in ("harness", "environment"):
            if pictures and getattr(self.rollout, name) is not None:
                raise ValueError(
                    f"data's image_key is {pictures[0]!r}, but rollout.{name} is given a task's "
                    "text alone; leave image_key out, or set rollout.agent to one of yours, which "
                    'has the pictures in task["messages"]'
                )
        container = None if self.rollout.harness is None else self.rollout.harness.sandbox
        others = [s for s in sources if s is not None and not isinstance(s, HarborSource)]
        if container is not None and container.needs_image and others:
            raise ValueError(
                f"rollout.harness.sandbox.kind is {container.kind!r}, but image is missing; name "
                "one that holds the harness (only Harbor tasks bring their own)"
            )
        if harness is not None and of_harbor and not others:
            for key, value in (("grade", harness.grade), ("sandbox.image", harness.sandbox.image)):
                if value is not None:
                    raise ValueError(
                        f"rollout.harness.{key} is given, but Harbor tasks bring their own, which "
                        "alone count; leave it out"
                    )
        if agent is None and self.has_tasks:
            raise ValueError(
                "data is given, but rollout.agent is null: nobody runs an agent on its tasks; set "
                "rollout.agent to package.module:function, or data to null if agents call the "
                "gateway by themselves"
            )
        if agent is None and not only_sft and self.algorithm.estimator.greedy:
            raise ValueError(
                f"algorithm.adv_estimator is {self.algorithm.adv_estimator!r}, which needs a "
                "greedy rollout in each group, but rollout.agent is null: agents that come by "
                "themselves make none; choose another, e.g. grpo"
            )
        return self

    @model_validator(mode="after")
    def _limits_stand_in_one_place(self) -> RunConfig:
        section = "channels.train" if TRAIN in self.pool.channels else "default"
        channel = self.pool.channel(TRAIN)
        own = {
            "max_queue_size": "async_training.max_queue_size",
            "max_outstanding_groups": "rollout.max_outstanding_groups",
            "group_deadline_s": "rollout.group_deadline_s",
        }
        for name, key in own.items():
            if (value := getattr(channel, name)) is not None:
                raise ValueError(
                    f"pool.{section}.{name} is {value}, but the run limits its train channel by "
                    f"{key}; set {key}={value} and remove the other"
                )
        return self

    @model_validator(mode="after")
    def _prompts_have_room(self) -> RunConfig:
        for part, context in (
            ("engine", self.engine.context_length),
            ("gateway", self.gateway.context_length),
        ):
            for name in ("rollout", "validation"):
                longest = getattr(self, name).max_tokens
                if context is not None and longest is not None and longest >= context:
                    raise ValueError(
                        f"{name}.max_tokens is {longest} but {part}.context_length is {context}; "
                        "leave room for a prompt"
                    )
        return self

    @model_validator(mode="after")
    def _profiled_where_it_computes(self) -> RunConfig:
        ranks = getattr(self.backend, "ranks", 1)
        if self.trainer.profile_steps and ranks > 1:
            raise ValueError(
                f"trainer.profile_steps is {list(self.trainer.profile_steps)}, but backend.ranks "
                f"is {ranks}: the trainer's process, which is traced, only waits for them; profile "
                "one rank, or leave profile_steps empty"
            )
        return self

    @model_validator(mode="after")
    def _guard_has_what_it_goes_back_to(self) -> RunConfig:
        if self.publish.guard is not None and self.trainer.keep_weights == 1:
            raise ValueError(
                f"publish.guard is set, but trainer.keep_weights is {self.trainer.keep_weights}: a "
                "version that is rolled back needs the one before; set trainer.keep_weights=2"
            )
        window = self.async_training.window(self.trainer.train_batch_size)
        rewards = window * self.rollout.n
        if (
            self.publish.guard is not None
            and self.async_training.has_windows
            and self.publish.guard.n > rewards
        ):
            raise ValueError(
                f"publish.guard.n is {self.publish.guard.n}, but with async_training.mode="
                f"{self.async_training.mode} a version is judged by the {rewards} rewards of its "
                "window (trigger_parameter_sync_step x train_batch_size x rollout.n); lower n, or "
                "raise one of these"
            )
        return self

    @model_validator(mode="after")
    def _transport_fits(self) -> RunConfig:
        # Others are asked for theirs (`run/checks.py`): that imports them.
        is_ours, lora = self.trainer.backend == "torch", self.backend.lora
        if self.engine.weight_transport == "lora" and is_ours and lora is None:
            raise ValueError(
                "engine.weight_transport is 'lora', but backend.lora is not set: there is no "
                "adapter to publish; set backend.lora, or the transport to 'disk'"
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
        if info.context is not None and not info.context["here"]:
            return self
        if is_hub_id(self.model.path):  # `load_config` fetches it
            return self
        if not (self.model.path / "config.json").is_file():
            is_made = self.model.path.parts[:1] == (RUNS,)
            remedy = "make it as the comment beside it says, or " if is_made else ""
            raise ValueError(
                f"model.path is {str(self.model.path)!r}, which has no config.json (looked in "
                f"{self.model.path.resolve()}); {remedy}point it at a Hugging Face model directory"
            )
        return self

"""This module puts a run's trainer together from its configuration and its running parts, the same
for all who bring groups: rollouts of its own, traffic, a recording.

Owns which part is given what of the configuration. Starts nothing but the trainer's own model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from stepwell.backends.base import TrainingBackend, build_backend
from stepwell.backends.engines.commands import Launch, torch_version
from stepwell.backends.engines.kinds import command_line
from stepwell.backends.torch.critic import Critic
from stepwell.backends.weights import Transport, WeightStore, build_transport
from stepwell.backends.weights.sender import Sender
from stepwell.cluster.parts import Parts
from stepwell.cluster.placement import Placement
from stepwell.config.run import RunConfig
from stepwell.datapool.files.copies import TrainerCopies
from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.types import SFT, TRAIN, VAL
from stepwell.layout import CHECKPOINTS, WEIGHTS
from stepwell.run.resume import origin
from stepwell.trainer.batches import Batches, TrainedChannel
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.data import Conversations, PromptSource
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.ledger import LEDGER, Ledger
from stepwell.trainer.live import Traffic, TrafficValidator
from stepwell.trainer.loop import Trainer
from stepwell.trainer.metrics import Phases
from stepwell.trainer.publish.publisher import Publisher
from stepwell.trainer.recording import Recorder
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.samples import Trained, samples_path
from stepwell.trainer.sampling import GroupFilter, Pace, credit_limit, drops_surplus
from stepwell.trainer.scoring import FlatRewards, Scorer
from stepwell.trainer.sft import sft_producer
from stepwell.trainer.threads import ComputeThread
from stepwell.trainer.updater import Updater
from stepwell.trainer.validation import TaskValidator, Validator

log = logging.getLogger(__name__)


@contextmanager
def build_trainer(
    config: RunConfig,
    parts: Parts,
    source: PromptSource | None,
    conversations: PromptSource | None = None,
    *,
    backend: TrainingBackend | None = None,
    checkpoints: CheckpointStore | None = None,
    ledger: Ledger | None = None,
    notify: Callable[[str], None] = log.info,
) -> Iterator[Trainer]:
    """A trainer over the running `parts`; closed on leaving.

    Args:
        source: of the prompts that this run's agents are given; None: traffic is trained on, or
            conversations alone.
        conversations: to train on, if the run does (`data.sft`).
        backend: None: the configured one.
        checkpoints: None: in the run's folder.
        ledger: None: beside the checkpoints.
        notify: shows the user a line.
    """
    folder = config.run.dir / CHECKPOINTS
    ledger = ledger or Ledger(folder / LEDGER)
    scorer = Scorer(
        config.rollout.reward,
        config.model.path,
        config.rollout.overlong_buffer,
        skip_special_tokens=config.rollout.skip_special_tokens,
        flat_rewards=FlatRewards(
            samples_path(config.run.dir, 0),
            within_group=config.algorithm.estimator.group_baseline,
        ),
        branches=config.rollout.trained_branches,
    )
    channels: list[TrainedChannel] = []
    validator: Validator
    share = config.sft_share

    def train_on(channel: str, producer: GroupProducer) -> None:
        keeper = LeaseKeeper(parts.pool, channel, config.pool.channel(channel).lease_s)
        patience_s = config.starvation_timeout_s
        channels.append(TrainedChannel(channel, producer, keeper, parts.pool, patience_s))

    looks: dict[str, Any] = {"folder": config.run.dir, "tokenizer_path": config.model.path}
    prompts = source if share < 1 else conversations  # of those a Producer only evaluates
    if prompts is None:
        train_on(TRAIN, Traffic(parts.pool, ledger, config.rollout.min_n))
        lease_s = config.pool.channel(VAL).lease_s
        validator = TrafficValidator(
            config.validation, parts.pool, scorer, lease_s=lease_s, **looks
        )
    else:
        window = config.trainer.train_batch_size
        producer = Producer(
            config.rollout,
            prompts,
            parts.pool,
            list(parts.workers),
            ledger,
            pace=Pace(credit_limit(config.async_training, config.sampling, window, share)),
            drops_surplus=drops_surplus(config.async_training),
            n_greedy=int(config.algorithm.estimator.greedy),
            notify=notify,
        )
        validator = TaskValidator(config.validation, parts.pool, scorer, producer, **looks)
        if share < 1:
            train_on(TRAIN, producer)
    if conversations is not None and config.data is not None and config.data.sft is not None:
        rows = Conversations(config.data.sft, config.algorithm.sft, config.model.path)
        train_on(SFT, sft_producer(config.rollout, conversations, rows, parts.pool, ledger))
    if backend is None:
        backend = build_backend(
            config.trainer.backend,
            config.backend,
            config.model.path,
            **parts.placement.backend_options(),
        )
    updater = build_updater(config, backend, **parts.placement.critic_options())
    compute, phases = ComputeThread(), Phases()
    publisher = Publisher(
        config.publish,
        config.async_training,
        parts.engines,
        weight_store(config),
        updater,
        compute,
        pool=parts.pool,
        producer=channels[0].producer,
        phases=phases,
        transport=transport_of(config, parts.placement, backend, notify),
        lends_memory=config.engine.release_memory,
        patience_s=config.starvation_timeout_s,
        notify=notify,
    )
    batches = Batches(
        config.trainer,
        config.async_training,
        channels,
        scorer,
        GroupFilter(
            config.sampling,
            config.model.path,
            _slime_arguments(config),
            estimator=config.algorithm.estimator,
        ),
        updater.progress,
        phases,
        folder=config.run.dir,
        sft_share=share,
        scored=publisher.scored,
        notify=notify,
    )
    checkpoints = checkpoints or CheckpointStore(
        folder,
        config.trainer.keep_checkpoints,
        config.trainer.keep_best,
        origin=origin(config, None if source is None else len(source)),
    )
    recorder: Recorder | None = None
    if (where := config.trainer.save_debug_rollout_data) is not None:
        updates_per_batch = config.async_training.updates_per_batch
        copies = TrainerCopies(config.run.dir)
        recorder = Recorder(where, config.model.path, updates_per_batch, copies)
    trainer = Trainer(
        config.trainer,
        batches,
        updater,
        publisher,
        validator,
        checkpoints,
        compute,
        phases,
        Trained(
            config.run.dir,
            config.model.path,
            sample_groups=config.trainer.sample_groups,
            sample_mb=config.trainer.sample_mb,
            rollout_samples=config.trainer.rollout_samples,
        ),
        recorder,
        folder=config.run.dir,
        notify=notify,
    )
    try:
        yield trainer
    finally:
        trainer.close()
        ledger.close()


def build_updater(config: RunConfig, backend: TrainingBackend, **critic_options: Any) -> Updater:
    """The mathematics of a run, over the model of `backend`. `critic_options` are `Critic`'s."""
    return Updater(
        config.algorithm,
        config.async_training,
        backend,
        build_critic(config, **critic_options),
        seed=config.run.seed,
        branches=config.rollout.trained_branches,
    )


def _slime_arguments(config: RunConfig) -> dict[str, Any]:
    """Return a run's values for functions of slime's form, by slime's names."""
    return {
        "n_samples_per_prompt": config.rollout.n,
        "rollout_batch_size": config.trainer.train_batch_size
        * config.async_training.require_batches,
        "over_sampling_batch_size": config.sampling.over_sampling_batch_size,
        "rollout_temperature": config.rollout.temperature,
        "rollout_top_p": config.rollout.top_p,
        "rollout_top_k": config.rollout.top_k,
        "rollout_max_response_len": config.rollout.max_tokens,
    }


def transport_of(
    config: RunConfig, placement: Placement, backend: TrainingBackend, notify: Callable[[str], None]
) -> Transport:
    """Return the transport of a run; another one in place of what its processes cannot do. A
    backend that leads none sends what it has written from here."""
    lead = Sender().call if backend.lacks("lead") else backend.lead
    engine, cluster = config.engine, config.cluster
    planned = placement.plan
    share_gpu = planned.mode == "colocated" and bool(planned.ranks and planned.engines)
    wanted, why, instead = engine.weight_transport, None, "disk" if share_gpu else "nccl"
    if wanted == "ipc":
        why = shares_nothing(config, placement)
    elif wanted == "nccl" and share_gpu:
        why = "rank 0 and an engine share a GPU, and NCCL takes one process on each"
    if why is not None:
        notify(f"engine.weight_transport is {wanted!r}, but {why}; {instead} is used")
        engine = engine.model_copy(update={"weight_transport": instead})
    one_gpu = share_gpu and cluster.engines * cluster.gpus_per_engine == 1
    return build_transport(engine, lead, on_host=not one_gpu)


def shares_nothing(config: RunConfig, placement: Placement) -> str | None:
    """Return why rank 0 and the engines cannot share memory; None: they can."""
    engine = config.engine
    if engine.is_attached:
        return "nobody knows the torch of engines that somebody else runs"
    if not placement.is_one_machine():
        return "rank 0 and the engines are on several machines"
    mine = version("torch")
    line = command_line(engine, Launch(port=1, model_path=str(engine.model_path)))
    theirs = torch_version(line.argv[0])
    if mine == theirs:
        return None
    return f"the trainer has torch {mine}, and {line.argv[0]} {theirs or 'none'}"


def weight_store(config: RunConfig) -> WeightStore:
    """Return the store of published versions. Version 0 is the model; adapters have none."""
    adapters = config.engine.weight_transport == "lora"
    return WeightStore(
        config.run.dir / WEIGHTS,
        keep=config.trainer.keep_weights,
        base=None if adapters else config.model.path,
    )


def build_critic(config: RunConfig, **options: Any) -> Critic | None:
    """The value model of an estimator that needs one, as `gae` does; None with any other. `options`
    are `Critic`'s."""
    if not config.algorithm.estimator.critic:
        return None
    return Critic(config.algorithm.critic, config.backend, config.model.path, **options)

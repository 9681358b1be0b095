"""The sections `async_training` (who generates when) and `sampling` (which groups are trained).

`trainer/sampling.py` does what they say.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from stepwell.datapool.config import Section
from stepwell.trainer.config.validation import ValidationConfig

Mode: TypeAlias = Literal["sync", "one_step_off", "async"]

LAG_LIMIT: dict[Mode, int] = {"sync": 0, "one_step_off": 1}
"""Mode with windows -> windows that generation runs ahead of training: policy versions that a
token may be behind when its group is taken."""


class AsyncTrainingConfig(Section):
    """Timing of generation and training beside each other. A *window* is what is trained between
    two publications: `trigger_parameter_sync_step` × `trainer.train_batch_size` groups, divided by
    `ppo_epochs`."""

    mode: Mode = "async"
    """`sync`: a window's groups are begun once its weights are on the engines, and training waits
    for them. `one_step_off`: the next window is generated while this one is trained. `async`:
    generation never waits for a publication; `rollout.max_outstanding_groups` bounds it."""
    staleness_threshold: float = Field(default=0.1, ge=0)
    """Lag, in weight publications, beyond which a step is off-policy: kept, but down-weighted."""
    trigger_parameter_sync_step: int = Field(default=4, ge=1)
    """Optimizer steps between weight publications."""
    require_batches: int = Field(default=1, ge=1)
    """Batches (of `trainer.train_batch_size` groups) taken from the pool at once: one optimizer
    step each, with the proximal log-probs of all of them taken before the first."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Times that what was taken from the pool is trained on: `require_batches` optimizer steps
    each, in order the first time and in a seeded order then. π_prox, advantages and importance
    weights stay those of before the first."""
    partial_rollout: bool = False
    """Interrupt generation at a weight update and resume it under the new weights (each token keeps
    the version that sampled it); false lets running requests end under the old ones first. In
    `sync` mode true also keeps what over-sampling left unfinished for the next window."""
    use_rollout_log_probs: bool = True
    """Use the engine's log-probs as the behaviour policy; false recomputes them in the trainer."""
    max_queue_size: int | None = Field(default=None, ge=1)
    """Ready groups kept before the oldest is dropped; null = unlimited."""

    @property
    def has_windows(self) -> bool:
        """True if generation waits for publications."""
        return self.mode in LAG_LIMIT

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps on what is taken from the pool at once."""
        return self.require_batches * self.ppo_epochs

    def window(self, train_batch_size: int) -> int:
        """Groups that are trained between two publications, in modes with windows."""
        return train_batch_size * self.trigger_parameter_sync_step // self.ppo_epochs


class SamplingConfig(Section):
    """Groups to generate in excess, and groups to train."""

    channels: dict[Literal["train", "sft"], Annotated[float, Field(gt=0)]] | None = None
    """Weights of the pool's channels, e.g. {train: 0.9, sft: 0.1}: batches take their groups by
    these shares, exactly on average. Rollouts, in `train`, have the loss `algorithm.loss`, and
    conversations (`data.sft`), in `sft`, that of `algorithm.sft`. null: rollouts alone, or, with
    `algorithm.kind: sft`, conversations alone."""

    over_sampling_batch_size: int | None = Field(default=None, ge=1)
    """Groups begun per window, of which the first to be ready are trained: stragglers do not hold
    it up. What is left is dropped and its prompts are issued again (`sync`), or counts towards the
    next window (`one_step_off`, or `partial_rollout`). null = no more than a window trains. With
    `over_sampling_filter`: groups taken per batch, in any mode."""
    over_sampling_filter: str | None = None
    """Function that chooses the groups of a batch to train: `over_sampling_batch_size` are taken,
    and those that it puts first are kept. `sort_by_reward_std` (the rewards that differ the most),
    or the dotted path of a function for slime's `--over-sampling-filter-path`, `(args, samples) ->
    samples`. The rest is dropped and counted as `over_sampling`. null: none is left out."""
    filters: tuple[str, ...] = ()
    """Judges of a scored group, in order; what the first that objects says is the reason it is
    dropped and counted under, and another group takes its place. `nonzero_std` (DAPO's dynamic
    sampling, arXiv:2503.14476: not all rewards are equal), `all_correct(1.0)`, `all_wrong(0.0)`,
    `slime_filter(package.module:function)`, which is called with whole samples, or dotted paths of
    `(GroupInfo) -> Verdict | None` (`datapool/selection`)."""
    max_refills: int | None = Field(default=None, ge=1)
    """Times in a row that a batch may be filled up after filtering before the run stops with an
    error (verl's `max_num_gen_batches`); null = as often as it takes."""


def check_sampling(
    training: AsyncTrainingConfig,
    sampling: SamplingConfig,
    validation: ValidationConfig,
    *,
    train_batch_size: int,
    keep_best: int,
    max_outstanding_groups: int | None,
) -> None:
    """Refuse settings under which a batch could never be had, or that say nothing together.

    Args:
        max_outstanding_groups: None: agents come by themselves, and nothing holds them back.

    Raises:
        ValueError: naming the keys, their values and the remedy.
    """
    batch = train_batch_size * training.require_batches
    window = training.window(train_batch_size)
    over = sampling.over_sampling_batch_size
    batch_is = (
        f"trainer.train_batch_size × async_training.require_batches = "
        f"{train_batch_size} × {training.require_batches}"
    )
    if (name := sampling.over_sampling_filter) is not None:
        if over is None or over < batch:
            raise ValueError(
                f"sampling.over_sampling_filter is {name!r} with over_sampling_batch_size {over}; "
                f"it chooses among more groups than a batch takes, {batch_is} = {batch}: set "
                f"over_sampling_batch_size to {2 * batch}, say"
            )
        batch, batch_is = over, "sampling.over_sampling_batch_size"
        window = over * (window // (train_batch_size * training.require_batches))
    if max_outstanding_groups is not None and max_outstanding_groups < batch:
        raise ValueError(
            f"rollout.max_outstanding_groups is {max_outstanding_groups}, but a batch takes "
            f"{batch_is} = {batch} groups, so it could never be ready; raise it to {batch} or more"
        )
    if training.max_queue_size is not None and training.max_queue_size < batch:
        raise ValueError(
            f"async_training.max_queue_size is {training.max_queue_size}, but a batch takes "
            f"{batch_is} = {batch} groups, so it could never be ready; raise it to {batch} or more"
        )
    if training.has_windows and max_outstanding_groups is None:
        raise ValueError(
            f"async_training.mode is {training.mode!r}, in which generation waits for training, "
            "but rollout.agent is null: agents that come by themselves wait for nobody; set "
            "async_training.mode=async"
        )
    if training.has_windows and training.trigger_parameter_sync_step % training.updates_per_batch:
        raise ValueError(
            f"async_training.mode is {training.mode!r} with trigger_parameter_sync_step "
            f"{training.trigger_parameter_sync_step}, require_batches {training.require_batches} "
            f"and ppo_epochs {training.ppo_epochs}: a batch would span two publications, and the "
            "second waits for it; make trigger_parameter_sync_step a multiple of require_batches × "
            f"ppo_epochs = {training.updates_per_batch}"
        )
    if keep_best and validation.every % training.trigger_parameter_sync_step:
        raise ValueError(
            f"trainer.keep_best is {keep_best} with validation.every {validation.every} and "
            f"async_training.trigger_parameter_sync_step {training.trigger_parameter_sync_step}: "
            "weights are evaluated as they were published, so that the checkpoint of an evaluated "
            "step holds others; make validation.every a multiple of trigger_parameter_sync_step"
        )
    if over is None or (name is not None and not training.has_windows):
        return
    over = window if name is not None else over
    if not training.has_windows:
        raise ValueError(
            f"sampling.over_sampling_batch_size is {over} with async_training.mode 'async', where "
            "generation always runs ahead; set rollout.max_outstanding_groups instead, or mode "
            "sync or one_step_off"
        )
    if max_outstanding_groups is None or not window <= over <= max_outstanding_groups:
        raise ValueError(
            f"sampling.over_sampling_batch_size is {over}; it lies between the groups of a window, "
            "trainer.train_batch_size × async_training.trigger_parameter_sync_step / ppo_epochs = "
            f"{window}, and rollout.max_outstanding_groups = {max_outstanding_groups}"
        )

"""Steps as slime's samples.

slime's words: a *rollout* is one trajectory, a *sample* is one sequence that is trained on. A
trajectory of several branches is one rollout of several samples (slime: "compact", "fan-out")::

    trajectory  P R0 tool R1          rollout 7   sample  P    | R0 tool R1     loss_mask 1 0 1
                P R0 R2 (a branch)                sample  P R0 | R2             loss_mask 1
                Q R3    (a side call)             sample  Q    | R3             loss_mask 1

Every response token is trained in exactly one sample; what cannot be trained is masked, and
counted.

Owns: what Steps become. Does not own: the sample's fields (`sample.py`), rows (`rows.py`), what
slime makes of samples (`backend.py`). Needs no slime.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.backends.errors import BatchError
from stepwell.backends.rows import TokenRow, build_rows
from stepwell.backends.slime.sample import SAMPLE, SlimeSample
from stepwell.datapool.types import GREEDY, Group, Step, Trajectory, superseded

NO_LOG_PROBS = "no_log_probs"
OTHER_TEMPERATURE = "other_temperature"
SUPERSEDED = "superseded"
PADDING = "padding"
"""Key of a sample's metadata: true for one that stands for a rollout that its group lacks."""

_OF_ONE = ("trajectory_uid", "step_indices", "raw_reward")
"""Keys of a sample's metadata that say nothing of another rollout of its group."""

_STATUS = {
    "length": SlimeSample.Status.TRUNCATED,
    "abort": SlimeSample.Status.ABORTED,
}
"""By the finish reason of the last call; any other is `COMPLETED`."""


Samples: TypeAlias = list[list[list[SlimeSample]]]
"""By prompt, by trajectory: the shape of a rollout function's result with fan-out."""

TrainInputs: TypeAlias = Callable[[TokenRow], dict[str, Any] | None]
"""Row with pictures -> `multimodal_train_inputs` of its sample."""


def not_trained(row: TokenRow) -> None:
    """`TrainInputs` of samples that rewards, filters and logs read and nobody trains: none."""


class Converted(NamedTuple):
    """Samples that `to_samples` made of groups, with counts of masked tokens and padded
    rollouts."""

    samples: Samples
    untrained: Counter[str]
    """Response tokens that are masked, by reason."""
    padded: int
    """Rollouts that stand for those that a group lacks."""

    @property
    def flat(self) -> list[SlimeSample]:
        return [s for group in self.samples for rollout in group for s in rollout]

    def require_trainable(self) -> None:
        """Raises BatchError: no token of it can be trained."""
        if all(s.remove_sample for s in self.flat):
            raise BatchError(
                f"no response token of {len(self.samples)} groups can be trained: "
                f"{dict(self.untrained) or 'they hold no rollouts'}; steps need the temperature "
                "that slime scores at (--rollout-temperature)"
            )


def settle_log_probs(args: Any, samples: Sequence[Any]) -> int:
    """Make log-probs known of all samples or of none, which is all that slime can express: beside
    samples that have them, one without trains nothing.

    Args:
        args: slime's.
        samples: slime's or ours; changed in place.

    Returns:
        Tokens that are masked now.

    Raises:
        BatchError: none has log-probs, and slime's arguments ask for them.
    """
    without = [s for s in samples if s.rollout_log_probs is None]
    if len(without) == len(samples):
        names = ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics")
        asked = [name for name in names if getattr(args, name, False)]
        if asked:
            raise BatchError(
                f"{asked[0]} is set, and no sample has rollout_log_probs: text-only rollouts have "
                f"none; leave --{asked[0].replace('_', '-')} out, or let the agents call through "
                "the gateway"
            )
        return 0
    masked = 0
    for sample in without:
        masked += sum(sample.loss_mask)
        sample.loss_mask = [0] * sample.response_length
        sample.rollout_log_probs = [0.0] * sample.response_length
        sample.remove_sample = True
    return masked


def groups_of(steps: Iterable[Step]) -> list[Group]:
    """Steps as groups of trajectories, in the order of their first steps."""
    found: dict[str, dict[str, list[Step]]] = {}
    for step in steps:
        found.setdefault(step.prompt_uid, {}).setdefault(step.trajectory_uid, []).append(step)
    return [
        Group(
            prompt_uid,
            tuple(
                Trajectory(uid, prompt_uid, tuple(sorted(own, key=lambda s: s.step_index)))
                for uid, own in trajectories.items()
            ),
        )
        for prompt_uid, trajectories in found.items()
    ]


def rollouts_of(group: Group) -> list[Trajectory]:
    """Trajectories to train: all but the greedy ones, whose reward is only a baseline."""
    return [t for t in group.trajectories if not t.metadata.get(GREEDY)]


def to_samples(
    groups: Sequence[Group],
    *,
    first_group: int = 0,
    first_rollout: int = 0,
    group_size: int | None = None,
    temperature: float | None = None,
    inputs: TrainInputs | None = None,
) -> Converted:
    """The samples of `groups`.

    Args:
        first_group, first_rollout: where `group_index` and `rollout_id` start.
        group_size: rollouts that slime counts on; those that a group lacks are stood for by a
            masked copy of its first sample, with the metadata `PADDING`. None: as many as it has.
        temperature: at which slime will score; steps sampled at another one are masked. None: not
            checked.
        inputs: called for the rows with pictures. None: they are refused.

    If no step has behaviour log-probs (text-only rollouts), neither have the samples: slime
    recomputes them and corrects nothing. Beside others that have them the tokens of such steps are
    masked, since slime cannot leave out the correction for some.

    Raises:
        BatchError: a trajectory without a reward, a group of more than `group_size` or without a
            rollout, pictures without `inputs`, `multi_modal_data`, or routing that cannot be
            carried over.
    """
    made: Samples = []
    untrained: Counter[str] = Counter()
    padded = 0
    known = any(s.rollout_log_probs is not None for g in groups for s in g.steps)
    next_id = first_rollout
    for group_index, group in enumerate(groups, first_group):
        rollouts = [
            _samples(t, group, temperature, known, untrained, inputs) for t in rollouts_of(group)
        ]
        missing = 0 if group_size is None else group_size - len(rollouts)
        if missing < 0 or not rollouts:
            raise BatchError(
                f"group {group.prompt_uid!r} has {len(rollouts)} rollouts, slime trains "
                f"{group_size or 'at least 1'} (--n-samples-per-prompt); leave it out"
            )
        rollouts += [[_padding(rollouts)] for _ in range(missing)]
        padded += missing
        for rollout in rollouts:
            for sample in rollout:
                sample.group_index = group_index
                sample.index = sample.rollout_id = next_id
            next_id += 1
        made.append(rollouts)
    routed = {s.rollout_routed_experts is not None for g in made for r in g for s in r}
    if len(routed) > 1:
        raise BatchError(
            "some steps have routed_experts and some have none; slime replays routing for all or "
            "none: return it from all engines"
        )
    return Converted(made, untrained, padded)


def _samples(
    trajectory: Trajectory,
    group: Group,
    temperature: float | None,
    known: bool,
    untrained: Counter[str],
    inputs: TrainInputs | None,
) -> list[SlimeSample]:
    reward = trajectory.reward
    if reward is None:
        raise BatchError(
            f"trajectory {trajectory.trajectory_uid!r} has no reward; score it, or leave its group "
            "out: missing is not 0"
        )
    steps = trajectory.steps
    for step in steps:
        if step.multi_modal_data:
            raise BatchError(
                f"{step.label} has multi_modal_data; slime is given text and `Step.pictures`"
            )
        if step.pictures and inputs is None:
            raise BatchError(
                f"{step.label} has pictures; set hf_checkpoint "
                "(--hf-checkpoint) to the folder of the model that reads them"
            )
    unseen = superseded(steps)
    reasons = [
        SUPERSEDED if step.step_index in unseen else _untrained(step, temperature, known)
        for step in steps
    ]
    for step, reason in zip(steps, reasons, strict=True):
        if reason is not None:
            untrained[reason] += len(step.response_ids)
    metadata = {
        **{k: v for k, v in trajectory.metadata.items() if k not in (SAMPLE, PADDING)},
        "prompt_uid": trajectory.prompt_uid,
        "trajectory_uid": trajectory.trajectory_uid,
        "source_name": source_of(trajectory, group),
    }
    made: list[tuple[TokenRow, SlimeSample]] = []
    for row in build_rows(steps, "merged"):
        own = [steps[i] for i in row.steps]
        sample = _sample(row, own, [steps[i] for i in row.steps if reasons[i] is None])
        if not known:
            sample.rollout_log_probs = None
        sample.reward, sample.metadata = (
            reward,
            metadata | {"step_indices": [s.step_index for s in own]},
        )
        made.append((row, sample))
    # slime's mean over tokens counts one for a sample that has none to train.
    kept = [(row, s) for row, s in made if not s.remove_sample] or made[-1:]
    for row, sample in kept:
        if row.pictures and inputs is not None:
            sample.multimodal_train_inputs = inputs(row)
    return [sample for _, sample in kept]


def _untrained(step: Step, temperature: float | None, known: bool) -> str | None:
    """Why slime cannot train it; None: it can. `known`: some step has behaviour log-probs."""
    if known and step.rollout_log_probs is None:
        return NO_LOG_PROBS
    if temperature is not None and not math.isclose(step.temperature, temperature, rel_tol=1e-6):
        return OTHER_TEMPERATURE
    return None


def _sample(row: TokenRow, steps: Sequence[Step], trained: Sequence[Step]) -> SlimeSample:
    """The sample of a row: all its steps, and those that are trained."""
    begin = len(steps[0].prompt_ids)
    length = len(row.ids) - begin
    mask = np.zeros(length, np.int64)
    log_probs = np.zeros(length, np.float32)
    versions: list[str] = []
    for step in trained:
        where = slice(len(step.prompt_ids) - begin, step.n_tokens - begin)
        mask[where] = 1
        if step.rollout_log_probs is not None:
            log_probs[where] = step.rollout_log_probs
        versions += [str(s.version) for s in step.version_spans] or [str(step.policy_version)]
    last = steps[-1]
    return SlimeSample(
        tokens=row.ids.tolist(),
        response_length=length,
        loss_mask=mask.tolist(),
        rollout_log_probs=log_probs.tolist(),
        weight_versions=versions,
        status=_STATUS.get(last.finish_reason or "", SlimeSample.Status.COMPLETED),
        remove_sample=not trained,
        rollout_routed_experts=_routing(steps),
    )


def _padding(rollouts: Sequence[Sequence[SlimeSample]]) -> SlimeSample:
    """Trains nothing and has the mean reward, so that slime's own metrics stay right."""
    like = rollouts[0][0]
    rewards: list[Any] = [rollout[0].reward for rollout in rollouts]  # numbers: of trajectories
    return replace(
        like,
        reward=sum(rewards) / len(rewards),
        loss_mask=[0] * like.response_length,
        rollout_log_probs=(
            None if like.rollout_log_probs is None else [0.0] * like.response_length
        ),
        weight_versions=[],
        status=SlimeSample.Status.COMPLETED,
        remove_sample=True,
        metadata={
            **{name: value for name, value in like.metadata.items() if name not in _OF_ONE},
            PADDING: True,
        },
    )


def source_of(trajectory: Trajectory, group: Group) -> str:
    """Data set that the prompt came from, or `unknown`; slime's metrics are split by it."""
    return next(_sources(trajectory.metadata, group.metadata), "unknown")


def _sources(*owners: Mapping[str, Any]) -> Iterator[str]:
    for owner in owners:
        for known in (owner, owner.get("task")):
            name = known.get("data_source") if isinstance(known, Mapping) else None
            if isinstance(name, str) and name:
                yield name


def _routing(steps: Sequence[Step]) -> npt.NDArray[Any] | None:
    """Each response's routing as it was when it was sampled; the rest as the last call had it."""
    arrays = [step.routed_experts for step in steps]
    if all(array is None for array in arrays):
        return None
    whole = []
    for step, array in zip(steps, arrays, strict=True):
        n = 0 if array is None else len(array)
        if array is None or n != step.n_tokens - 1:
            raise BatchError(
                f"{step.label}: routed_experts has {n} rows for "
                f"{step.n_tokens} tokens; slime replays one for each token but the last: "
                f"{step.n_tokens - 1}"
            )
        whole.append(array)
    routing = np.array(whole[-1])
    for step, array in zip(steps, whole, strict=True):
        where = slice(len(step.prompt_ids) - 1, step.n_tokens - 1)
        routing[where] = array[where]
    return routing

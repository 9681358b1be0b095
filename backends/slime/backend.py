"""slime's train data of Steps, and the statistics of groups that slime asks a hook for.

    Steps ──── samples.py ────► samples ──► train data: tokens, response_lengths, loss_masks,
                                   │                     rollout_log_probs, rewards, rollout_ids, …
                                   └─ post_process_rewards ─┘

slime's loss is Σ over samples of (Σ mask · L) / rollout_mask_sums, over the number of rollouts. A
trajectory of three samples with 4, 2 and 2 trained tokens has `rollout_mask_sums` 8 on each: it
weighs as one. slime's own normalisation of rewards has no such care: it reshapes *samples* by
`n_samples_per_prompt`, or else takes the whole batch as one group. Hence the hook for
`--custom-reward-post-process-path`, `stepwell.backends.slime.backend.post_process_rewards`.

Sources: THUDM/slime 0.3.1, `slime/ray/rollout.py` (`_post_process_rewards`,
`_convert_samples_to_train_data`), `slime/backends/megatron_utils/cp_utils.py`.

Does not own: the way from the pool to slime and back (`trainer/slime/rollout.py`). Needs no slime.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.backends.base import NO_PICTURES, TrainingBackend
from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.slime.images import train_inputs
from stepwell.backends.slime.sample import SlimeSample
from stepwell.backends.slime.samples import PADDING, groups_of, to_samples
from stepwell.datapool.types import Step

EPSILON = 1e-6
"""Added to the std that rewards are divided by, as slime does."""

CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""`--advantage-estimator`s for which slime takes rewards relative to their group's mean …"""
SCALED = ("grpo", "gspo", "cispo")
"""… and divides by its std, with `--grpo-std-normalization`."""


class SlimeBackend(TrainingBackend):
    """Hands Steps to slime, whose trainer owns its loop.

    Args:
        advantage_estimator, rewards_normalization, grpo_std_normalization: slime's arguments of
            these names, which say how rewards are normalised.
        hf_checkpoint: slime's argument of this name, the folder of the model; read where steps
            have pictures.
    """

    def __init__(
        self,
        *,
        advantage_estimator: str = "grpo",
        rewards_normalization: bool = True,
        grpo_std_normalization: bool = True,
        hf_checkpoint: str | Path | None = None,
    ) -> None:
        self.advantage_estimator = advantage_estimator
        self.rewards_normalization = rewards_normalization
        self.grpo_std_normalization = grpo_std_normalization
        self.hf_checkpoint = hf_checkpoint

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> TrainingBackend:
        """`SlimeBackend(**kwargs)`.

        Raises:
            BackendConfigError: `args` are what `stepwell train` passes, which cannot drive slime.
        """
        if args:
            raise BackendConfigError(
                "backend is 'slime', which runs its own loop, so `stepwell train` cannot drive it: "
                "start slime with --rollout-function-path "
                "stepwell.trainer.slime.rollout.generate_rollout beside `stepwell serve` "
                "(docs/design/backends.md), or set trainer.backend=torch"
            )
        return cls(**kwargs)

    @classmethod
    def missing(cls) -> str | None:
        try:
            if importlib.util.find_spec("slime.rollout.base_types") is not None:
                return None
        except ImportError:  # not installed, or another package of this name
            pass
        return (
            "slime is not installed, which trains what this backend converts; PyPI's package of "
            "that name is another one: pip install git+https://github.com/THUDM/slime"
        )

    def convert(self, steps: list[Step]) -> dict[str, list[Any]]:
        """`train_data` of `steps`: whole trajectories of whole groups.

        Raises:
            BatchError: as `convert_with_pictures`.
        """
        return self.convert_with_pictures(steps, NO_PICTURES)

    def convert_with_pictures(
        self, steps: list[Step], pictures: Mapping[str, bytes]
    ) -> dict[str, list[Any]]:
        """`train_data` of `steps`, whose pictures are `pictures`, PNG by digest.

        Raises:
            BatchError: no steps, a trajectory without a reward, nothing that can be trained, or
                pictures without their bytes or without `hf_checkpoint`.
            BackendConfigError: the model in `hf_checkpoint` takes no pictures.
        """
        if not steps:
            raise BatchError("convert was given no steps; a batch has at least one")
        inputs = train_inputs(self.hf_checkpoint, steps, pictures)
        converted = to_samples(groups_of(steps), inputs=inputs)
        converted.require_trainable()
        return train_data(self, converted.flat)


def train_data(args: Any, samples: Sequence[SlimeSample]) -> dict[str, list[Any]]:
    """Samples as the dict that slime's rollout manager makes of them and splits over its ranks,
    and `weight_versions`, which slime leaves out.

    Args:
        args: what `post_process_rewards` reads.
        samples: of whole groups, as `to_samples` made them.
    """
    raw, rewards = post_process_rewards(args, samples)
    masks = [s.loss_mask or [] for s in samples]
    mask_sums: Counter[int | None] = Counter()
    for sample, mask in zip(samples, masks, strict=True):
        mask_sums[sample.rollout_id] += sum(mask)
    data: dict[str, list[Any]] = {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(s.status == "truncated") for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": [s.rollout_id for s in samples],
        "loss_masks": masks,
        "rollout_mask_sums": [mask_sums[s.rollout_id] for s in samples],
        "source_names": [s.metadata["source_name"] for s in samples],
        "weight_versions": [s.weight_versions for s in samples],
    }
    if any("raw_reward" in s.metadata for s in samples):  # from before somebody normalised it
        data["raw_reward"] = [s.metadata.get("raw_reward", s.reward) for s in samples]
    if "round_number" in samples[0].metadata:
        data["round_number"] = [_round_number(s) for s in samples]
    if samples[0].rollout_log_probs is not None:  # all have them or none
        data["rollout_log_probs"] = [s.rollout_log_probs for s in samples]
    routed = [s.rollout_routed_experts for s in samples]
    if any(r is not None for r in routed):
        data["rollout_routed_experts"] = routed
    shown = [s.multimodal_train_inputs for s in samples]
    if any(s is not None for s in shown):
        data["multimodal_train_inputs"] = shown
    return data


def _round_number(sample: SlimeSample) -> Any:
    try:
        return sample.metadata["round_number"]
    except KeyError:
        raise BatchError(
            f"the metadata of sample {sample.index} has no round_number, and that of others has; "
            "give it to every trajectory, or to none"
        ) from None


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """For slime's `--custom-reward-post-process-path`: raw and normalised reward of each sample.

    Each trajectory counts once in its group's mean and std, whatever its number of samples, and
    groups may differ in size. As in Stepwell's own GRPO (and verl's): the std is unbiased, a group
    of one keeps its raw reward, equal rewards give exactly 0.

    Args:
        args: slime's; reads `advantage_estimator`, `rewards_normalization`,
            `grpo_std_normalization` and, if there is one, `reward_key`.
        samples: slime's or ours, of whole groups.

    Raises:
        BatchError: samples of one rollout have different rewards.
    """
    key = getattr(args, "reward_key", None)
    raw = [float(s.reward[key] if key else s.reward) for s in samples]
    if args.advantage_estimator not in CENTRED or not args.rewards_normalization:
        return raw, raw
    scale = args.advantage_estimator in SCALED and args.grpo_std_normalization
    groups: dict[Any, dict[Any, float]] = {}
    for position, (sample, reward) in enumerate(zip(samples, raw, strict=True)):
        if sample.metadata.get(PADDING):
            continue
        known = groups.setdefault(sample.group_index, {})
        if known.setdefault(_rollout(position, sample), reward) != reward:
            raise BatchError(
                f"samples of rollout {sample.rollout_id} have rewards "
                f"{known[sample.rollout_id]} and {reward}; a trajectory has one reward, which all "
                "its samples carry"
            )
    normalised = {
        group: dict(zip(rollouts, _normalised(list(rollouts.values()), scale), strict=True))
        for group, rollouts in groups.items()
    }
    # What pads a group is trained nowhere and has no advantage.
    return raw, [
        normalised.get(s.group_index, {}).get(_rollout(i, s), 0.0) for i, s in enumerate(samples)
    ]


def _rollout(position: int, sample: Any) -> Any:
    """slime's own rollout functions may leave `rollout_id` open: each sample is a rollout then."""
    return ("sample", position) if sample.rollout_id is None else sample.rollout_id


def _normalised(rewards: list[float], scale: bool) -> list[float]:
    values = np.asarray(rewards, np.float64)
    if len(values) == 1:
        return rewards
    if np.ptp(values) == 0:
        # Rounding leaves equal rewards 1e-17 off their mean; divided by a std as small it is noise.
        return [0.0] * len(values)
    values = values - values.mean()
    if scale:
        values = values / (values.std(ddof=1) + EPSILON)
    return [float(v) for v in values]

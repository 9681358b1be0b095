"""Debug files of slime's form: `{rollout_id, samples: [Sample.to_dict(), …]}`, one a rollout.

    --save-debug-rollout-data DIR/{rollout_id}.pt           slime writes, and trains on them with
    --load-debug-rollout-data DIR/{rollout_id}.pt           --debug-train-only

    trainer.save_debug_rollout_data=DIR/{rollout_id}.slime.pt     ours, for slime or its readers
    trainer.load_debug_rollout_data=DIR/{rollout_id}.pt           either's

Samples become Steps by their mask (`masked.py`): groups by `group_index`, or, where there is none,
`rollout.n` samples in a row; a rollout's samples by `rollout_id`. Versions are those that samples
say; one that says none is of the weights that it is trained from. What trains nothing (a mask of
zeros, an aborted sample without a reward) has no Steps, is left out and told in the log.

Owns slime's form of a file. Does not own which file is which batch (`trainer/recording.py`).
Sources: THUDM/slime 0.3.1, `slime/observability/rollout_data_utils.py`; commit 261ecee,
`slime/ray/buffer.py`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from stepwell.backends.engines.api import version_number
from stepwell.backends.errors import BatchError
from stepwell.backends.slime.sample import SlimeSample
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.sealed import damaged, is_sealed, sealed, unsealed
from stepwell.datapool.types import Group, Step, Trajectory, is_reward
from stepwell.trainer.config import SLIME_FORM
from stepwell.trainer.errors import CheckpointError, RolloutError
from stepwell.trainer.progress import Progress
from stepwell.trainer.slime.masked import steps_of
from stepwell.trainer.slime.samples import WholeSamples
from stepwell.trainer.slime.torch_file import load_torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlimeForm:
    """Settings of the run that sampled, which its samples do not hold."""

    group_size: int = 1
    """Samples per prompt; read where they have no `group_index`."""
    temperature: float = 1.0
    """Temperature of the sampling."""
    reward_key: str = "score"
    """Key of the number in a reward that is a dict."""
    updates_per_rollout: int = 1
    """Optimizer steps per file."""


def is_slimes(path: Path) -> bool:
    """True if a file has slime's form: by its name, or because it does not end in a digest."""
    if path.name.endswith(SLIME_FORM):
        return True
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return not is_sealed(file.read())


def dump(groups: Sequence[Group], rollout_id: int, whole: WholeSamples) -> bytes:
    """Return the content of the file of a batch.

    Raises:
        BatchError: slime's samples cannot say what is in it, or steps have pictures.
    """
    for step in (s for group in groups for s in group.steps if s.pictures):
        raise BatchError(
            f"{step.label} has pictures, which a file of "
            f"slime's form ({SLIME_FORM}) does not hold; name a folder in "
            "trainer.save_debug_rollout_data"
        )
    samples = [s for group in whole.by_branch(groups) for rollout in group for s in rollout]
    file = io.BytesIO()
    torch.save({"rollout_id": rollout_id, "samples": [s.to_dict() for s in samples]}, file)
    return sealed(file.getvalue())


def load(path: Path, form: SlimeForm, progress: Progress) -> list[Group]:
    """Return the groups of a file, to be trained from where `progress` stands. Where their versions
    are none that `progress` knows, the newest of them becomes the version of now.

    Raises:
        CheckpointError: it cannot be read, or its samples cannot be trained.
        DamagedFileError: it is not what was written.
    """
    samples = _read(path)
    for number, sample in enumerate(samples):
        for name in ("multimodal_inputs", "multimodal_train_inputs"):
            if getattr(sample, name):
                raise _refused(path, number, f"has {name}; only text is trained")
    try:
        versions = [version_number(v) for sample in samples for v in sample.weight_versions]
    except ValueError as e:
        raise CheckpointError(f"{path}: weight_versions of its samples: {e}") from e
    if any(v not in progress.published and v > min(progress.published) for v in versions):
        # slime has a numbering of its own: older ones lag by a publication each.
        progress.version = max(versions)
        progress.published = {progress.version: progress.updates}
    groups = []
    untrained = 0
    for index, own in enumerate(_by_group(path, samples, form.group_size)):
        uid = f"{path.stem}-{index}"
        trajectories: list[Trajectory] = []
        for place, rollout in enumerate(_by_rollout(own)):
            numbers = [number for number, _ in rollout]
            branches = [sample for _, sample in rollout]
            steps = _steps(path, numbers, branches, (f"{uid}-{place}", uid), form, progress)
            if steps:
                metadata = dict(branches[-1].metadata)
                trajectories.append(Trajectory(f"{uid}-{place}", uid, steps, metadata))
            else:
                untrained += 1
        if trajectories:
            task = _task(own[0][1], uid)
            groups.append(Group(uid, tuple(trajectories), len(trajectories), {"task": task}))
    if untrained:
        log.warning("%s: %d rollouts train nothing and are left out", path, untrained)
    if not groups:
        raise CheckpointError(f"{path} has no sample with a trained token; name another file")
    return groups


_Numbered = tuple[int, SlimeSample]
"""A sample, and its place in the file."""


def _read(path: Path) -> list[SlimeSample]:
    remedy = "record the rollouts again"
    data = path.read_bytes()
    try:
        raw = load_torch(unsealed(data) if is_sealed(data) else data)
    except ValueError as e:
        raise damaged(path, str(e), remedy) from e
    samples = raw.get("samples") if isinstance(raw, dict) else None
    if not isinstance(samples, list) or not all(isinstance(s, Mapping) for s in samples):
        raise CheckpointError(
            f"{path} is no recording of ours and has no `samples`, as slime's debug files have; "
            "name what save_debug_rollout_data named in the recorded run"
        )
    try:
        return [SlimeSample.from_dict(sample) for sample in samples]
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path} holds what is no sample of slime's: {e}") from e


def _by_group(path: Path, samples: Sequence[SlimeSample], size: int) -> list[list[_Numbered]]:
    """Return the samples of each prompt, in the order of the file."""
    without = sum(sample.group_index is None for sample in samples)
    if not without:
        found: dict[Any, list[_Numbered]] = {}
        for number, sample in enumerate(samples):
            found.setdefault(sample.group_index, []).append((number, sample))
        return list(found.values())
    groups = [list(enumerate(samples[at : at + size], at)) for at in range(0, len(samples), size)]
    if without < len(samples):
        raise CheckpointError(
            f"{path}: {without} of {len(samples)} samples have no group_index; give it to all"
        )
    for own in groups:
        if len(own) < size or any(sample.prompt != own[0][1].prompt for _, sample in own):
            raise CheckpointError(
                f"{path}: its {len(samples)} samples have no group_index, and those from "
                f"{own[0][0]} on are no {size} of one prompt; set rollout.n to the run's "
                "--n-samples-per-prompt"
            )
    return groups


def _by_rollout(samples: Sequence[_Numbered]) -> list[list[_Numbered]]:
    """Return the samples of each rollout; without `rollout_id` each sample is one."""
    runs = groupby(samples, lambda pair: pair[1].rollout_id)
    return [
        part
        for rollout_id, run in runs
        for own in [list(run)]
        for part in ([own] if rollout_id is not None else [[pair] for pair in own])
    ]


def _steps(
    path: Path,
    numbers: Sequence[int],
    branches: Sequence[SlimeSample],
    uids: tuple[str, str],
    form: SlimeForm,
    progress: Progress,
) -> tuple[Step, ...]:
    """Return the Steps of one rollout, in order, with its reward on the last."""
    steps: list[Step] = []
    identity = dict(zip(("trajectory_uid", "prompt_uid"), uids, strict=True))
    for number, sample in zip(numbers, branches, strict=True):
        if not sample.weight_versions:
            sample.weight_versions = [str(progress.version)]
        try:
            steps += steps_of(sample, (), identity, len(steps))
        except (InvalidStepError, RolloutError) as e:
            raise _refused(path, number, f"cannot be trained: {e}") from e
    last = branches[-1]
    if not steps or (last.status is SlimeSample.Status.ABORTED and last.reward is None):
        return ()
    sampled = {"sampling_params": {"temperature": form.temperature}}
    steps = [replace(step, metadata={**step.metadata, **sampled}) for step in steps]
    reward: Any = last.reward
    if isinstance(reward, Mapping):
        reward = reward.get(form.reward_key)
    if not is_reward(reward):
        raise _refused(
            path,
            numbers[-1],
            f"has the reward {last.reward!r:.80}; each trained one has a number, or a dict "
            f"with one under rollout.reward.reward_key = {form.reward_key!r}",
        )
    return (*steps[:-1], replace(steps[-1], reward=float(reward), is_last=True))


def _task(sample: SlimeSample, uid: str) -> dict[str, Any]:
    name = "question" if isinstance(sample.prompt, str) else "messages"
    return {
        "instance_id": str(sample.metadata.get("instance_id", uid)),
        "data_source": sample.metadata.get("source_name", "unknown"),
        name: sample.prompt,
        "answer": sample.label,
    }


def _refused(path: Path, number: int, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: sample {number} {why}")

"""Steps for TRL (1.16): what the `rollout_func` of its `GRPOTrainer` returns.

    prompts ──► TRL ──rollout_func──► RolloutFunc ──take(n)──► groups ──► their completions
                 └─ rewards ◄── reward(…) ◄── "reward"                   env_mask: 1 = sampled

    prompt_ids      P0                   tokens of the first call's prompt
    completion_ids  R0 U1 R1             the whole conversation behind it
    env_mask        1  0  1              what tools and users wrote is not trained
    logprobs        p  0  p              of the engine that sampled

TRL owns the loop and the model. A group is a prompt's `num_generations` completions, a trajectory
one completion: one whose history was edited or that branched is several sequences, for which TRL
has no place, and is refused by name. So is one with pictures: of a `rollout_func` TRL takes none
(`images = None` in `GRPOTrainer._generate`), only those of its own data set, placed by its own
tokens of its own prompts. Advantages and loss are TRL's.

Owns: the dictionary. Does not own: which rows there are (`verl/rows.py`), leases, TRL's trainer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from stepwell.backends.base import TrainingBackend
from stepwell.backends.errors import BatchError
from stepwell.backends.verl.backend import trained_steps
from stepwell.backends.verl.rows import VerlRow, build, trajectory_rewards
from stepwell.datapool.types import Group, Step

REMEDY = "pip install 'trl>=1.16'"


class Rollouts(TypedDict):
    """One entry per completion, those of a group behind one another."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    """1: sampled by the policy, and trained; 0: written by others, or not to be trained."""
    reward: list[float | None]
    """None of all of them: not scored, another function of `reward_funcs` has to."""


class TrlBackend(TrainingBackend):
    """Steps -> completions of TRL; TRL runs the loop. See the module's docstring."""

    @classmethod
    def missing(cls) -> str | None:
        absent = importlib.util.find_spec("trl") is None
        return f"trl not installed: {REMEDY}" if absent else None

    def convert(self, steps: list[Step]) -> Rollouts:
        """The completions of `steps`, a trajectory each; needs no TRL.

        Raises:
            BatchError: a trajectory is more than one sequence, or what no batch can be made of.
        """
        for step in steps:
            if step.pictures:
                raise BatchError(
                    f"step {step.step_index} of trajectory {step.trajectory_uid!r} has pictures, "
                    "which TRL takes of its own data set only; train it with another backend"
                )
            if step.rollout_log_probs is None:
                raise BatchError(
                    f"step {step.step_index} of trajectory {step.trajectory_uid!r} has no "
                    "rollout_log_probs, which TRL wants of every token; leave the trajectory out"
                )
        rows, rewards = build(steps), trajectory_rewards(steps)
        seen: set[str] = set()
        for row in rows:
            uid = row.fields["extra_info"]["trajectory_uid"]
            if uid in seen:
                raise BatchError(
                    f"trajectory {uid!r} is more than one sequence: its history was edited, or it "
                    "branched. TRL takes one completion per rollout; train it with another "
                    "backend, or leave the trajectory out"
                )
            seen.add(uid)
        return {
            "prompt_ids": [row.prompts.tolist() for row in rows],
            "completion_ids": [_column(row, "responses") for row in rows],
            "logprobs": [_column(row, "rollout_log_probs") for row in rows],
            "env_mask": [_column(row, "response_mask") for row in rows],
            "reward": [rewards[row.fields["extra_info"]["trajectory_uid"]] for row in rows],
        }


class RolloutFunc:
    """TRL's `rollout_func`: takes groups instead of sampling.

        trainer = GRPOTrainer(model, reward, train_dataset=…, rollout_func=RolloutFunc(take), …)

    TRL asks for `len(prompts)` completions, `num_generations` of each prompt; which prompts these
    are is the pool's choice, so the texts of the trainer's data set are not used.

    Args:
        take: returns that many groups; a lease of a pool, for instance.
    """

    def __init__(self, take: Callable[[int], Sequence[Group]]) -> None:
        self._take = take

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Rollouts:
        """The completions of as many groups as TRL has prompts.

        Raises:
            BatchError: there are fewer or more groups; a group has another size than
                `num_generations`, or a temperature that is not the trainer's, at which log-probs
                would be computed anew.
        """
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        wanted = len(prompts) // size
        groups = list(self._take(wanted))
        if len(groups) != wanted:
            raise BatchError(
                f"{len(groups)} groups were taken, and TRL has prompts for {wanted}; return as "
                "many as are asked for, or end the training"
            )
        steps = trained_steps(groups)
        for group in groups:
            n = len({s.trajectory_uid for s in trained_steps([group])})
            if n != size:
                raise BatchError(
                    f"group {group.prompt_uid!r} has {n} rollouts and TRL's num_generations is "
                    f"{size}; set rollout.n to {size}, or num_generations to the groups' size"
                )
        temperature = float(trainer.temperature)
        for row in build(steps):
            if abs(row.temperature - temperature) > 1e-6:
                raise BatchError(
                    f"a step was sampled at temperature {row.temperature:g} and TRL's temperature "
                    f"is {temperature:g}; give both the same"
                )
        return TrlBackend().convert(steps)


def reward(reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Reward function for TRL's `reward_funcs`: the rewards that the rollouts came with."""
    return list(reward)


def _column(row: VerlRow, name: str) -> list[Any]:
    values: list[Any] = row.columns[name].tolist()
    return values

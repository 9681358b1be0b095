"""This module calls reward functions of slime's signature, so that they work here as they stand.

    async def custom_rm(args, sample, **kwargs) -> float | dict           # --custom-rm-path
    async def custom_rm(args, samples, **kwargs) -> list                  # with --group-rm

`sample` is slime's `Sample` where slime is installed, else `SlimeSample` with the same fields:
prompt, response (the last one), label, metadata, status, tokens, loss_mask, …; of a trajectory of
several branches, those of the one with that response. One that a generate function of slime's form
made has the whole response, and what else that function set. `args` has the configured kwargs.
Source: slime 0.3.1, `slime/rollout/rm_hub/__init__.py`, `docs/en/get_started/customization.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.backends.slime.sample import SAMPLE, SlimeSample, as_slime, put_back
from stepwell.backends.slime.samples import not_trained, to_samples
from stepwell.datapool.types import Group, mapping_in
from stepwell.trainer.rewards.base import RewardSample
from stepwell.trainer.slime.arguments import Arguments
from stepwell.trainer.threads import function_name

_REMEDY = "set it in the kwargs of the reward's section"


class SlimeReward:
    """Called with one `RewardSample`, or with a group's."""

    def __init__(self, function: Any, kwargs: Mapping[str, Any]) -> None:
        self._function = function
        known = dict.fromkeys(("reward_key", "eval_reward_key", "rm_type", "rm_url"))
        self._args = Arguments(_REMEDY, **{**known, **kwargs})
        self.__qualname__ = function_name(function)

    def __call__(self, samples: RewardSample | Sequence[RewardSample]) -> Any:
        if isinstance(samples, RewardSample):
            return self._function(self._args, _sample(samples, 0))
        return self._function(self._args, [_sample(s, i) for i, s in enumerate(samples)])


def _sample(scored: RewardSample, index: int) -> Any:
    info = dict(scored.extra_info)
    of_function = mapping_in(info, SAMPLE)
    info.pop(SAMPLE, None)
    sample = replace(
        _tokens(scored),
        group_index=0,
        index=index,
        rollout_id=index,
        prompt=info.get("question", info.get("messages", "")),
        response=scored.solution_str,
        label=scored.ground_truth,
        reward=info.get("agent_reward"),
        metadata=info,
    )
    put_back(sample, of_function)
    return as_slime(sample)


def _tokens(scored: RewardSample) -> SlimeSample:
    """Return the sample as it is trained, but for its reward, which is still to be computed."""
    trajectory = scored.trajectory
    if trajectory is None:
        return SlimeSample(status=SlimeSample.Status.COMPLETED)
    *earlier, last = trajectory.steps
    asked = replace(trajectory, steps=(*earlier, replace(last, reward=0.0)), metadata={})
    made = to_samples([Group(trajectory.prompt_uid, (asked,))], inputs=not_trained).flat
    index = trajectory.steps[scored.answer].step_index
    return next((s for s in made if index in s.metadata["step_indices"]), made[-1])

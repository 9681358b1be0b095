"""Rewards of tools in a rollout reach the reward function: verl's `tool_rewards` of `extra_info`
(verl 0.9, verl/experimental/agent_loop/tool_agent_loop.py, reward_manager/naive.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepwell.trainer.config import RewardConfig
from stepwell.trainer.scoring import Scorer
from stepwell.trainer.tools import Tool, ToolAgent

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
"""Any tokenizer: the function does not look at the text."""
CALL = '<tool_call>\n{"name": "count", "arguments": {"by": %d}}\n</tool_call>'


class Count(Tool):
    name = "count"

    async def call(self, instance_id: str, by: int) -> tuple[str, float]:
        """Counts."""
        return str(by), by / 2

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.75


def paid(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """verl's form; a reward for each step, from what the tool paid for its call."""
    return {
        "score": [*extra_info["tool_rewards"], extra_info["rollout_reward_scores"]["count"]],
        "seen": json.dumps(extra_info["tool_rewards"]),
    }


async def test_a_reward_function_sees_what_the_tools_of_the_rollout_paid(world: Any) -> None:
    for text in (CALL % 1, CALL % 3, "four"):
        world.say(text)
    agent = ToolAgent([Count()])
    run = await agent.run({"question": "count to 4"}, world.base_url("t", "p"), "none")
    await agent.aclose()
    assert (run.answer, run.step_rewards) == ("four", [0.5, 1.5])
    await world.pool.complete_trajectory("t")
    lease = await world.pool.lease_batch(1)
    scorer = Scorer(RewardConfig(function=f"{__file__}:paid"), MODEL)
    (group,) = await scorer.score(lease.groups)
    await scorer.aclose()
    assert [s.reward for s in group.trajectories[0].steps] == [0.5, 1.5, 0.75]
    assert group.trajectories[0].metadata["reward_extra_info"] == {"seen": "[0.5, 1.5]"}


async def test_a_trajectory_that_is_used_up_ends_as_a_reply_that_was_cut_off(worlds: Any) -> None:
    world = await worlds(max_turns=1)
    world.say(CALL % 1)
    agent = ToolAgent([Count()])
    run = await agent.run({"question": "count to 4"}, world.base_url("t", "p"), "none")
    await agent.aclose()
    assert (run.stop, run.turns, run.calls) == ("length", 1, {"count": 1})

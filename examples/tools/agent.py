"""An agent with all three tools, on top of the loop that `stepwell.trainer.tools` has.

Configure it with `rollout.agent: examples.tools.agent:agent` and a `rollout.reward`: it returns
None, so that the trainer scores the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepwell.trainer.tools import ToolAgent, ToolBox

TOOLS = Path(__file__).with_name("tools.yaml")


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One rollout, scored by `rollout.reward`."""
    await helper().run(task, base_url, api_key)
    return None


@lru_cache(maxsize=1)
def helper() -> ToolAgent:
    """Made at the first rollout of a worker: the corpus is read once."""
    return ToolAgent(
        ToolBox.from_yaml(str(TOOLS)),
        max_turns=6,
        system="Answer the question. You may use tools; give the final answer in \\boxed{}.",
        sampling={"temperature": 1.0, "max_tokens": 512},
    )

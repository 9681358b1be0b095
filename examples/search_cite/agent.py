"""An agent that answers questions about towns and may search a collection of documents.

The tool is `examples/tools/search.py`, the loop `stepwell.trainer.tools.ToolAgent`. It returns
None: the answer is scored by `rollout.reward` (`reward.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from examples.tools.search import Search
from stepwell.trainer.tools import ToolAgent, ToolBox

MAX_TURNS = 4
DOCUMENTS = 2
"""Most documents that a search returns."""


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One rollout, scored by `rollout.reward`."""
    await helper(task["metadata"]["corpus"]).run(task, base_url, api_key)
    return None


@lru_cache(maxsize=1)
def helper(corpus: str) -> ToolAgent:
    """Made at the first rollout of a worker: the corpus is indexed once."""
    tools = ToolBox([Search({"corpus": corpus, "k": DOCUMENTS})])
    return ToolAgent(tools, max_turns=MAX_TURNS, sampling={"temperature": 1.0, "max_tokens": 48})

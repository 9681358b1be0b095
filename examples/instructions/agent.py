"""One request, one reply. It returns None: `rollout.reward` (`reward.py`) scores the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from stepwell.quickstart.agent import http_client

MAX_TOKENS = 24
TEMPERATURE = 0.7
"""At 1.0 the four-bit weights of the package talk nonsense."""


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One rollout, scored by `rollout.reward`."""
    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_client=http_client(asyncio.get_running_loop()),
    )
    await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task["question"]}],
        temperature=TEMPERATURE,
        max_tokens=MAX_TOKENS,
    )
    return None

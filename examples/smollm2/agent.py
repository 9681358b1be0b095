"""One question, one answer: SmolLM2's chat template knows no tools."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from stepwell.quickstart.agent import http_client
from stepwell.trainer.rewards.reasoning_gym import score


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """1.0 if the last number of the reply is the answer, else 0.0."""
    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_client=http_client(asyncio.get_running_loop()),
    )
    reply = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task["question"]}],
        temperature=1.0,
        max_tokens=32,
    )
    numbers = re.findall(r"-?\d+", reply.choices[0].message.content or "")
    return score(task["data_source"], numbers[-1] if numbers else "", task["answer"], task)

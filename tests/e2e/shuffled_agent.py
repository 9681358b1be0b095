"""The quickstart's agent with a reward that says nothing of its answer: the control of a test that
training learns."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from stepwell.quickstart.agent import agent as quickstart_agent


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    await quickstart_agent(task, base_url, api_key)
    return float(zlib.crc32(base_url.encode()) % 2)  # as random as the trajectory's uid

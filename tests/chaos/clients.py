"""Clients of a service that nobody of Stepwell starts: `python -m tests.chaos.clients URL`.

Each declares a group, runs the agent of the runs under fire (`agent.py`, which writes the log) in
every trajectory of it, and completes or aborts what it got, again while the service is away. Runs
until it is ended.
"""

from __future__ import annotations

import asyncio
import random
import sys
import uuid
from typing import Any

from stepwell.trainer.errors import RolloutError
from stepwell.trainer.rollout.gateway import RETRY_S, GatewayClient
from tests.chaos.agent import agent

GROUPS_AT_ONCE = 2
N = 4
"""Rollouts of a group."""


async def client(gateway: GatewayClient) -> None:
    """One group after the other."""
    while True:
        a, b = random.randint(10, 999), random.randint(10, 999)
        uid = f"q{uuid.uuid4().hex[:12]}"
        try:
            # Named here, so that asking again declares no second one.
            declared = await gateway.ask("/v1/groups", {"prompt_uid": uid, "n": N})
        except RolloutError:
            await asyncio.sleep(RETRY_S)
            continue
        question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
        rollouts = (rollout(gateway, t, question) for t in declared["trajectories"])
        await asyncio.gather(*rollouts)


async def rollout(gateway: GatewayClient, opened: dict[str, Any], question: str) -> None:
    base_url = opened["base_url"]
    try:
        reward = await agent({"question": question}, base_url, opened.get("api_key") or "none")
        where, body = "complete_trajectory", {"reward": reward}
    except Exception as e:  # noqa: BLE001 - whatever it is, the agent has written it down
        where, body = "abort_trajectory", {"reason": type(e).__name__}
    try:
        await gateway.ask(f"{base_url}/v1/{where}", body)
    except RolloutError as e:
        print(f"{base_url}: {e}", flush=True)


async def main(url: str) -> None:
    gateway = GatewayClient([url])
    await asyncio.gather(*(client(gateway) for _ in range(GROUPS_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

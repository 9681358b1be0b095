"""This module holds what the routes share, so that a route knows the parts it uses and not how they
were made.

    app.py makes it ──► Services ──► routes.py, serve.py, shortcut.py, slime_buffer/

One per running application, in `app.state.services`. Does not own: how the parts are put together
(`app.py`), paths and bodies (the routes).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.addresses import Addresses
from stepwell.gateway.call_service import CallService
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.dialects.base import Dialect
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.engine import EngineClient
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.functions import Function
from stepwell.gateway.hosts import Hosts
from stepwell.gateway.keys import KeyRing
from stepwell.gateway.slime_buffer.buffer import RolloutBuffer
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.groups import Groups
from stepwell.gateway.trajectory.identity import Identities
from stepwell.gateway.trajectory.outcomes import Outcomes
from stepwell.gateway.trajectory.recording import Recording
from stepwell.gateway.trajectory.store import TrajectoryStore


@dataclass(frozen=True, kw_only=True)
class Services:
    """The parts of one gateway, for as long as the application runs."""

    config: GatewayConfig
    keys: KeyRing
    hosts: Hosts
    addresses: Addresses
    pool: DataPoolClient
    tokenizer: ChatTokenizer
    engine: EngineClient
    calls: CallService
    trajectories: TrajectoryStore
    groups: Groups
    outcomes: Outcomes
    recording: Recording
    identities: Identities
    dialects: Mapping[str, Dialect]
    """By path below `/v1/`."""
    responses: OpenAIResponses
    """One of `dialects`: its answers can be read again."""
    rollout_buffer: RolloutBuffer
    reward: Function | None
    started_at: float = field(default_factory=time.monotonic)

    async def start(self) -> None:
        await self.engine.start()
        self.identities.start()

    @property
    def undisturbed_s(self) -> float:
        """Seconds since this process began to serve, or a call failed for want of an engine or of
        the pool: what failed within them is not the agent's failure."""
        disturbed_at = max(self.started_at, self.engine.lost_at, self.calls.failed_at)
        return time.monotonic() - disturbed_at

    def statistics(self) -> dict[str, Any]:
        return {
            "open_trajectories": len(self.trajectories),
            "calls": dict(self.calls.counts),
            "added_latency": self.calls.added_latency(),
            "recording": self.recording.statistics(self.calls.counts["stored"]),
            "branches": dict(self.calls.branches),
            "limits": self.calls.limits.statistics(),
            "engine": self.engine.statistics(),
            "rollout_buffer": self.rollout_buffer.statistics(),
            **self.addresses.statistics(),
        }

    async def close(self) -> None:
        """Abort what is being generated; let commits finish."""
        await self.identities.close()
        await self.rollout_buffer.close()
        calls = [c for t in self.trajectories for c in t.in_flight]
        for call in calls:
            call.cancel(GatewayError("the gateway is shutting down"))
        await asyncio.gather(*(c.wait() for c in calls))
        await self.recording.close()
        await self.engine.close()
        self.addresses.close()


def services_of(request: Request) -> Services:
    """Of the application that serves this request."""
    services: Services = request.app.state.services
    return services

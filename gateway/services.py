"""This module puts the parts of a gateway together, so that a route knows the parts it uses and not
how they were made.

    create_app ──► Services ──► routes.py, lifecycle.py, slime_buffer/

One per running application, in `app.state.services`; there are no globals, and no part is told
later of another one. Does not own: paths and bodies (`endpoints.py`), the way to them (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.access import AccessControl
from stepwell.gateway.call import Calls
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.deletions import FileDeletions
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.dialects.registry import make_dialects, make_gemini
from stepwell.gateway.engine import Sampler
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.known_bodies import KnownBodies
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.pictures import PictureReader
from stepwell.gateway.pool_access import PoolAccess
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.replicas import Replicas
from stepwell.gateway.reply.reader import ReplyFormat
from stepwell.gateway.scoring import Scoring
from stepwell.gateway.slime_buffer.buffer import RolloutBuffer
from stepwell.gateway.tokens.messages import TurnMessages
from stepwell.gateway.tokens.render import ChatRenderer
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.groups import Groups
from stepwell.gateway.trajectory.identity import Identities
from stepwell.gateway.trajectory.store import Outcomes, TrajectoryStore
from stepwell.gateway.ui.dashboard import Dashboard

log = logging.getLogger(__name__)

RENDER_THREADS = 2


class Services:
    """The parts of one gateway, for as long as the application runs."""

    def __init__(
        self, config: GatewayConfig, wiring: Wiring, pool: DataPoolClient, tokenizer: ChatTokenizer
    ) -> None:
        """
        Raises:
            GatewayConfigError: a function that the configuration names cannot be loaded.
        """
        self.config, self.pool, self.tokenizer = config, pool, tokenizer
        self.tuning = tuning = wiring.tuning
        reward = config.function("reward_fn")
        self.scoring = None if reward is None else Scoring(str(config.reward_fn), reward)
        """None: there is no `gateway.reward_fn`."""
        self.threads = ThreadPoolExecutor(RENDER_THREADS, "gateway-render")
        self.file_deletions = FileDeletions(wiring.archive_dir, wiring.run_dir)
        self.pictures = PictureReader.of(config.tokenizer_path, config.pictures)
        """None: the served model takes none."""
        vision = None if self.pictures is None else self.pictures.processor
        self.access = AccessControl(
            config,
            self.threads,
            wiring.replica_urls,
            tuning,
            takes_pictures=vision is not None,
        )
        self.keys, self.hosts = self.access.keys, self.access.hosts
        self.replicas = Replicas(wiring, config.public_url)
        self.known_bodies = KnownBodies()
        masked = () if vision is None else vision.forbidden_ids
        self.engine = Sampler(config, wiring, tokenizer.vocabulary, masked)
        self.pool_access = PoolAccess(pool, config, tuning)
        self.groups = Groups(config)
        self.trajectories = TrajectoryStore(self.pool_access, self.groups)
        placeholder = None if vision is None else vision.placeholder_id
        renderer = ChatRenderer(tokenizer, thinking=config.thinking, placeholder=placeholder)
        if renderer.turn_close_id is None:
            log.warning(
                "the chat template ends assistant turns with no special token: every later turn "
                "of a conversation becomes a branch"
            )
        replies = ReplyFormat(tokenizer, config)
        if renderer.shows_tools and not replies.reads_calls and config.tool_parser != "none":
            log.warning(
                "calls of tools as the chat template writes them are none that "
                "gateway.tool_parser %s reads: agents get them as text",
                config.tool_parser,
            )
        prompts = Prompts(config, renderer, self.threads, tuning, vision)
        turn_messages = TurnMessages(config, tuning)
        self.calls = Calls(
            engine=self.engine,
            prompts=prompts,
            format=replies,
            limits=CallLimits(config),
            turn_messages=turn_messages,
            thinking=config.thinking,
            channel_sampling=wiring.sampling,
            replicas=config.replicas,
            pictures=self.pictures,
        )
        self.outcomes = Outcomes(config, self.pool_access, self.trajectories)
        self.identities = Identities(
            self.trajectories,
            self.groups,
            self.keys.read,
            idle_s=config.conversation_idle_s,
        )
        template = tokenizer.template_text
        self.responses = OpenAIResponses(config.stored_response_chars, template)
        """One of `dialects`: its answers can be read again."""
        self.dialects = make_dialects(template, self.responses)
        """Dialects by path below `/v1/`."""
        self.gemini = make_gemini(template, replies.style)
        """Gemini's dialects by method, and the form of its stream."""
        self.rollout_buffer = RolloutBuffer(
            config,
            self.pool_access,
            self.outcomes,
            prompts,
            turn_messages,
            self.engine,
            wiring.engine_urls,
            None if wiring.read_only else wiring.run_dir,
        )
        self.dashboard = Dashboard(
            self.pool_access,
            tokenizer,
            statistics=self.statistics,
            running=lambda uid: len(t.in_flight) if (t := self.trajectories.known(uid)) else 0,
            folder=wiring.run_dir,
            archive=wiring.archive_dir,
            read_only=wiring.read_only,
        )

    async def start(self) -> None:
        self.started_at = time.monotonic()
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
            "recording": self.pool_access.statistics(self.calls.counts["stored"]),
            "rewards": {"not_kept": dict(self.outcomes.not_kept)},
            "branches": dict(self.calls.branches),
            "limits": self.calls.limits.statistics(),
            "tokenizer": {"fast": self.tokenizer.is_fast},
            "engine": self.engine.statistics(),
            "rollout_buffer": self.rollout_buffer.statistics(),
            **self.replicas.statistics(),
        }

    async def close(self) -> None:
        """Abort what is being generated; let commits finish."""
        self.dashboard.close()
        await self.identities.close()
        await self.rollout_buffer.close()
        if self.scoring is not None:
            self.scoring.close()
        self.calls.is_closing = True
        calls = [c for t in self.trajectories for c in t.in_flight]
        for call in calls:
            call.cancel(GatewayError("the gateway is shutting down"))
        await asyncio.gather(*(c.wait() for c in calls))
        await self.pool_access.close()
        await self.engine.close()
        if self.pictures is not None:
            self.pictures.close()
        self.replicas.close()


def services_of(request: Request) -> Services:
    """The services of the application that serves this request."""
    services: Services = request.app.state.services
    return services

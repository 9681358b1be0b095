"""A policy that answers from a script, behind a real HTTP server, for the tests of agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.helpers import serving_posts


class Policy:
    """Answers the n-th call with the n-th reply, the last one over again; keeps the requests."""

    def __init__(self, *replies: str | dict[str, Any] | int) -> None:
        self.replies = replies
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.Response:
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(await request.json())
        self.paths.append(request.path)
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "refused"}}, status=reply)
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
        )


@asynccontextmanager
async def serving(policy: Policy) -> AsyncIterator[Policy]:
    path = "/{trajectory_uid}/{prompt_uid}/v1/chat/completions"
    async with serving_posts(path, policy.answer) as address:
        policy.base_url = f"{address}/trajectory/prompt"
        yield policy

"""A reward computed by a server: one POST per answer, tried again when the server fails.

Owns the request and its retries. Does not own what happens when all fail: the score is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp

from stepwell.trainer.errors import RewardCrashError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class RemoteReward:
    """Asks `url` for the score.

    Args:
        url: takes a JSON POST; answers a number, or an object with the number under "score".
        payload: "verl" sends {data_source, solution_str, ground_truth, extra_info}; "slime" sends
        {prompt, response, label}, as its remote reward model does.
        max_retries: further tries after a connection error, a timeout or a status of `RETRIED`.
        backoff_s: before the first of them; doubles, at most 30 s, with up to as much again drawn
        at random so that many callers do not return together. `Retry-After` is obeyed instead.
        timeout_s: of one try.
        headers: of each request, e.g. {"Authorization": "Bearer …"}.
    """

    def __init__(
        self,
        url: str,
        payload: Literal["verl", "slime"] = "verl",
        max_retries: int = 5,
        backoff_s: float = 1.0,
        timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; give one that begins with http:// or https://")
        if payload not in ("verl", "slime"):
            raise ValueError(f"payload is {payload!r}; it should be 'verl' or 'slime'")
        self._url = url
        self._payload = payload
        self._tries = max_retries + 1
        self._backoff_s = backoff_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        **kwargs: Any,
    ) -> Any:
        """The server's answer.

        Raises:
            RewardCrashError: it gave none.
        """
        if self._payload == "slime":
            body = {
                "prompt": extra_info.get("question", extra_info.get("messages")),
                "response": solution_str,
                "label": ground_truth,
            }
        else:
            body = {
                "data_source": data_source,
                "solution_str": solution_str,
                "ground_truth": ground_truth,
                "extra_info": dict(extra_info),
            }
        why = ""
        for attempt in range(self._tries):
            try:
                async with self._client().post(self._url, json=body) as response:
                    if response.status < 400:
                        return await response.json(content_type=None)
                    why = f"answered {response.status}: {await response.text():.200}"
                    if response.status not in RETRIED:
                        break
                    wait = _retry_after(response.headers.get("Retry-After"))
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                why, wait = f"gave no answer ({type(e).__name__}: {e})", None
            if attempt + 1 < self._tries:
                backoff = min(self._backoff_s * 2**attempt, 30.0)
                await asyncio.sleep(backoff * (1 + random.random()) if wait is None else wait)
        raise RewardCrashError(f"the reward server {self._url} {why}")

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # made where a loop runs
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        return self._session


def _retry_after(value: str | None) -> float | None:
    return min(float(value), 60.0) if value is not None and value.isdecimal() else None

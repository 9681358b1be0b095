"""This module asks a server again until it answers, so that an outage shorter than
`rollout.reward.timeout_s` costs no score.

    POST ──► an answer
      ├────► 400, 401, 404, …: RewardCrashError
      └────► no answer, 429, 5xx: wait, POST again

Owns the request and the waits of `remote` and `reward_model`. Does not own how long
it goes on (`rollout.reward.timeout_s`), nor what becomes of a score that is missing (`manager.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import aiohttp

from stepwell.trainer.errors import RewardCrashError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_BACKOFF_S = 10.0


class RewardServer:
    """A server that scores, at `url`.

    Args:
        name: in errors, e.g. "the reward server http://rm".
        url: takes a JSON POST.
        backoff_s: before the second try (after a connection error, a timeout or a status of
            `RETRIED`); doubles up to 10 s, with up to as much again drawn at random so that many
            callers do not return together. A longer `Retry-After` is obeyed.
        timeout_s: of one try.
        headers: of each request.

    Raises:
        ValueError: `url` is none.
    """

    def __init__(
        self,
        name: str,
        url: str,
        backoff_s: float = 1.0,
        timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; give one that begins with http:// or https://")
        self._name = name
        self._url = url
        self._backoff_s = backoff_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Any) -> Any:
        """The answer to `body`. The cancellation that ends the tries carries the last failure as a
        note.

        Raises:
            RewardCrashError: the server refuses the request.
        """
        backoff_s, failure = self._backoff_s, ""
        try:
            while True:
                after_s = 0.0
                try:
                    async with self._client().post(self._url, json=body) as response:
                        if response.status < 400:
                            return await response.json(content_type=None)
                        text = f"{await response.text():.200}"
                        failure = f"{self._name} answered {response.status}: {text}"
                        if response.status not in RETRIED:
                            raise RewardCrashError(failure)
                        after_s = _retry_after(response.headers.get("Retry-After"))
                except (aiohttp.ClientError, TimeoutError, UnicodeError, json.JSONDecodeError) as e:
                    failure = f"{self._name} gave no answer ({e!r:.200})"
                await asyncio.sleep(max(after_s, backoff_s * (1 + random.random())))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        except asyncio.CancelledError as e:
            if failure:
                e.add_note(failure)  # `call_within` tells it with its timeout
            raise

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # made where a loop runs
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the calls are limited, not these
                timeout=self._timeout,
                headers=self._headers,
            )
        return self._session


def _retry_after(value: str | None) -> float:
    return float(value) if value is not None and value.isdecimal() else 0.0

"""An OpenEnv server as an agent: it resets, the policy replies, it steps, until it is done.

    reset ──► observation ──► policy ──► action ──► step ──► observation, reward ──┐
                  ▲                                                               │
                  └──────────────────────── not done ─────────────────────────────┘

Speaks the server's own messages over its WebSocket (`openenv` 0.10, `EnvClient`), so the package is
not needed. Each reply has the reward that its step gave. An action that the server refuses, or that
is none, is told to the policy and earns 0.0: it is the policy's own doing, and a rollout of nothing
else has to be worth less than one that acts. An episode that is done without any reward is not
scored: `rollout.reward` scores it. Does not own the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from openai import AsyncOpenAI, BadRequestError

from stepwell.trainer.config.environment import OpenEnvConfig
from stepwell.trainer.errors import HarnessError, InfrastructureError
from stepwell.trainer.plain import plain_text
from stepwell.trainer.rollout.harness import prompt_of
from stepwell.trainer.tools.agent import USED_UP

_LARGEST = 100 << 20
"""Bytes of a message."""


POLICYS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
"""Codes of errors that are the action's."""


class ActionRefusedError(ValueError):
    """The server refuses an action; the message is for the policy."""


class OpenEnvAgent:
    """Runs episodes; one object for any number of rollouts at once."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self._config = config
        url = config.url.rstrip("/")
        for http, socket in (("http://", "ws://"), ("https://", "wss://")):
            url = socket + url.removeprefix(http) if url.startswith(http) else url
        self._url = f"{url}/ws"

    async def __call__(
        self, task: Mapping[str, Any], base_url: str, api_key: str
    ) -> list[float | None] | None:
        """Play one episode; return the reward of each reply, or None if the episode is not scored.

        Raises:
            HarnessError: the environment's code has raised; the rollout is lost.
            InfrastructureError: the server cannot be reached, or fails.
        """
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(self._url, max_msg_size=_LARGEST) as socket,
                AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key) as openai,
            ):
                return await self._episode(task, socket, openai)
        except (aiohttp.ClientError, ConnectionError) as e:
            raise InfrastructureError(f"{self._config.url}: {type(e).__name__}: {e}") from e

    async def _episode(
        self,
        task: Mapping[str, Any],
        socket: aiohttp.ClientWebSocketResponse,
        openai: AsyncOpenAI,
    ) -> list[float | None] | None:
        config = self._config
        own = (task.get("metadata") or {}).get("reset") or {}
        try:
            found = await self._ask(socket, {"type": "reset", "data": {**config.reset, **own}})
        except ActionRefusedError as e:
            raise InfrastructureError(f"{config.url} refuses reset: {e}") from e
        messages: list[Any] = []
        if config.system is not None:
            messages.append({"role": "system", "content": config.system})
        prompt = prompt_of(task)
        first = self._observation(found)
        messages.append({"role": "user", "content": f"{prompt}\n\n{first}" if prompt else first})
        rewards: list[float | None] = []
        gave_none = True
        while not found.get("done") and len(rewards) < config.max_turns:
            try:
                reply = await openai.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as e:
                if e.code != USED_UP or not rewards:
                    raise
                break
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            try:
                found = await self._ask(socket, {"type": "step", "data": self._action(text)})
            except ActionRefusedError as e:
                rewards.append(0.0)
                messages.append({"role": "user", "content": f"error: {e}"})
                continue
            gave_none = gave_none and found.get("reward") is None
            rewards.append(float(found.get("reward") or 0.0))
            messages.append({"role": "user", "content": self._observation(found)})
        # One that used up its turns or its context has earned what its steps gave, 0.0 if nothing.
        return None if found.get("done") and gave_none else rewards

    def _action(self, reply: str) -> dict[str, Any]:
        """
        Raises:
            ActionRefusedError: it is none.
        """
        if self._config.action_key is not None:
            return {self._config.action_key: reply}
        try:
            action = json.loads(reply)
        except (ValueError, RecursionError) as e:  # thousands of brackets, too
            raise ActionRefusedError(f"reply with a JSON object alone ({e})") from e
        if not isinstance(action, dict):
            raise ActionRefusedError("reply with a JSON object alone")
        return action

    def _observation(self, found: Mapping[str, Any]) -> str:
        observation = found.get("observation")
        key = self._config.observation_key
        if key is not None and isinstance(observation, Mapping):
            observation = observation.get(key)
        text = observation if isinstance(observation, str) else json.dumps(observation)
        return plain_text(text)

    async def _ask(
        self, socket: aiohttp.ClientWebSocketResponse, message: Mapping[str, Any]
    ) -> dict[str, Any]:
        """
        Raises:
            ActionRefusedError: the server answers with an error.
            HarnessError: its code has raised.
            InfrastructureError: it does not answer, or cannot go on.
        """
        await socket.send_json(message)
        try:
            answer = await socket.receive_json(timeout=self._config.message_timeout_s)
        except (TypeError, TimeoutError, ValueError) as e:  # TypeError: it closed the connection
            why = str(e) or type(e).__name__
            raise InfrastructureError(f"{self._config.url} gave no answer: {why}") from e
        data = answer.get("data") or {}
        if answer.get("type") == "error":
            text = plain_text(f"{data.get('message')} ({data.get('code')})")
            if data.get("code") in POLICYS:
                raise ActionRefusedError(text)
            if data.get("code") == "EXECUTION_ERROR":  # its own code raised: nobody knows whose
                raise HarnessError(f"{self._config.url}: {text}")
            raise InfrastructureError(f"{self._config.url}: {text}")
        return dict(data)

"""The loop of an agent with tools, for agents that have no other wish.

::

    task ──► messages ──► policy ──► tool calls? ──► run them, append ──┐
                 ▲                       │ none                         │
                 └───────────────────────┼──────────────────────────────┘
                                         ▼
                                     ToolRun: messages, answer, rewards, why it stopped

Plain `openai` SDK against the gateway, which keeps tokens and log-probs. What tools gave becomes
metadata of the trajectory, which a reward function finds in `extra_info`: `tool_rewards` of the
calls, `rollout_reward_scores` by tool (verl's names), `tool_metrics` by tool. Owns the turns and
what stops them. Does not own the tools (`session.py`) or the score (a white-box agent computes it
from the `ToolRun`, or returns None and leaves it to `rollout.reward`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai import AsyncOpenAI, BadRequestError, DefaultAioHttpClient

from stepwell.trainer.tools.base import Tool
from stepwell.trainer.tools.session import ToolBox

USED_UP = "trajectory_limit_exceeded"
"""Code of the gateway's refusal when a trajectory has all the turns or tokens it may have."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One rollout, as it ended."""

    messages: list[dict[str, Any]]
    """The whole conversation, the task's own messages first."""
    answer: str
    """Text of the last reply; what it says before it was cut off, if `stop` is not "answer"."""
    stop: Literal["answer", "length", "max_turns"]
    """It answered without a call; its reply was cut off, or the gateway lets the trajectory have no
    more; or it had called tools to the end."""
    turns: int
    """Replies of the policy."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls by tool."""
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that came to nothing, by kind (`CallResult.error`)."""
    step_rewards: list[float] = field(default_factory=list)
    """Rewards that `execute` gave, in the order of the calls."""
    rewards: dict[str, float] = field(default_factory=dict)
    """`calc_reward` by tool, of those that were used and have an opinion."""
    metrics: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Metrics of `execute`, by tool, in the order of the calls."""


class ToolAgent:
    """Lets the policy work on tasks with tools; one object for any number of rollouts at once. It
    is an agent itself: `rollout.agent` may name it, or the file of its tools.

    Args:
        tools: a box, or what goes into one.
        max_turns: replies of the policy, at most; None: what the box says.
        system: a system message before the task's own; None: none.
        model: name of the policy; the gateway serves it under any.
        sampling: of each request: temperature, max_tokens, …
    """

    def __init__(
        self,
        tools: ToolBox | Sequence[Tool | Callable[..., Any]],
        *,
        max_turns: int | None = None,
        system: str | None = None,
        model: str = "policy",
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it should be 1 or more")
        self.tools = tools if isinstance(tools, ToolBox) else ToolBox(tools)
        self._max_turns = max_turns or self.tools.config.max_turns
        self._system = system
        self._model = model
        self._sampling = dict(sampling or {})
        self._http: tuple[asyncio.AbstractEventLoop, DefaultAioHttpClient] | None = None

    async def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str) -> None:
        """`run`, scored by `rollout.reward`."""
        await self.run(task, base_url, api_key)

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> ToolRun:
        """One rollout of `task` (its `messages`, or its `question`), as an agent's function gets
        them.

        Raises:
            openai.OpenAIError: the gateway refused or failed; the rollout is aborted.
            ToolConfigError, ToolUnavailableError: a tool is not there, or says that it is void.
        """
        client = AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key=api_key, http_client=self._http_client()
        )
        messages = self._messages(task)
        stop: Literal["answer", "length", "max_turns"] = "max_turns"
        answer, turns = "", 0
        async with self.tools.session(task) as tools:
            request = {"model": self._model, **self._sampling}
            if tools.schemas:
                request["tools"] = tools.schemas
            while turns < self._max_turns:
                try:
                    reply = await client.chat.completions.create(messages=messages, **request)
                except BadRequestError as e:
                    if e.code != USED_UP or not turns:
                        raise
                    stop = "length"
                    break
                turns += 1
                choice = reply.choices[0]
                answer = choice.message.content or ""
                messages.append(choice.message.model_dump(exclude_none=True))
                calls = choice.message.tool_calls
                if not calls:
                    stop = "length" if choice.finish_reason == "length" else "answer"
                    break
                if turns == self._max_turns:
                    break  # nobody would read the results
                messages += await tools.call(calls)
            rewards = await tools.rewards()
            if tools.step_rewards or rewards or tools.metrics:
                metadata: dict[str, Any] = {
                    "tool_rewards": tools.step_rewards,
                    "rollout_reward_scores": rewards,
                }
                if tools.metrics:
                    metadata["tool_metrics"] = tools.metrics
                await client.post(
                    "/register_trajectory", body={"metadata": metadata}, cast_to=object
                )
            return ToolRun(
                messages=messages,
                answer=answer,
                stop=stop,
                turns=turns,
                calls=Counter(r.name for r in tools.results),
                errors=tools.errors,
                step_rewards=tools.step_rewards,
                rewards=rewards,
                metrics=tools.metrics,
            )

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http[1].aclose()
            self._http = None

    def _messages(self, task: Mapping[str, Any]) -> list[Any]:
        messages = [dict(m) for m in task.get("messages") or ()]
        if not messages:
            messages = [{"role": "user", "content": task["question"]}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def _http_client(self) -> DefaultAioHttpClient:
        """One connection pool per event loop: it costs 20 ms, a client on top of it 0.04."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._http[0] is not loop:
            self._http = (loop, DefaultAioHttpClient())
        return self._http[1]

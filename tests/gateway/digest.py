"""Digest of the Steps that a random, repeatable session leaves: equal before and after a change
that is not to change what is stored.

    python -m tests.gateway.digest [N_CALLS] [SEED]

Two gateways over one pool serve agents that extend, branch, edit, stream, sample several times, try
again (marked or not, in flight or afterwards, here or at the other gateway), speak all dialects and
meet a pool that loses requests and answers. Counted are ids, log-probs, versions, indices, parents
and metadata, and what retries are told; times and random ids are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from stepwell.datapool.types import Step
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from stepwell.gateway.reply import calls
from stepwell.gateway.server import http_protocol
from tests.gateway.conftest import (
    Sampled,
    ScriptedEngine,
    WatchedPort,
    eos_id,
    local_pool,
    make_tokenizer,
    port_of,
    serving,
)
from tests.gateway.raw import until

TOOL = {
    "name": "calculator",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Agent:
    path: str
    """Path of its trajectory's URL, or "" for one that is found by its conversation."""
    headers: dict[str, str]
    with_tools: bool
    messages: list[Any] = field(default_factory=list)
    last: tuple[str, dict[str, Any]] | None = None
    """Path and body of its last call."""
    previous: str | None = None
    """Last id of a stored response."""
    connections: tuple[aiohttp.ClientSession, ...] = ()
    """One connection each to a gateway: a retry over the same one finds a conversation that a retry
    over another does not, so that may not hang on which one a client's pool hands out first."""


class Session:
    def __init__(self, seed: int, urls: list[str], engine: ScriptedEngine, port: WatchedPort):
        self.random = random.Random(seed)
        self.urls, self.engine, self.port = urls, engine, port
        self.n = 0
        self.heard: list[str] = []
        """By those who asked again."""
        self.connections: list[tuple[aiohttp.ClientSession, ...]] = []
        """By agent."""
        self.agents: list[Agent] = []

    def _agent(self, i: int) -> Agent:
        kind = self.random.choice(("url", "header", "conversation", "session"))
        uid = f"t{i}-{self.n}"
        headers = {"authorization": f"Bearer key-{uid}"}
        if kind == "header":
            headers |= {"x-trajectory-uid": uid, "x-prompt-uid": f"p-{uid}"}
        if kind == "session":
            headers["x-session-id"] = uid
        path = f"/{uid}/p-{uid}" if kind == "url" else ""
        with_tools = self.random.random() < 0.5
        return Agent(path, headers, with_tools, connections=self.connections[i])

    async def play(self, n_calls: int) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(6):
                own = [await stack.enter_async_context(one_connection()) for _ in range(2)]
                self.connections.append(tuple(own))
            self.agents = [self._agent(i) for i in range(6)]
            await self._play(n_calls)

    async def _play(self, n_calls: int) -> None:
        for self.n in range(n_calls):
            i = self.random.randrange(len(self.agents))
            agent = self.agents[i]
            act = self.random.choices(
                (self.extend, self.branch, self.again, self.lost, self.joined, self.other, None),
                (12, 3, 4, 2, 2, 3, 1),
            )[0]
            if act is not None:
                await act(agent)
            else:
                if agent.path:
                    await self.send(agent, "v1/complete_trajectory", {"reward": 1.0})
                self.agents[i] = self._agent(i)

    def url(self, agent: Agent) -> str:
        """Conversations are one gateway's; anything else may move."""
        moves = agent.path or "x-trajectory-uid" in agent.headers
        return self.urls[self.random.randrange(2) if moves else 0]

    async def send(
        self,
        agent: Agent,
        path: str,
        body: dict[str, Any],
        url: str | None = None,
        connection: int = 0,
        **more: str,
    ) -> str:
        url = f"{url or self.url(agent)}{agent.path}/{path}"
        headers = agent.headers | {name.replace("_", "-"): v for name, v in more.items()}
        async with agent.connections[connection].post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            failed = answer.status != 200 or 'data: {"error"' in text
            return f"!{answer.status} {text}" if failed else text

    def body(self, agent: Agent) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "messages": [*agent.messages]}
        if agent.with_tools:
            body["tools"] = TOOLS
        for name, value, share in (
            ("stream", True, 0.3),
            ("logprobs", True, 0.15),
            ("stop", ["stop here"], 0.15),
            ("n", 2, 0.1),
            ("temperature", 0.5, 0.2),
            ("max_tokens", 4, 0.1),
        ):
            if self.random.random() < share:
                body[name] = value
        return body

    def hears(self, agent: Agent, body: dict[str, Any], answer: str) -> None:
        agent.last = "v1/chat/completions", body
        if answer.startswith("!"):
            return
        message = message_of(answer)
        agent.messages.append(message)
        for call in message.get("tool_calls") or ():
            agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})

    async def extend(self, agent: Agent) -> None:
        if not agent.messages or agent.messages[-1]["role"] != "tool":
            agent.messages.append({"role": "user", "content": f"say {self.n}, stop here"})
        body = self.body(agent)
        self.hears(agent, body, await self.send(agent, "v1/chat/completions", body))

    async def branch(self, agent: Agent) -> None:
        how = self.random.choice(("shorter", "edited", "side"))
        if how == "side":
            agent.messages = []
        elif how == "shorter":
            first = [i for i, m in enumerate(agent.messages) if m["role"] == "user"]
            agent.messages = agent.messages[: self.random.choice(first) + 1] if first else []
        elif agent.messages:
            agent.messages[0] = {"role": "user", "content": f"edited {self.n}"}
        await self.extend(agent)

    async def again(self, agent: Agent) -> None:
        """The last request once more, marked or not."""
        if agent.last is None:
            return
        path, body = agent.last
        marked = RETRY if self.random.random() < 0.7 else {}
        connection = int(self.random.random() < 0.3)
        self.heard.append(heard(await self.send(agent, path, body, None, connection, **marked)))

    async def lost(self, agent: Agent) -> None:
        """The pool loses a commit, or its answer; the agent tries again or goes on."""
        agent.messages.append({"role": "user", "content": f"lost {self.n}"})
        body = self.body(agent)
        body.pop("n", None)
        at = self.url(agent)
        self.port.failures.append(self.random.choice(("before", "after")))
        answer = await self.send(agent, "v1/chat/completions", body, at)
        self.port.failures.clear()
        if self.random.random() < 0.7:
            url = self.urls[1 - self.urls.index(at)] if self.random.random() < 0.5 else at
            url = url if at != self.url(agent) or agent.path else at
            answer = await self.send(agent, "v1/chat/completions", body, url, **RETRY)
        self.hears(agent, body, answer)
        if answer.startswith("!"):
            agent.messages.pop()

    async def joined(self, agent: Agent) -> None:
        """A retry while the first try is in flight."""
        agent.messages.append({"role": "user", "content": f"joined {self.n}"})
        body = self.body(agent)
        body.pop("n", None)
        gate, at = asyncio.Event(), self.urls[0]
        script = self.engine.default({})
        self.engine.script.append(Sampled(script.ids, gate=gate))
        self.engine.arrived.clear()
        first = asyncio.create_task(self.send(agent, "v1/chat/completions", body, at))
        await until(lambda: self.engine.arrived.is_set() or first.done())
        n = self.counted()
        second = asyncio.create_task(self.send(agent, "v1/chat/completions", body, at, 1, **RETRY))
        await until(lambda: self.counted() > n or second.done())
        gate.set()
        answers = await first, await second
        self.engine.script.clear()
        if not any(answer.startswith("!") for answer in answers):
            assert message_of(answers[0]) == message_of(answers[1])
        self.hears(agent, body, answers[0])

    async def other(self, agent: Agent) -> None:
        """A call of another dialect."""
        text = f"other {self.n}"
        path, body = self.random.choice(
            (
                ("v1/completions", {"prompt": text, "max_tokens": 9}),
                ("v1/completions", {"prompt": [5, 6, 7], "n": 2}),
                ("v1/completions", {"prompt": [text, "and"]}),
                ("v1/responses", {"input": text}),
                ("v1/responses", {"input": text, "stream": True}),
                ("v1/messages", {"messages": [{"role": "user", "content": text}]}),
                ("v1/models/m:generateContent", {"contents": [{"parts": [{"text": text}]}]}),
            )
        )
        body = {"model": "m", **body}
        if "responses" in path and agent.previous and self.random.random() < 0.7:
            body["previous_response_id"] = agent.previous
        if "messages" in path:
            body["max_tokens"] = 9
        if "generate" in path:
            body.pop("model")
        answer = await self.send(agent, path, body, self.urls[0])
        if "responses" in path and not body.get("stream") and not answer.startswith("!"):
            agent.previous = json.loads(answer)["id"]
        agent.last = path, body


def one_connection() -> aiohttp.ClientSession:
    """A client that has one connection to each gateway, and keeps it."""
    connector = aiohttp.TCPConnector(limit_per_host=1, keepalive_timeout=600)
    return aiohttp.ClientSession(connector=connector)


def heard(answer: str) -> str:
    """The numbers of the replies that an answer holds."""
    return answer[:4] if answer.startswith("!") else " ".join(re.findall(r"reply (\d+)", answer))


def message_of(answer: str) -> dict[str, Any]:
    """The first sample's message, whole or of a stream."""
    if not answer.startswith("data: "):
        message = json.loads(answer)["choices"][0]["message"]
        return {k: v for k, v in message.items() if v is not None}
    text, found = "", []
    for line in answer.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if choice["index"] == 0:
                    text += choice["delta"].get("content") or ""
                    found += choice["delta"].get("tool_calls") or ()
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if found:
        message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in found]
    return {k: v for k, v in message.items() if v is not None or not found}


def described(step: Step, names: dict[str, str]) -> Any:
    """Fields of a Step that the digest counts."""
    log_probs = step.rollout_log_probs
    metadata = json.loads(json.dumps(step.metadata, sort_keys=True))
    metadata.pop("timing", None)
    metadata.pop("call_id", None)
    if isinstance(note := metadata.get("turn"), dict):
        note.pop("created")
        if metadata.get("dialect") == "openai_responses":  # its body names a random id
            note.pop("retry")
    return [
        names.setdefault(step.trajectory_uid, f"trajectory {len(names)}"),
        step.step_index,
        step.parent_index,
        step.prompt_ids.tolist(),
        step.response_ids.tolist(),
        None if log_probs is None else log_probs.tolist(),
        step.policy_version,
        step.finish_reason,
        [list(span) for span in step.version_spans] if step.version_spans else [],
        metadata,
    ]


async def digest(n_calls: int, seed: int, path: str | None = None) -> tuple[str, int]:
    numbers = iter(range(1 << 40))
    # Ids of tool calls stand in later requests, and so in digests of these.
    made = (int(f"{n:032x}"[::-1][:24], 16) for n in numbers)
    calls.urandom = lambda n: next(made).to_bytes(n)  # type: ignore[attr-defined]
    tokenizer = make_tokenizer("chatml")
    end = eos_id(tokenizer)
    engine = ScriptedEngine(default=lambda _: Sampled([end]), burst=3)
    engine.context_length = 100_000

    def say(_: Any) -> Sampled:
        n = session.n
        text = f"reply {n} " * (n % 5 + 1) + ("stop here" if n % 4 == 0 else "")
        text = text + CALL if n % 3 == 0 else text
        return Sampled([*tokenizer.encode(text).tolist(), end], version=n // 40)

    engine.default = say
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engine_url = await enter(engine.running())
        pool = await enter(local_pool())
        config = GatewayConfig(port=0, replicas=2)
        wiring = Wiring((engine_url,), tuning=Tuning(retry_backoff_s=0.001))
        apps = [create_app(config, wiring, pool, tokenizer) for _ in range(2)]
        urls = [await enter(serving(app, http=http_protocol(config))) for app in apps]
        session = Session(seed, urls, engine, port_of(pool))
        session.counted = lambda: apps[0].state.services.calls.counts["retries"]  # type: ignore[attr-defined]
        await session.play(n_calls)
        names: dict[str, str] = {}
        rows = [*session.heard]
        rows += [json.dumps(described(s, names), sort_keys=True) for s in port_of(pool).stored()]
    if path is not None:
        with open(path, "w") as file:  # noqa: ASYNC230 - a script
            file.write("\n".join(rows) + "\n")
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest(), len(rows)


if __name__ == "__main__":
    given = [int(arg) for arg in sys.argv[1:3]]
    n_calls, seed = [*given, *(300, 1)[len(given) :]]
    found, n_steps = asyncio.run(digest(n_calls, seed, *sys.argv[3:4]))
    print(f"{found} over {n_steps} Steps of {n_calls} calls, seed {seed}")

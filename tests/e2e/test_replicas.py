"""Gateway processes are killed in the middle of conversations: nothing that was acknowledged is
lost or doubled, and the conversations go on, as the same branch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from stepwell.cluster.parts import Cluster, start_cluster
from stepwell.datapool.types import Step
from tests.builders import until
from tests.e2e.conftest import ROOT, SMALL, small_config

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CONVERSATIONS = 8
TURNS = 6


@asynccontextmanager
async def gateways(folder: Path, n: int) -> AsyncIterator[Cluster]:
    config = small_config(folder, f"gateway.replicas={n}", "pool.shards=2", "rollout.workers=1")
    async with start_cluster(config) as cluster:
        assert len(cluster.gateway_urls) == n
        yield cluster


def process_at(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections):
            return process
    raise AssertionError(f"nobody listens at {url}")


@dataclass
class Agent:
    """A conversation by plain HTTP. It repeats what fails, at the next gateway that it knows."""

    http: aiohttp.ClientSession
    origins: Sequence[str]
    path: str
    origin: str
    stream: bool
    marks_retries: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    acknowledged: list[tuple[str, int]] = field(default_factory=list)
    """(id, sampled tokens) of each reply that came whole."""
    served_by: list[str] = field(default_factory=list)

    async def turn(self) -> None:
        self.messages.append({"role": "user", "content": f"{len(self.messages)} + 1 ="})
        body = {
            "model": "m",
            "messages": self.messages,
            "max_tokens": 12,
            "stream": self.stream,
            **({"stream_options": {"include_usage": True}} if self.stream else {}),
        }
        headers: dict[str, str] = {}
        async with asyncio.timeout(90):
            while (reply := await self._try(body, headers)) is None:
                if self.marks_retries:
                    headers = {"x-stainless-retry-count": "1"}
                index = self.origins.index(self.origin)
                self.origin = self.origins[(index + 1) % len(self.origins)]
                await asyncio.sleep(0.05)
        uid, text, n_tokens = reply
        self.messages.append({"role": "assistant", "content": text})
        self.acknowledged.append((uid, n_tokens))
        self.served_by.append(self.origin)

    async def _try(self, body: Any, headers: dict[str, str]) -> tuple[str, str, int] | None:
        try:
            async with self.http.post(
                f"{self.origin}/{self.path}/v1/chat/completions", json=body, headers=headers
            ) as response:
                raw = await response.text()
                if response.status >= 500:
                    return None
                assert response.status == 200, raw
        except aiohttp.ClientError:
            return None
        if not self.stream:
            reply = json.loads(raw)
            message = reply["choices"][0]["message"]
            return reply["id"], message["content"] or "", reply["usage"]["completion_tokens"]
        lines = [line.removeprefix("data: ") for line in raw.splitlines() if line[:5] == "data:"]
        if not lines or lines[-1] != "[DONE]":
            return None
        chunks = [json.loads(line) for line in lines[:-1]]
        text = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
        )
        return chunks[0]["id"], text, chunks[-1]["usage"]["completion_tokens"]

    async def steps(self, cluster: Cluster) -> list[Step]:
        uid, prompt_uid = self.path.split("/")
        found = await cluster.pool.resume_trajectory(uid, prompt_uid, elsewhere=True)
        assert found.is_open
        return found.steps


@asynccontextmanager
async def conversations(cluster: Cluster) -> AsyncIterator[list[Agent]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        agents = []
        for i in range(CONVERSATIONS):
            # Every other one in a channel that a gateway would not guess.
            body = {"prompt_uid": f"p{i}", "channel": "val" if i % 2 else "train"}
            async with http.post(f"{cluster.gateway_url}/init_trajectory", json=body) as response:
                base_url = (await response.json())["base_url"]
            origin, *path = base_url.rsplit("/", 2)
            agents.append(
                Agent(http, cluster.gateway_urls, "/".join(path), origin, i % 4 < 2, i % 3 > 0)
            )
        yield agents


async def talk(agents: list[Agent], turns: int) -> None:
    async def one(agent: Agent) -> None:
        for _ in range(turns):
            await agent.turn()

    await asyncio.gather(*map(one, agents))


async def kill_after(agents: list[Agent], n_replies: int, url: str) -> None:
    await until(lambda: sum(len(a.acknowledged) for a in agents) >= n_replies)
    process_at(url).kill()


async def check(cluster: Cluster, agents: list[Agent], turns: int) -> None:
    for agent in agents:
        steps = await agent.steps(cluster)
        assert [
            (f"chatcmpl-{s.metadata['call_id']}", len(s.response_ids)) for s in steps
        ] == agent.acknowledged
        assert [s.step_index for s in steps] == list(range(turns))
        assert [s.parent_index for s in steps] == [None, *range(turns - 1)]
        for parent, child in pairwise(steps):
            before = np.concatenate([parent.prompt_ids, parent.response_ids])
            assert len(child.prompt_ids) > len(before)
            assert np.array_equal(child.prompt_ids[: len(before)], before)


async def test_conversations_go_on_when_their_gateway_is_killed(tmp_path: Path) -> None:
    async with gateways(tmp_path, 2) as cluster, conversations(cluster) as agents:
        first, second = cluster.gateway_urls
        killed = [a for a in agents if a.origin == first]
        assert 2 <= len(killed) <= CONVERSATIONS - 2
        waiting, moving = killed[::2], killed[1::2]
        for agent in waiting:
            agent.origins = (first,)
        await asyncio.gather(talk(agents, TURNS), kill_after(agents, 2 * CONVERSATIONS, first))
        # Who knew another address went on there; the others waited until Ray had it serve again.
        assert all(set(a.served_by) == {first} for a in waiting)
        assert any(set(a.served_by) == {first, second} for a in moving)
        await check(cluster, agents, TURNS)

        # The one that was there all along knows what was stored at the other one meanwhile.
        for turns, url in ((TURNS + 1, first), (TURNS + 2, second)):
            for agent in agents:
                agent.origin, agent.origins = url, (url,)
            await talk(agents, 1)
            await check(cluster, agents, turns)
        await complete(cluster, agents, first)


async def complete(cluster: Cluster, agents: list[Agent], origin: str) -> None:
    """Wherever that is said, it is said of the right one."""
    for agent in agents:
        url = f"{origin}/{agent.path}/v1/complete_trajectory"
        async with agent.http.post(url, json={"reward": 1.0}) as response:
            assert (await response.json())["outcome"] == "complete"
    for channel in ("train", "val"):
        counts = (await cluster.pool.get_statistics(channel))["trajectories"]
        assert (counts["complete"], counts["open"]) == (CONVERSATIONS / 2, 0)


def test_the_command_prints_every_address_and_stops_them_all(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stepwell",
            "serve",
            "--config",
            "quickstart",
            "--replicas",
            "2",
            *SMALL,
            f"run.dir={tmp_path}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        output = ""
        while "Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        urls = [word for word in output.split() if word.startswith("http://")]
        assert len({url for url in urls if not url.endswith("/ui")}) == 2
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        output += process.communicate(timeout=60)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive, [p.cmdline()[:3] for p in alive]

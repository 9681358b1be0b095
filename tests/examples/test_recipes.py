"""The recipes, run as rollouts: a worker, a gateway and the embedded engine with the quickstart's
model, and the pool's core."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from examples.recipes.shell_agent import agent as shell_agent
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.trainer.config import RewardConfig, RolloutConfig
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rollout.worker import RolloutWorker
from tests.backends.engines.embedded_here import embedded_here
from tests.gateway.conftest import QUICKSTART, local_pool, make_tokenizer, port_of, serving
from tests.helpers import gone, serving_posts

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
README = (RECIPES / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
PROGRAMS = sorted(RECIPES.glob("*.py"))
TASK = {
    "question": "State the final answer to the following arithmetic problem: 12 + 34 =",
    "answer": "46",
}
N = 24
"""Rollouts: two in five call the tool before any training, so all but never none of them does."""
SHOWS = {"anthropic": "AsyncAnthropic", "sub_agents": "asyncio.gather", "judge": "JUDGE"}
"""Text that only the snippet of this recipe has."""


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with embedded_here(QUICKSTART) as url:
        yield url


@asynccontextmanager
async def gateway(engine_url: str) -> AsyncIterator[tuple[str, DataPoolClient]]:
    wiring = Wiring((engine_url,), sampling={})
    async with local_pool() as pool:
        app = create_app(GatewayConfig(port=0), wiring, pool, make_tokenizer("quickstart"))
        async with serving(app) as url:
            yield url, pool


async def rollouts(agent: str, url: str, task: dict[str, Any] = TASK) -> dict[str, int]:
    """Run `N` rollouts of `task` and count how they ended."""
    worker = RolloutWorker(RolloutConfig(agent=agent, timeout_s=60, max_attempts=1), [url])
    try:
        return await worker.run_group(task, "p", N)
    finally:
        await worker.close()


def chains(steps: list[Step]) -> dict[str, list[int | None]]:
    """Each trajectory's parents, in its order."""
    found: dict[str, list[int | None]] = {}
    for step in steps:
        found.setdefault(step.trajectory_uid, []).append(step.parent_index)
    return found


@pytest.mark.parametrize("name", ["openai_tool", "langgraph_agent", "shell_agent"])
async def test_a_recipes_rollouts_are_scored_and_each_conversation_is_one_branch(
    name: str, engine_url: str
) -> None:
    async with gateway(engine_url) as (url, pool):
        assert await rollouts(f"examples.recipes.{name}:agent", url) == {"complete": N}
        stored = chains(port_of(pool).stored())
        assert len(stored) == N
        assert max(map(len, stored.values())) > 1, "no rollout called its tool"
        for parents in stored.values():
            assert parents == [None, *range(len(parents) - 1)]
        lease = await pool.lease_batch()
        assert lease is not None
        (group,) = lease.groups
        assert {t.reward for t in group.trajectories} <= {0.0, 1.0}


def test_each_recipe_is_short_enough_to_be_read_at_once() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in PROGRAMS}
    assert len(lengths) == 5
    assert max(lengths.values()) <= 60, lengths


async def test_a_program_that_fails_is_no_score_of_zero() -> None:
    with pytest.raises(RuntimeError, match=r"program\.py ended with"):
        await shell_agent(TASK, "http://127.0.0.1:9", "key")


async def test_a_rollout_that_runs_out_of_time_leaves_no_program_behind() -> None:
    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.Response()

    async with serving_posts("/v1/chat/completions", late) as address:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await shell_agent(TASK, address, "key")
    words = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [line for line in words if any(str(RECIPES / "program.py") in word for word in line)]


@pytest.mark.parametrize("output", ["/dev/null", "/dev/stdout"])
async def test_what_a_program_leaves_running_ends_with_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """A server that it has started may hold its output open: then only the time ends it."""
    program, left = tmp_path / "program.py", tmp_path / "left"
    program.write_text(
        "import os, subprocess\n"
        f"child = subprocess.Popen(['sleep', '600'], stdout=open({output!r}, 'w'))\n"
        f"open({f'{left}.new'!r}, 'w').write(f'{{child.pid}} {{os.getpid()}}')\n"
        f"os.rename({f'{left}.new'!r}, {str(left)!r})\n"
        "print(46)\n"
    )
    monkeypatch.setattr("examples.recipes.shell_agent.PROGRAM", program)
    rollout = asyncio.ensure_future(shell_agent(TASK, "http://127.0.0.1:9", "key"))
    while not os.path.exists(left):  # noqa: ASYNC110, ASYNC240 - another process
        await asyncio.sleep(0.01)
    child, ended = map(int, left.read_text().split())
    assert await gone(ended)
    if output == "/dev/stdout":
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    else:
        assert await rollout == 1.0
    assert await gone(child)


@pytest.mark.parametrize(("name", "calls"), [("anthropic", 1), ("sub_agents", 3)])
async def test_an_agent_of_the_readme_runs(
    name: str, calls: int, engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = (s for s in SNIPPETS if SHOWS[name] in s)
    (tmp_path / f"recipe_{name}.py").write_text(snippet)
    monkeypatch.syspath_prepend(tmp_path)
    async with gateway(engine_url) as (url, pool):
        assert await rollouts(f"recipe_{name}:agent", url) == {"complete": N}
        assert [len(parents) for parents in chains(port_of(pool).stored()).values()] == [calls] * N


def test_the_judge_of_the_readme_is_a_reward_function(tmp_path: Path) -> None:
    (snippet,) = (s for s in SNIPPETS if SHOWS["judge"] in s)
    (tmp_path / "my_judge.py").write_text(snippet)
    RewardManager(RewardConfig(function=f"{tmp_path / 'my_judge.py'}:score"))

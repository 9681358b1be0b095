"""A pool that can store no more, because its disk or its channel is full: agents are told when to
come again, and nothing that was generated is lost or generated for nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepwell.datapool import ChannelConfig, PoolConfig, Step
from tests.builders import until
from tests.gateway.conftest import World
from tests.helpers import full_disk

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


async def steps(world: World) -> list[Step]:
    page = await world.pool.read_trajectories("train")
    return [step for exported in page.unpack() for step in exported.trajectory.steps]


async def ask(world: World, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.url}{path}", json=body, headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.json()


# -- a full disk -------------------------------------------------------------------------------

CALLS = {
    "chat/completions": {"model": "m", "messages": MESSAGES},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES},
}


@pytest.mark.parametrize("path", CALLS)
async def test_a_full_disk_is_a_503_that_says_when_to_come_again_and_the_reply_is_kept(
    worlds: Any, tmp_path: Path, path: str
) -> None:
    world = await worlds(pool_folder=tmp_path)
    url, text = "/t1/p1/v1/" + path, "a long enough reply " * 400
    status, _, _ = await ask(world, "/t1/p1/v1/register_trajectory", {})
    assert status == 200
    world.say(text)
    body = {**CALLS[path], "max_tokens": 3000}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    with full_disk():
        for _ in range(2):
            status, headers, answer = await ask(world, url, body)
            assert status == 503, answer
            assert int(headers["retry-after"]) >= 1
            assert "the DataPool's disk is full" in answer["error"]["message"]
            assert str(tmp_path) not in str(answer)
            assert headers.get("x-should-retry") != "false"
    status, _, answer = await ask(world, url, body)
    assert status == 200
    assert "a long enough reply" in str(answer)
    assert len(world.engine.requests) == 1
    assert [row.step_index for row in await steps(world)] == [0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_trajectory", {"metadata": {"text": "x" * 50_000}}),
        ("/t1/p1/v1/register_trajectory", {"metadata": {"text": "x" * 50_000}}),
        ("/t1/p1/v1/complete_trajectory", {"reward": 1, "metadata": {"text": "x" * 50_000}}),
        ("/t1/p1/v1/abort_trajectory", {"reason": "x" * 50_000}),
        (
            "/submit_steps",
            {
                "steps": [
                    {
                        "trajectory_uid": "t1",
                        "prompt_uid": "p1",
                        "prompt_ids": [*range(300)] * 30,
                        "response_ids": [1],
                    }
                ]
            },
        ),
    ],
)
async def test_every_endpoint_that_stores_answers_503_while_the_disk_is_full(
    worlds: Any, tmp_path: Path, path: str, body: Any
) -> None:
    world = await worlds(pool_folder=tmp_path)
    await ask(world, "/t1/p1/v1/register_trajectory", {})
    with full_disk():
        status, headers, answer = await ask(world, path, body)
        assert (status, answer["error"]["code"]) == (503, "pool_storage_error"), answer
        assert int(headers["retry-after"]) >= 1
    status, _, answer = await ask(world, path, body)
    assert status == 200, answer


async def test_the_sweeper_outlives_a_full_disk(worlds: Any, tmp_path: Path) -> None:
    world = await worlds(pool_folder=tmp_path, conversation_idle_s=0.5)
    status, _, _ = await ask(world, "/v1/chat/completions", CALLS["chat/completions"])
    assert status == 200
    identities = world.gateway.identities
    with full_disk():
        await asyncio.sleep(1.2)
        assert len(world.gateway.trajectories) == 1
        assert not identities._sweeper.done()
    await until(lambda: not len(world.gateway.trajectories), 10)
    assert await world.pool.lease_batch(1) is not None


async def test_the_sweeper_outlives_errors_that_nobody_foresaw(worlds: Any) -> None:
    world = await worlds(conversation_idle_s=0.1)
    complete, asked = world.pool.complete_trajectory, []

    async def breaks_first(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 1:
            raise KeyError("a bug")
        return await complete(*arguments, **options)

    world.pool.complete_trajectory = breaks_first
    await ask(world, "/v1/chat/completions", CALLS["chat/completions"])
    await until(lambda: not len(world.gateway.trajectories), 10)


# -- a full channel ----------------------------------------------------------------------------


def blocking() -> PoolConfig:
    limits = ChannelConfig(overflow="block", max_queue_size=1)
    return PoolConfig(default=limits)


async def test_nothing_is_generated_for_a_channel_that_is_full(worlds: Any, tmp_path: Path) -> None:
    world = await worlds(pool_config=blocking(), pool_folder=tmp_path, queue_timeout_s=0.2)
    url = "/{0}/p-{0}/v1/chat/completions"
    assert (await ask(world, url.format("a"), CALLS["chat/completions"]))[0] == 200
    status, _, _ = await ask(world, "/a/p-a/v1/complete_trajectory", {"reward": 1})
    assert status == 200
    before = len(world.engine.requests)
    for uid in "bcd":
        status, headers, answer = await ask(world, url.format(uid), CALLS["chat/completions"])
        assert (status, answer["error"]["code"]) == (503, "channel_full"), answer
        assert int(headers["retry-after"]) >= 1
        assert "max_queue_size=1 ready groups" in answer["error"]["message"]
        assert "did not answer" not in answer["error"]["message"]
    body = [{"trajectory_uid": "w", "prompt_uid": "w", "prompt_ids": [1], "response_ids": [1]}]
    status, _, answer = await ask(world, "/submit_steps", {"steps": body})
    assert (status, answer["error"]["code"]) == (503, "channel_full")
    status, _, answer = await ask(world, "/init_trajectory", {})
    assert (status, answer["error"]["code"]) == (503, "channel_full")
    assert len(world.engine.requests) == before
    assert len(await steps(world)) == 1


async def test_a_call_that_waits_for_room_goes_on_when_something_is_leased(
    worlds: Any, tmp_path: Path
) -> None:
    world = await worlds(pool_config=blocking(), pool_folder=tmp_path)
    await ask(world, "/a/p-a/v1/chat/completions", CALLS["chat/completions"])
    await ask(world, "/a/p-a/v1/complete_trajectory", {"reward": 1})
    waiting = [
        asyncio.create_task(
            ask(world, f"/{u}/p-{u}/v1/chat/completions", CALLS["chat/completions"])
        )
        for u in "bc"
    ]
    until = time.monotonic() + 10
    while (await world.pool.get_statistics("train"))["waiting"]["producers"] != 2:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    assert len(await steps(world)) == 1
    assert await world.pool.lease_batch(1) is not None
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]
    assert len(await steps(world)) == 3


async def test_the_openai_client_gets_through_a_full_disk_by_itself(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await worlds(pool_folder=tmp_path)
    client = await world.client(max_retries=2)
    waits: list[float] = []
    disk = ExitStack()

    async def at_once(seconds: float) -> None:
        waits.append(seconds)
        disk.close()

    monkeypatch.setattr("openai._base_client.anyio.sleep", at_once)
    await ask(world, "/t1/p1/v1/register_trajectory", {})
    world.say("a long enough reply " * 400)
    with disk:
        disk.enter_context(full_disk())
        got = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3000)
    assert got.choices[0].message.content.startswith("a long enough reply")
    assert waits == [10.0]
    assert len(world.engine.requests) == 1
    assert len(await steps(world)) == 1

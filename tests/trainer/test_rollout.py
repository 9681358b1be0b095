"""Rollouts end in exactly one way, and a failure is an abort with its reason, never a score."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.rollout import worker as worker_module
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.rollout.worker import RolloutWorker, start_workers
from tests.helpers import PanicError

compact = partial(json.dumps, separators=(",", ":"))


class RecordingGateway:
    """The trajectory endpoints of the gateway, which remember what they were told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.url = ""
        self.closed = False
        self.refusals: dict[str, list[web.Response]] = {}
        """Answers to the next requests, by "init", "complete" and "abort"."""
        self._called = asyncio.Event()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "undisturbed_s": 1000.0})

    async def init(self, request: web.Request) -> web.Response:
        if refusals := self.refusals.get("init"):
            return refusals.pop(0)
        body = await request.json()
        uid = f"t{len(self.calls)}"
        self.calls.append(("init", uid, body))
        base_url = f"{self.url}/{uid}/{body['prompt_uid']}"
        return web.json_response({"trajectory_uid": uid, "base_url": base_url})

    async def end(self, request: web.Request) -> web.Response:
        if refusals := self.refusals.get(request.match_info["how"]):
            return refusals.pop(0)
        if self.closed:
            error = {"message": "it is closed", "code": "trajectory_closed"}
            return web.json_response({"error": error}, status=409, dumps=compact)
        self.calls.append(
            (request.match_info["how"], request.match_info["uid"], await request.json())
        )
        self._called.set()
        return web.json_response({"status": "ok"})

    async def hanging(self, n: int) -> None:
        """Returns once `n` agents hang."""
        while len(self.told("hangs")) < n:
            self._called.clear()
            await self._called.wait()

    def told(self, how: str) -> list[dict[str, Any]]:
        return [body for kind, _, body in self.calls if kind == how]


@pytest.fixture
async def gateway() -> AsyncIterator[RecordingGateway]:
    recording = RecordingGateway()
    app = web.Application()
    app.router.add_get("/health", recording.health)
    app.router.add_post("/init_trajectory", recording.init)
    app.router.add_post("/{uid}/{prompt}/v1/{how}_trajectory", recording.end)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    recording.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield recording
    await runner.cleanup()


async def right(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


async def unscored(task: Mapping[str, Any], base_url: str, api_key: str) -> None:
    return None


async def crashes(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise ValueError("no such tool")


async def crashes_without_a_word(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise OSError


class NoText(Exception):  # noqa: N818 - a name as foreign code has it
    def __str__(self) -> str:
        return self.message


async def crashes_and_cannot_say_why(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise NoText


async def calls_a_wrong_path(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise LookupError(f"404: POST {base_url}/chat/completions")


async def calls_elsewhere(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    async with aiohttp.ClientSession() as session:
        await session.post("http://127.0.0.1:1/v1/chat/completions", json={})
    return 1.0


async def returns_text(task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    return "347"


async def returns_nan(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    return float("nan")


async def returns_list(task: Mapping[str, Any], base_url: str, api_key: str) -> list[float | None]:
    return [0.5, None, 1]


async def returns_numpy(task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    return np.float32(0.5)


async def exits(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    sys.exit("usage: agent [--help]")


async def panics(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise PanicError("called `Option::unwrap()` on a `None` value")


async def panics_in_a_task_group(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    async with asyncio.TaskGroup() as group:
        group.create_task(panics(task, base_url, api_key))
    return 1.0


async def loses_a_tool_in_a_task_group(
    task: Mapping[str, Any], base_url: str, api_key: str
) -> float:
    async with asyncio.TaskGroup() as group:
        group.create_task(crashes(task, base_url, api_key))
    return 1.0


async def is_cancelled_within(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    tool = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_soon(tool.cancel)
    await tool
    return 1.0


async def times_out_within(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise TimeoutError("the tool took too long")


async def hangs(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    async with aiohttp.ClientSession() as session:
        await session.post(f"{base_url}/v1/hangs_trajectory", json={})
    await asyncio.sleep(3600)
    return 0.0


async def second_try(task: Any, base_url: str, api_key: str) -> float:
    task.setdefault("tries", []).append(base_url)
    if len(task["tries"]) == 1:
        raise ValueError("lost")
    return 0.5


def not_async(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


async def run(gateway: RecordingGateway, agent: str, n: int = 1, **options: Any) -> dict[str, int]:
    """Run a group; return how many of its rollouts ended in which way, failures by their type."""
    config = RolloutConfig(agent=f"{__name__}:{agent}", **options)
    worker = RolloutWorker(config, [gateway.url])
    try:
        ends = await worker.run_group({"question": "?"}, "p", n, "train")
        return {end.partition(":")[0]: times for end, times in ends.items()}
    finally:
        await worker.close()


async def test_every_rollout_of_a_group_is_a_trajectory_of_its_own(
    gateway: RecordingGateway,
) -> None:
    assert await run(gateway, "right", n=4) == {"complete": 4}
    assert [b["prompt_uid"] for b in gateway.told("init")] == ["p"] * 4
    assert sorted(b["metadata"]["rollout_index"] for b in gateway.told("init")) == [0, 1, 2, 3]
    assert gateway.told("complete") == [{"reward": 1.0}] * 4


async def test_the_last_rollouts_are_marked_as_greedy_baselines_and_so_are_their_retries(
    gateway: RecordingGateway,
) -> None:
    worker = RolloutWorker(RolloutConfig(agent=f"{__name__}:crashes"), [gateway.url])
    await worker.run_group({"question": "?"}, "p", 3, "train", n_greedy=1)
    await worker.close()
    marks = sorted(
        (b["metadata"]["rollout_index"], b["metadata"].get("greedy_baseline"), b["attempt"])
        for b in gateway.told("init")
    )
    expected = ((0, None), (1, None), (2, True))
    assert marks == [(i, greedy, attempt) for i, greedy in expected for attempt in (0, 1)]


async def test_an_agent_that_returns_none_leaves_the_score_open(gateway: RecordingGateway) -> None:
    assert await run(gateway, "unscored") == {"complete": 1}
    assert gateway.told("complete") == [{"reward": None}]


async def test_a_crash_is_an_abort_with_its_reason_and_no_reward(gateway: RecordingGateway) -> None:
    assert await run(gateway, "crashes", max_attempts=1) == {"ValueError": 1}
    assert gateway.told("abort") == [{"reason": "ValueError: no such tool", "will_retry": False}]
    assert gateway.told("complete") == []


async def raises_several(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    raise ExceptionGroup("two tools", [ValueError("no such tool"), KeyError("city")])


@pytest.mark.parametrize("agent", ["loses_a_tool_in_a_task_group", "raises_several"])
async def test_an_error_in_a_group_is_told_as_itself(gateway: RecordingGateway, agent: str) -> None:
    ends = await run(gateway, agent, max_attempts=1)
    assert ends == {"ValueError": 1}
    assert gateway.told("abort")[0]["reason"] == "ValueError: no such tool"


async def test_an_error_without_a_text_is_told_by_its_type(gateway: RecordingGateway) -> None:
    await run(gateway, "crashes_without_a_word", max_attempts=1)
    assert gateway.told("abort") == [{"reason": "OSError", "will_retry": False}]


async def test_an_error_whose_text_cannot_be_had_ends_its_rollout_alone(
    gateway: RecordingGateway,
) -> None:
    assert await run(gateway, "crashes_and_cannot_say_why", max_attempts=1) == {"NoText": 1}
    assert gateway.told("abort") == [{"reason": "NoText", "will_retry": False}]


async def test_a_failure_that_names_its_rollouts_url_is_one_reason_for_all_rollouts(
    gateway: RecordingGateway,
) -> None:
    await run(gateway, "calls_a_wrong_path", n=2, max_attempts=1)
    reasons = {body["reason"] for body in gateway.told("abort")}
    assert reasons == {"LookupError: 404: POST {base_url}/chat/completions"}


async def test_an_agent_that_calls_elsewhere_is_asked_about_its_base_url(
    gateway: RecordingGateway,
) -> None:
    ends = await run(gateway, "calls_elsewhere", max_attempts=1)
    assert ends == {"ClientConnectorError": 1}
    (abort,) = gateway.told("abort")
    assert abort["reason"].endswith("does the agent call the base_url that it is given?)")


@pytest.mark.parametrize(("agent", "named"), [("returns_text", "a str"), ("returns_nan", "nan")])
async def test_what_is_no_reward_is_an_abort_that_names_the_agent_and_what_it_returned(
    gateway: RecordingGateway, agent: str, named: str
) -> None:
    assert await run(gateway, agent, max_attempts=1) == {"RolloutError": 1}
    assert gateway.told("complete") == []
    (told,) = gateway.told("abort")
    assert f"{__name__}:{agent} returned {named}; return a number" in told["reason"]


async def test_an_agent_may_return_a_number_of_numpy(gateway: RecordingGateway) -> None:
    assert await run(gateway, "returns_numpy") == {"complete": 1}
    assert gateway.told("complete") == [{"reward": 0.5}]


async def test_an_agent_may_return_a_reward_per_call(gateway: RecordingGateway) -> None:
    assert await run(gateway, "returns_list") == {"complete": 1}
    assert gateway.told("complete") == [{"step_rewards": [0.5, None, 1.0]}]


async def test_the_traceback_of_an_agents_mistake_is_logged_once(
    gateway: RecordingGateway, caplog: pytest.LogCaptureFixture
) -> None:
    await run(gateway, "crashes", n=4, max_attempts=2)
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert f"{__file__}" in caplog.text
    assert "in crashes" in caplog.text


@pytest.mark.parametrize(
    ("agent", "end"),
    [
        ("exits", "SystemExit"),
        ("panics", "PanicError"),
        ("panics_in_a_task_group", "PanicError"),
        ("is_cancelled_within", "CancelledError"),
    ],
)
async def test_an_agent_that_ends_itself_fails_alone(
    gateway: RecordingGateway, agent: str, end: str
) -> None:
    assert await run(gateway, agent, max_attempts=1) == {end: 1}
    [told] = gateway.told("abort")
    assert told["reason"].startswith(end)


async def test_a_hanging_agent_is_cut_off_and_aborted(gateway: RecordingGateway) -> None:
    assert await run(gateway, "hangs", max_attempts=1, timeout_s=0.05) == {"timeout": 1}
    assert gateway.told("abort") == [{"reason": "timeout", "will_retry": False}]


async def goes_on(task: Any, base_url: str, api_key: str) -> float:
    task["begun"].set()
    while not task["over"].is_set():
        try:
            await task["over"].wait()
        except:  # noqa: E722 - as agents have it that try again whatever happens
            continue
    return 1.0


@pytest.mark.parametrize("end", ["timeout", "cancelled"])
async def test_an_agent_that_is_deaf_to_its_end_keeps_no_slot(
    gateway: RecordingGateway, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(worker_module, "CANCEL_S", 0.05)
    agent, timeout_s = f"{__name__}:goes_on", 0.05 if end == "timeout" else 60
    config = RolloutConfig(agent=agent, concurrency=1, max_attempts=1, timeout_s=timeout_s)
    worker = RolloutWorker(config, [gateway.url])
    over, begun = asyncio.Event(), asyncio.Event()
    task = {"question": "?", "over": over, "begun": begun}
    try:
        n = 2 if end == "timeout" else 1
        running = asyncio.create_task(worker.run_group(task, "p", n))
        if end == "cancelled":
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            assert await running == {end: n}
    finally:
        over.set()
        await worker.close()
    assert {told["reason"] for told in gateway.told("abort")} == {end}


async def gives_what_it_has(task: Any, base_url: str, api_key: str) -> float:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return 0.25
    return 1.0


async def test_an_agent_may_score_what_it_has_when_it_is_cut_off(gateway: RecordingGateway) -> None:
    assert await run(gateway, "gives_what_it_has", timeout_s=0.05) == {"complete": 1}
    assert gateway.told("complete") == [{"reward": 0.25}]


async def test_a_timeout_of_the_agents_own_is_its_error(gateway: RecordingGateway) -> None:
    assert await run(gateway, "times_out_within", max_attempts=1) == {"TimeoutError": 1}
    assert gateway.told("abort")[0]["reason"] == "TimeoutError: the tool took too long"


async def test_a_rollout_that_the_pool_has_closed_already_does_not_end_the_run(
    gateway: RecordingGateway,
) -> None:
    gateway.closed = True
    assert await run(gateway, "right", max_attempts=1) == {"closed": 1}


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_gateway_that_has_no_room_at_the_moment_is_asked_again(
    gateway: RecordingGateway, status: int
) -> None:
    for how in ("init", "abort"):
        gateway.refusals[how] = [web.json_response({}, status=status)]
    assert await run(gateway, "crashes", max_attempts=1) == {"ValueError": 1}
    assert len(gateway.told("init")) == len(gateway.told("abort")) == 1


async def test_a_group_that_closed_before_its_rollout_began_ends_that_rollout_alone(
    gateway: RecordingGateway,
) -> None:
    error = {"error": {"message": "it is closed", "code": "trajectory_closed"}}
    gateway.refusals["init"] = [web.json_response(error, status=410, dumps=compact)]
    assert await run(gateway, "right", n=2) == {"closed": 1, "complete": 1}


async def test_a_key_that_the_gateway_refuses_ends_the_run(gateway: RecordingGateway) -> None:
    gateway.refusals["init"] = [web.json_response({}, status=401)]
    with pytest.raises(RolloutError, match="init_trajectory answered 401"):
        await run(gateway, "right")


async def test_a_failed_attempt_is_tried_again_as_a_new_trajectory(
    gateway: RecordingGateway,
) -> None:
    assert await run(gateway, "second_try", max_attempts=2) == {"complete": 1}
    assert [b["attempt"] for b in gateway.told("init")] == [0, 1]
    assert gateway.told("abort") == [{"reason": "ValueError: lost", "will_retry": True}]
    assert gateway.told("complete") == [{"reward": 0.5}]


async def test_a_cancelled_group_aborts_its_rollouts(gateway: RecordingGateway) -> None:
    worker = RolloutWorker(RolloutConfig(agent=f"{__name__}:hangs"), [gateway.url])
    running = asyncio.create_task(worker.run_group({"question": "?"}, "p", 2, "train"))
    await gateway.hanging(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.close()
    assert [b["reason"] for b in gateway.told("abort")] == ["cancelled"] * 2


async def test_no_more_agents_run_at_once_than_configured(gateway: RecordingGateway) -> None:
    config = RolloutConfig(agent=f"{__name__}:hangs", concurrency=3)
    worker = RolloutWorker(config, [gateway.url])
    running = asyncio.create_task(worker.run_group({"question": "?"}, "p", 8, "train"))
    await gateway.hanging(3)
    await asyncio.sleep(0.2)
    assert len(gateway.told("init")) == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.close()


def test_an_agent_that_cannot_be_imported_names_the_path_and_the_remedy() -> None:
    with pytest.raises(RolloutError, match=r"rollout.agent is 'nowhere:agent'.*package.module:fun"):
        load_agent("nowhere:agent")


def test_an_agent_that_is_not_async_is_refused() -> None:
    with pytest.raises(RolloutError, match="no coroutine function; write it as async def agent"):
        load_agent(f"{__name__}:not_async")


async def test_an_agent_in_a_file_runs_in_workers_that_were_started_elsewhere(
    gateway: RecordingGateway, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "agent.py").write_text(
        "async def right(task, base_url, api_key): return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)  # Ray's processes are elsewhere
    [worker] = start_workers(RolloutConfig(agent="deep/agent.py:right"), [gateway.url])
    assert await worker.run_group({"question": "?"}, "p", 2) == {"complete": 2}
    assert [told["reward"] for told in gateway.told("complete")] == [0.5, 0.5]

"""Rewards over HTTP, against real servers: what is sent, what is tried again, what is missing."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from stepwell.trainer.config import RewardConfig
from stepwell.trainer.errors import (
    RewardCrashError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)
from stepwell.trainer.rewards.base import RewardResult, RewardSample, close
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.rewards.manager import RewardManager
from tests.helpers import serving_posts
from tests.trainer.rewards.scoring import score_with as _score_with

Reply = Any
"""A status, a body, or a function of the request's body."""


class Server:
    """Answers the n-th request with the n-th reply, the last one over again; keeps the bodies."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = replies
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if reply == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(reply, tuple):
            return web.json_response({"error": "no"}, status=reply[0], headers=reply[1])
        if callable(reply):
            reply = reply(self.bodies[-1])
        return web.json_response(reply)


@asynccontextmanager
async def serving(*replies: Reply) -> AsyncIterator[Server]:
    server = Server(*replies)
    async with serving_posts("/{path:.*}", server.answer) as address:
        server.url = f"{address}/v1"
        yield server


async def score(name: str, extra: dict[str, Any] | None = None, **kwargs: Any) -> float:
    reward = load_reward(name, kwargs)
    try:
        return await _score_with(reward, "sums", "four", "4", extra or {"question": "2 + 2?"})
    finally:
        await close(reward)


async def managed(function: str = "remote", **kwargs: Any) -> list[Any]:
    """Score one sample by the manager; the call may take 2 s."""
    manager = RewardManager(
        RewardConfig(function=function, kwargs=kwargs, timeout_s=2, max_attempts=1)
    )
    try:
        scored: list[Any] = await manager.score([RewardSample("sums", "four", "4", {})])
        return scored
    finally:
        await manager.aclose()


FAILED: tuple[int, dict[str, str]] = (503, {"Retry-After": "0"})


async def test_a_remote_reward_is_sent_the_sample_and_gives_what_the_server_says() -> None:
    async with serving(0.5, {"score": 0.25, "fluency": 1}) as server:
        reward = load_reward("remote", {"url": server.url, "headers": {"X-Key": "k"}})
        assert await _score_with(reward, "sums", "four", "4", {"question": "2 + 2?"}) == 0.5
        assert await _score_with(reward, "sums", "four", "4", {}) == 0.25
        await close(reward)
    assert server.headers[0]["X-Key"] == "k"
    assert server.bodies[0] == {
        "data_source": "sums",
        "solution_str": "four",
        "ground_truth": "4",
        "extra_info": {"question": "2 + 2?"},
    }


async def test_as_many_calls_are_made_at_once_as_are_configured() -> None:
    n, asked, all_there = 120, 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == n:
            all_there.set()
        await all_there.wait()
        return web.json_response(0.5)

    async with serving_posts("/score", answer) as address:
        config = {"function": "remote", "kwargs": {"url": f"{address}/score"}, "concurrency": n}
        manager = RewardManager(
            RewardConfig.model_validate({**config, "timeout_s": 20, "max_attempts": 1})
        )
        found = await manager.score([RewardSample("sums", "four", "4", {})] * n)
        all_there.set()
        await manager.aclose()
    assert all(isinstance(result, RewardResult) for result in found), found[-1]


async def test_a_remote_reward_speaks_slimes_form_too() -> None:
    async with serving(1) as server:
        assert await score("remote", url=server.url, payload="slime") == 1.0
        # --rm-type remote_rm --rm-url URL
        assert await score("remote_rm", rm_url=server.url) == 1.0
    assert server.bodies == [{"prompt": "2 + 2?", "response": "four", "label": "4"}] * 2


@pytest.mark.parametrize("failure", [FAILED, (429, {"Retry-After": "0"}), "drop"])
async def test_a_server_that_fails_for_a_while_is_asked_again(failure: Any) -> None:
    async with serving(*[failure] * 7, 0.5) as server:
        assert await score("remote", url=server.url, backoff_s=0.001) == 0.5
        assert len(server.bodies) == 8


async def test_a_server_that_keeps_failing_is_asked_until_the_rewards_timeout() -> None:
    async with serving(FAILED) as server:
        (missing,) = await managed(url=server.url, backoff_s=0.01)
        assert isinstance(missing, RewardTimeoutError)  # missing, not 0
        assert re.search(r"no score within 2 s .*answered 503: .*no", str(missing))
        assert len(server.bodies) > 1


async def test_a_request_that_is_refused_is_not_repeated() -> None:
    async with serving((400, {})) as server:
        with pytest.raises(RewardCrashError, match="answered 400"):
            await score("remote", url=server.url)
        assert len(server.bodies) == 1


async def test_a_server_that_is_not_there_is_a_missing_score() -> None:
    async with serving(1) as server:
        url = server.url
    (missing,) = await managed(url=url)
    assert isinstance(missing, RewardTimeoutError)
    assert f"the reward server {url} gave no answer" in str(missing)


async def test_an_answer_that_is_no_score_is_a_missing_score() -> None:
    async with serving({"detail": "ok"}) as server:
        with pytest.raises(RewardValueError, match="'score'"):
            await score("remote", url=server.url)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("remote", {}, "missing 1 required"),
        ("remote", {"url": "rm:80"}, "begins with http"),
        ("remote", {"url": "http://rm", "payload": "trl"}, "'verl' or 'slime'"),
        ("remote", {"url": "http://rm", "max_retries": 3}, "unexpected .*max_retries"),
        ("llm_judge", {"base_url": "http://llm"}, "missing 1 required"),
        ("llm_judge", {"base_url": "llm:80", "model": "m"}, "begins with http"),
        ("llm_judge", {"base_url": "http://llm", "model": "m", "prompt": "{answer}"}, "answer"),
        ("llm_judge", {"base_url": "http://llm", "model": "m", "max_score": 0}, "larger than 0"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardLoadError, match=message):
        load_reward(name, kwargs)


# ── the judge ────────────────────────────────────────────────────────────────────────────────────


def says(content: str | None) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "judge",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content},
                "finish_reason": "stop",
            }
        ],
    }


async def judged(*replies: Reply, **kwargs: Any) -> float:
    async with serving(*replies) as server:
        return await score("llm_judge", **{"base_url": server.url, "model": "judge", **kwargs})


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("It is right.\nScore: 10", 1.0),
        ("Score: 2\nOn second thoughts\nScore: 7.5", 0.75),
        ("**Score:** 5", 0.5),
        ("Score: **0**", 0.0),
        ("Score (0-10): 7", 0.7),
        ("Score [0 to 10]: 7", 0.7),
        ("Final score: 8/10", 0.8),
        ("Score: (7)", 0.7),
        ("Score: [[8]]/10\n\n2 points lost", 0.8),
        ("Score 7 of 10", 0.7),
    ],
)
async def test_the_judges_last_verdict_counts(verdict: str, expected: float) -> None:
    assert await judged(says(verdict)) == expected


async def test_the_judge_reads_question_truth_and_a_fenced_answer() -> None:
    async with serving(says("Score: 10")) as server:
        for _ in range(2):
            await score("llm_judge", base_url=server.url, model="judge")
        first, second = (b["messages"][0]["content"] for b in server.bodies)
    assert server.bodies[0]["model"] == "judge"
    assert server.bodies[0]["temperature"] == 0.0
    for part in ("2 + 2?", "four", "\n4\n"):
        assert part in first
    assert first != second  # the fence is not to be guessed


async def test_the_judge_sees_a_conversation_as_lines_and_braces_as_they_are() -> None:
    async with serving(says("Score: 10")) as server:
        task = {"messages": [{"role": "user", "content": r"\frac{1}{2}"}]}
        await score("llm_judge", task, base_url=server.url, model="judge")
    assert r"user: \frac{1}{2}" in server.bodies[0]["messages"][0]["content"]


@pytest.mark.parametrize("verdict", ["It is fine.", "", None, "Score: high", "Score: 11"])
async def test_a_judge_without_a_verdict_is_a_missing_score_not_zero(verdict: str | None) -> None:
    with pytest.raises(RewardCrashError, match=r"no verdict|not in \[0, 10\]"):
        await judged(says(verdict))


@pytest.mark.slow
async def test_a_judge_that_fails_is_asked_again_and_then_missing() -> None:
    assert await judged(FAILED, "drop", says("Score: 10")) == 1.0
    async with serving(FAILED) as server:  # until the reward's own limit, as `remote`
        (missing,) = await managed("llm_judge", base_url=server.url, model="judge")
        assert isinstance(missing, RewardTimeoutError)
        assert "no score within 2 s (the judge 'judge' answered 503" in str(missing)
        assert len(server.bodies) > 1


async def test_a_judge_that_refuses_is_not_asked_again() -> None:
    async with serving((401, {})) as server:
        with pytest.raises(RewardCrashError, match=r"the judge 'judge' answered 401: .*no"):
            await score("llm_judge", base_url=server.url, model="judge")
        assert len(server.bodies) == 1


async def test_the_judge_is_asked_with_the_key_of_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    async with serving(says("Score: 10")) as server:
        await score("llm_judge", base_url=server.url, model="judge", api_key_env="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-1"


async def test_a_judge_that_is_not_there_is_a_missing_score() -> None:
    async with serving(1) as server:
        url = server.url
    (missing,) = await managed("llm_judge", base_url=url, model="judge")
    assert isinstance(missing, RewardTimeoutError)
    assert "the judge 'judge' gave no answer" in str(missing)


@pytest.mark.parametrize("reply", [{"choices": []}, {}, "text", [1], None])
async def test_what_is_no_chat_completion_is_a_missing_score(reply: Any) -> None:
    with pytest.raises(RewardCrashError, match="which is no chat completion"):
        await judged(reply)


async def test_the_scale_and_the_prompt_are_ones_own() -> None:
    prompt: Callable[[dict[str, Any]], Any] = lambda body: says(  # noqa: E731
        "Score: 3" if body["messages"][0]["content"] == "Grade four against 4." else "?"
    )
    settings = {
        "prompt": "Grade {solution_str} against {ground_truth}.",
        "max_score": 4,
    }
    assert await judged(prompt, **settings) == 0.75

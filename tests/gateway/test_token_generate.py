"""`/inference/v1/generate`: tokens in, tokens out, one branch per conversation."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import World


async def post(
    url: str, body: dict[str, Any], key: str | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as answer:
        return answer.status, await answer.json()


def body(ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 1, **sampling}}


@pytest.mark.parametrize("where", ["url", "none"])
async def test_a_call_is_a_step_of_what_was_sent_and_sampled(world: World, where: str) -> None:
    base = world.base_url() if where == "url" else world.url
    first = world.ids("What is 2 + 3?")
    said = world.say("It is 5.")
    status, answer = await post(
        f"{base}/inference/v1/generate",
        body(first, temperature=0.5, max_tokens=32, stop_token_ids=[3], skip_special_tokens=False),
    )
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["token_ids"] == said.ids
    assert choice["finish_reason"] == "stop"
    (step,) = world.stored()
    assert step.rollout_log_probs is not None
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{i}" for i in said.ids]
    told = step.rollout_log_probs.tolist()
    assert [e["logprob"] for e in entries] == pytest.approx(told)
    assert step.metadata["sampling_params"]["temperature"] == 0.5
    assert 3 in world.engine.requests[0]["sampling_params"]["stop_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(first)


async def test_a_prompt_that_goes_on_from_a_reply_extends_it(world: World) -> None:
    url = f"{world.base_url()}/inference/v1/generate"
    ids = world.ids("One?")
    for text in ("two", "three"):
        said = world.say(text)
        status, _ = await post(url, body(ids))
        assert status == 200
        ids = [*ids, *said.ids, *world.ids(" And?")]
    world.check_exact("t1")
    assert [step.parent_index for step in world.stored("t1")] == [None, 0]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"token_ids": "text"}, "token_ids is 'text'"),
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "sampling_params": {"logit_bias": {"1": 2}}}, "sampling_params"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"token_ids": [1, 10**9]}, "prompt holds the token id 1000000000; the model's lie in"),
        ({"token_ids": [1, 2**40]}, "token_ids holds ids outside"),
        ({"token_ids": [1, -1]}, "token_ids holds ids outside"),
        ({"token_ids": [True]}, "token_ids is [True]"),
        ({"token_ids": []}, "token_ids is []"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    world: World, sent: dict[str, Any], why: str
) -> None:
    status, answer = await post(f"{world.base_url()}/inference/v1/generate", sent)
    assert status == 400
    assert why in answer["error"]["message"]
    assert not world.stored()


ROUTE = "/inference/v1/generate"


async def test_a_call_needs_a_key_and_reaches_no_others_trajectory(worlds: Any) -> None:
    agents = {"bot": {"key": "the-agents'-key-of-this-test"}}
    world: World = await worlds(admin_keys=["the-admin's-key-of-this-test"], agent_keys=agents)
    mine, other = (world.gateway.keys.issue(uid, "p1") for uid in ("mine", "other"))
    sent, url = body(world.ids("One?")), f"{world.url}/mine/p1{ROUTE}"
    for where in (f"{world.url}{ROUTE}", url):
        assert (await post(where, sent))[0] == 401
    assert (await post(url, sent, other))[0] == 403
    assert not world.stored()
    assert (await post(url, sent, mine))[0] == 200
    assert [step.trajectory_uid for step in world.stored()] == ["mine"]


async def test_a_body_and_a_prompt_are_bounded(worlds: Any) -> None:
    world: World = await worlds(max_body_bytes=1 << 20, context_length=64)
    status, answer = await post(f"{world.base_url()}{ROUTE}", body([1] * 64))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "token_ids"
    status, _ = await post(f"{world.base_url()}{ROUTE}", body([1] * (1 << 19)))
    assert status == 413
    assert not world.stored()

"""`/inference/v1/generate`: tokens in, tokens out, one branch per conversation."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import World


async def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
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
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    world: World, sent: dict[str, Any], why: str
) -> None:
    status, answer = await post(f"{world.base_url()}/inference/v1/generate", sent)
    assert status == 400
    assert why in answer["error"]["message"]
    assert not world.stored()

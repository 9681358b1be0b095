"""Trajectories: where they begin, how they end, white-box endpoints, health."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from stepwell.gateway.config import Tuning
from stepwell.trainer.rollout.gateway import ClosedError, CompletedError, GatewayClient
from tests.builders import until

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


class Http:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, url: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(url, json=body) as response:
            return response.status, await response.json()

    async def get(self, url: str) -> tuple[int, Any]:
        async with self.session.get(url) as response:
            return response.status, await response.json()


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session)


async def ask(client: openai.AsyncOpenAI, text: str = "hi") -> Any:
    return await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}]
    )


async def test_init_hands_out_an_address_that_works(world: Any, http: Http) -> None:
    status, got = await http.post(
        f"{world.url}/init_trajectory",
        prompt_uid="p9",
        channel="val",
        metadata={"task": 3},
        attempt=2,
    )
    assert status == 200
    assert got["prompt_uid"] == "p9"
    assert got["base_url"] == f"{world.url}/{got['trajectory_uid']}/p9"
    async with openai.AsyncOpenAI(base_url=got["base_url"] + "/v1", api_key="x") as client:
        await ask(client)
    status, done = await http.post(got["base_url"] + "/v1/complete_trajectory", reward=1.0)
    assert (status, done["outcome"]) == (200, "complete")
    lease = await world.pool.lease_batch(1, "val")
    [trajectory] = lease.groups[0].trajectories
    assert (trajectory.reward, trajectory.attempt) == (1.0, 2)
    assert trajectory.metadata["task"] == 3
    assert trajectory.steps[0].is_last


async def test_an_address_works_whatever_characters_its_names_have(world: Any, http: Http) -> None:
    names = {"trajectory_uid": "what? 100%41 #1", "prompt_uid": "gsm8k:7é"}
    _, got = await http.post(f"{world.url}/init_trajectory", **names)
    async with openai.AsyncOpenAI(base_url=got["base_url"] + "/v1", api_key="x") as client:
        await ask(client)
    (step,) = world.stored()
    assert {"trajectory_uid": step.trajectory_uid, "prompt_uid": step.prompt_uid} == names


@pytest.mark.parametrize("keys", [{}, {"admin_keys": ["an-admin-key-of-32-characters-00"]}])
@pytest.mark.parametrize(
    "names",
    [
        {"trajectory_uid": "harbor/hello-world:0", "prompt_uid": "harbor/hello-world"},
        {"trajectory_uid": "/a//b/", "prompt_uid": "../v1/chat"},
        {"trajectory_uid": "a%2Fb", "prompt_uid": "%252F%"},
        {"trajectory_uid": "a/v1/chat/completions", "prompt_uid": "v1"},
    ],
)
async def test_ids_with_slashes_are_percent_encoded_in_addresses(
    worlds: Any, http: Http, names: dict[str, str], keys: dict[str, Any]
) -> None:
    world = await worlds(**keys)
    admin = {"authorization": f"Bearer {keys['admin_keys'][0]}"} if keys else {}
    async with http.session.post(
        f"{world.url}/init_trajectory", json=names, headers=admin
    ) as response:
        got = await response.json()
        assert response.status == 200, got
    assert got.items() >= names.items()
    path = got["base_url"].removeprefix(world.url)
    assert path.count("/") == 2
    base_url, key = got["base_url"], got["api_key"]
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key=key) as client:
        await ask(client)
        stored = await client.responses.create(model="m", input="hi")
        assert (await client.responses.retrieve(stored.id)).id == stored.id
        assert (await client.models.list()).data
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=key) as claude:
        messages: Any = [{"role": "user", "content": "hi"}]
        await claude.messages.create(model="m", max_tokens=9, messages=messages)
        await claude.messages.count_tokens(model="m", messages=messages)
    # Without a path: by the key alone.
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key) as client:
        await ask(client)
    for step in world.stored():
        assert {"trajectory_uid": step.trajectory_uid, "prompt_uid": step.prompt_uid} == names
    assert len(world.stored()) == 4
    mine = {"authorization": f"Bearer {key}"}
    async with http.session.post(
        f"{base_url}/v1/complete_trajectory", json={"reward": 1.0}, headers=mine
    ) as response:
        assert await response.json() == {
            "trajectory_uid": names["trajectory_uid"],
            "outcome": "complete",
        }


async def test_headers_name_ids_with_slashes(world: Any) -> None:
    headers = {"x-trajectory-uid": "harbor%2Fone:0", "x-prompt-uid": "harbor/one"}
    async with openai.AsyncOpenAI(
        base_url=world.url + "/v1", api_key="x", default_headers=headers
    ) as client:
        await ask(client)
    (step,) = world.stored()
    assert (step.trajectory_uid, step.prompt_uid) == ("harbor/one:0", "harbor/one")


async def test_lifecycle_bodies_may_be_left_out(world: Any, http: Http) -> None:
    async with http.session.post(world.url + "/init_trajectory") as response:
        assert response.status == 200
        base_url = (await response.json())["base_url"]
    for name in ("register", "complete"):
        async with http.session.post(f"{base_url}/v1/{name}_trajectory") as response:
            assert response.status == 200


async def test_a_body_that_is_not_sent_as_json_is_refused_with_the_remedy(
    world: Any, http: Http
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with http.session.post(
        f"{world.url}/init_trajectory", data='{"prompt_uid": "p"}', headers=form
    ) as response:
        message = (await response.json())["error"]["message"]
    assert response.status == 415
    assert "content-type: application/json" in message


async def test_a_repeated_init_with_its_own_uid_is_one_trajectory(world: Any, http: Http) -> None:
    body = {"trajectory_uid": "mine", "prompt_uid": "p"}
    first = await http.post(f"{world.url}/init_trajectory", **body)
    assert first == await http.post(f"{world.url}/init_trajectory", **body)
    counts = await world.pool.get_statistics("train")
    assert counts["trajectories"]["submitted"] == 1


async def test_an_unknown_url_registers_itself(world: Any) -> None:
    client = await world.client("made-up", "some-prompt")
    await ask(client)
    [step] = world.stored()
    assert (step.trajectory_uid, step.prompt_uid) == ("made-up", "some-prompt")


async def test_registering_chooses_the_channel(world: Any, http: Http) -> None:
    url = world.base_url() + "/v1/register_trajectory"
    assert (await http.post(url, channel="val", metadata={"a": 1}))[1]["channel"] == "val"
    await ask(await world.client())
    assert [c for _, c in world.port.steps] == ["val"]
    status, refusal = await http.post(url, channel="train")
    assert status == 409
    assert "open in channel 'val'" in refusal["error"]["message"]
    assert (await http.post(url, channel="val", metadata={"b": 2}))[0] == 200


async def test_a_trajectory_belongs_to_one_prompt(world: Any) -> None:
    await ask(await world.client("t", "p"))
    with pytest.raises(openai.ConflictError, match="belongs to prompt_uid 'p'"):
        await ask(await world.client("t", "q"))


async def test_a_closed_trajectory_answers_410_and_gains_no_step(world: Any, http: Http) -> None:
    client = await world.client()
    await ask(client)
    await http.post(world.base_url() + "/v1/complete_trajectory", reward=0.5)
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as closed:
            await client.chat.completions.create(model="m", messages=MESSAGES, **options)
        assert closed.value.status_code == 410
        assert closed.value.code == "trajectory_closed"
        assert "completed with reward 0.5" in closed.value.message
    status, _ = await http.post(world.base_url() + "/v1/register_trajectory")
    assert status == 410
    assert len(world.stored()) == 1
    assert len(world.gateway.trajectories) == 0


async def test_completing_twice_is_one_completion(world: Any, http: Http) -> None:
    await ask(await world.client())
    url = world.base_url() + "/v1/complete_trajectory"
    assert (await http.post(url, reward=1.0))[1]["outcome"] == "complete"
    assert (await http.post(url, reward=1.0))[1]["outcome"] == "complete"
    status, refused = await http.post(url, reward=0.0)
    assert (status, refused["error"]["code"]) == (410, "trajectory_completed")


async def test_an_answer_tells_a_completed_trajectory_from_one_that_ended_otherwise(
    world: Any, http: Http
) -> None:
    for uid in ("t1", "t2"):
        await ask(await world.client(uid))
    await http.post(f"{world.base_url('t1')}/v1/complete_trajectory", reward=1.0)
    await http.post(
        f"{world.base_url('t2')}/v1/abort_trajectory", reason="it was already completed by me"
    )
    client = GatewayClient([world.url])
    for uid, how, body in (
        ("t1", "complete_trajectory", {"reward": 0.0}),
        ("t1", "abort_trajectory", {"reason": "no"}),
        ("t2", "complete_trajectory", {"reward": 0.0}),
    ):
        with pytest.raises(ClosedError) as ended:
            await client.ask(f"{world.base_url(uid)}/v1/{how}", body)
        assert isinstance(ended.value, CompletedError) == (uid == "t1")
    await client.close()


async def test_steps_are_rewarded_with_the_completion(world: Any, http: Http) -> None:
    client = await world.client()
    for text in ("one", "two", "three"):
        await ask(client, text)
    url = world.base_url() + "/v1/complete_trajectory"
    status, refused = await http.post(url, step_rewards=[1, 1, 1, 1])
    assert (status, refused["error"]["param"]) == (400, "step_rewards")
    assert "more rewards than steps" in refused["error"]["message"]
    done = {"reward": 1.0, "step_rewards": [0.5, None, -0.25]}
    for _ in range(2):  # an answer may be lost
        assert (await http.post(url, **done))[1]["outcome"] == "complete"
    [trajectory] = (await world.pool.lease_batch(1)).groups[0].trajectories
    assert [s.reward for s in trajectory.steps] == [0.5, None, 0.75]
    assert trajectory.reward == 1.25


async def test_a_completion_that_is_refused_changes_no_reward(world: Any, http: Http) -> None:
    await ask(await world.client())
    url = world.base_url() + "/v1/complete_trajectory"
    await http.post(url, reward=1.0, step_rewards=[0.5])
    by_name = {"trajectory_uid": "t1", "reward": 2.0, "step_rewards": [3.0]}
    assert (await http.post(url, reward=2.0, step_rewards=[3.0]))[0] == 410
    assert (await http.post(world.url + "/v1/complete_trajectory", **by_name))[0] == 409
    [trajectory] = (await world.pool.lease_batch(1)).groups[0].trajectories
    assert trajectory.reward == 1.5


@pytest.mark.parametrize("base", ["/t1/p1/v1", "/v1"], ids=["url", "name"])
async def test_a_reward_that_no_trajectory_can_have_is_refused_before_its_steps_have_theirs(
    world: Any, http: Http, base: str
) -> None:
    await ask(await world.client("t1", "p1"))
    named = {} if "t1" in base else {"trajectory_uid": "t1"}
    rewards = {"reward": 2e9, "step_rewards": [3.0]}
    status, got = await http.post(f"{world.url}{base}/complete_trajectory", **named, **rewards)
    assert (status, got["error"]["param"]) == (400, "reward")
    await http.post(f"{world.url}{base}/complete_trajectory", **named)
    [trajectory] = (await world.pool.lease_batch(1)).groups[0].trajectories
    assert trajectory.reward is None


async def test_completing_without_a_call_aborts_with_a_reason(world: Any, http: Http) -> None:
    status, got = await http.post(world.base_url() + "/v1/complete_trajectory", reward=1.0)
    assert (status, got["outcome"]) == (200, "aborted")


async def test_aborting_ends_calls_in_flight_and_the_engine_hears_of_it(
    world: Any, http: Http
) -> None:
    client = await world.client()
    gate = asyncio.Event()
    world.say("never", gate=gate)
    call = asyncio.create_task(ask(client))
    await world.engine.arrived.wait()
    status, got = await http.post(
        world.base_url() + "/v1/abort_trajectory", reason="timeout", will_retry=True
    )
    assert (status, got["outcome"]) == (200, "aborted")
    with pytest.raises(openai.APIStatusError) as closed:
        await call
    assert closed.value.status_code == 410
    await until(lambda: world.engine.aborts, 5)
    gate.set()
    assert world.stored() == []


async def test_a_step_that_comes_after_completion_is_refused(world: Any, http: Http) -> None:
    client = await world.client()
    await ask(client)
    gate = asyncio.Event()
    world.say("a side call", gate=gate)
    world.engine.arrived.clear()
    call = asyncio.create_task(ask(client, "title?"))
    await world.engine.arrived.wait()
    await http.post(world.base_url() + "/v1/complete_trajectory")
    gate.set()
    with pytest.raises(openai.APIStatusError) as closed:
        await call
    assert closed.value.status_code == 410
    assert len(world.stored()) == 1


OTHER_MODELS = {
    "prompt_ids": [1],
    "response_ids": [1_000_000],  # the trainer that is served it would end
    "trajectory_uid": "t",
    "prompt_uid": "p",
}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/t/p/v1/complete_trajectory", {"reward": "high"}, "reward"),
        ("/t/p/v1/complete_trajectory", {"rewrad": 1}, "rewrad"),
        ("/t/p/v1/complete_trajectory", {"reward": True}, "reward"),
        ("/t/p/v1/complete_trajectory", {"reward": "1.5"}, "reward"),
        ("/t/p/v1/complete_trajectory", {"step_rewards": ["1.5"]}, "step_rewards"),
        ("/t/p/v1/complete_trajectory", {"step_rewards": [False]}, "step_rewards"),
        ("/v1/complete_trajectory", {"trajectory_uid": "t", "reward": True}, "reward"),
        ("/v1/rewards", {"trajectory_uid": "t", "reward": True}, "reward"),
        ("/v1/rewards", {"trajectory_uid": "t", "reward": "1"}, "reward"),
        ("/v1/feedback", {"trajectory_uid": "t", "score": True}, "score"),
        ("/t/p/v1/complete_trajectory", {"step_rewards": [1, "a"]}, "step_rewards"),
        ("/t/p/v1/abort_trajectory", {}, "reason"),
        ("/init_trajectory", {"attempt": -1}, "attempt"),
        ("/init_trajectory", {"prompt_uid": "."}, "prompt_uid"),
        ("/init_trajectory", {"trajectory_uid": ".."}, "trajectory_uid"),
        ("/generate", {"prompt_ids": [1.5]}, "prompt_ids"),
        ("/generate", {"prompt_ids": [1], "messages": MESSAGES}, "messages"),
        ("/generate", {"messages": MESSAGES, "stream": True}, "stream"),
        ("/submit_steps", {"steps": []}, "steps"),
        ("/submit_steps", {"steps": [{"prompt": [1]}]}, "steps[0].prompt"),
        ("/submit_steps", {"steps": [OTHER_MODELS]}, "steps[0] holds the token id 1000000"),
        ("/ui/api/dry_run", {"selection": {"filters": [{"path": "x"}]}}, "selection.filters[0]"),
    ],
)
async def test_malformed_requests_are_refused_by_name(
    world: Any, http: Http, path: str, body: Any, named: str
) -> None:
    status, got = await http.post(world.url + path, **body)
    assert status == 400
    assert got["error"]["type"] == "invalid_request_error"
    assert named in got["error"]["message"]
    assert "\n" not in got["error"]["message"]


@pytest.mark.parametrize("names", ["t1/p1", "t1/v1", "v1/p1", "v1/v1"])
async def test_errors_have_the_shape_of_their_path_whatever_its_names_are(
    world: Any, http: Http, names: str
) -> None:
    status, got = await http.post(f"{world.url}/{names}/v1/messages")
    assert (status, got["type"]) == (400, "error")


async def test_unknown_paths_and_methods_answer_in_the_error_shape(world: Any, http: Http) -> None:
    status, got = await http.get(world.url + "/nowhere")
    assert (status, got["error"]["type"]) == (404, "invalid_request_error")
    status, got = await http.get(world.url + "/init_trajectory")
    assert (status, got["error"]["type"]) == (405, "invalid_request_error")


# -- white-box -------------------------------------------------------------------------------


async def test_a_white_box_agent_generates_and_submits_its_own_steps(
    world: Any, http: Http
) -> None:
    said = world.say("four", version="3")
    ids = [5, 6, 7]
    status, got = await http.post(
        world.url + "/generate",
        trajectory_uid="t",
        prompt_uid="p",
        prompt_ids=ids,
        max_tokens=8,
        temperature=0.5,
    )
    assert status == 200
    assert got["prompt_ids"] == ids
    assert got["response_ids"] == said.ids
    assert got["policy_version"] == 3
    assert got["finish_reason"] == "stop"
    assert len(got["rollout_log_probs"]) == len(said.ids)
    assert world.stored() == []
    step = {
        "prompt_ids": got["prompt_ids"],
        "response_ids": got["response_ids"],
        "rollout_log_probs": got["rollout_log_probs"],
        "policy_version": got["policy_version"],
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "reward": 1.0,
        "metadata": {"sampling_params": got["sampling_params"]},
    }
    counts = await http.post(world.url + "/submit_steps", steps=[step], channel="train")
    assert counts == (200, {"accepted": 1, "duplicate": 0, "late": 0})
    counts = await http.post(world.url + "/submit_steps", steps=[step])
    assert counts == (200, {"accepted": 0, "duplicate": 1, "late": 0})
    status, conflict = await http.post(world.url + "/submit_steps", steps=[{**step, "reward": 0.0}])
    assert status == 409
    assert "other content" in conflict["error"]["message"]


async def test_black_box_calls_go_behind_submitted_steps(world: Any, http: Http) -> None:
    client = await world.client("t", "p")
    await ask(client)
    step = {
        "prompt_ids": [1],
        "response_ids": [2],
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "step_index": 1,
    }
    await http.post(world.url + "/submit_steps", steps=[step])
    await ask(client, "again")
    assert [s.step_index for s in world.stored("t")] == [0, 1, 2]


async def test_white_box_messages_extend_exact_tokens_too(world: Any, http: Http) -> None:
    identity = {"trajectory_uid": "t", "prompt_uid": "p"}
    _, one = await http.post(world.url + "/generate", **identity, messages=MESSAGES)
    messages = [*MESSAGES, one["message"], {"role": "user", "content": "more"}]
    _, two = await http.post(world.url + "/generate", **identity, messages=messages)
    before = one["prompt_ids"] + one["response_ids"]
    assert two["prompt_ids"][: len(before)] == before
    assert world.stored() == []
    # A black-box call may go on from there; its parent would be a Step the gateway did not store.
    client = await world.client("t", "p")
    await client.chat.completions.create(
        model="m", messages=[*messages, two["message"], {"role": "user", "content": "end"}]
    )
    [step] = world.stored()
    assert step.parent_index is None
    before = two["prompt_ids"] + two["response_ids"]
    assert step.prompt_ids.tolist()[: len(before)] == before


async def test_a_white_box_agent_that_asks_again_gets_another_sample(
    world: Any, http: Http
) -> None:
    body = {"trajectory_uid": "t", "prompt_uid": "p", "prompt_ids": [5, 6, 7]}
    for said in ("one", "two", "three"):
        world.say(said)
        _, got = await http.post(world.url + "/generate", **body)
        assert got["message"]["content"] == said


async def test_rewards_are_computed_by_the_configured_function(worlds: Any, http: Http) -> None:
    world = await worlds(reward_fn="fractions:Fraction")
    status, got = await http.post(world.url + "/compute_reward", numerator=3, denominator=4)
    assert (status, got["error"]["code"]) == (500, "reward_failed")  # no float
    world = await worlds(reward_fn=f"{__name__}:_score")
    status, got = await http.post(
        world.url + "/compute_reward", solution_str="4", ground_truth="4", extra_info={}
    )
    assert (status, got) == (200, {"reward": 1.0, "details": {"exact": True}})
    status, got = await http.post(world.url + "/compute_reward", solution_str="boom")
    assert (status, got["error"]["code"]) == (500, "reward_failed")
    status, got = await http.post(world.url + "/compute_reward", unknown=1)
    assert status == 400


async def _score(solution_str: str, ground_truth: str = "", **_: Any) -> dict[str, Any]:
    if solution_str == "boom":
        raise RuntimeError("boom")
    return {"score": float(solution_str == ground_truth), "exact": True}


async def test_a_reward_function_may_run_a_loop_of_its_own(worlds: Any, http: Http) -> None:
    world = await worlds(reward_fn=f"{__name__}:_waiting_score")
    got = await http.post(world.url + "/compute_reward", solution_str="abc")
    assert got == (200, {"reward": 3.0, "details": {}})


def _waiting_score(solution_str: str) -> float:
    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, float(len(solution_str))))


async def test_a_reward_function_may_be_an_object_that_is_awaited(worlds: Any, http: Http) -> None:
    world = await worlds(reward_fn=f"{__name__}:_judge")
    got = await http.post(world.url + "/compute_reward", solution_str="abc")
    assert got == (200, {"reward": 3.0, "details": {}})


class _Judge:
    async def __call__(self, solution_str: str) -> float:
        await asyncio.sleep(0)
        return float(len(solution_str))


_judge = _Judge()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("_ending_score", "SystemExit"),
        ("_async_ending_score", "SystemExit"),
        ("_panicking_score", "_Panic"),
        ("_async_panicking_score", "_Panic"),
        ("_stopping_score", "StopIteration"),
    ],
)
async def test_a_reward_function_that_raises_anything_is_told_as_any_that_fails(
    worlds: Any, http: Http, function: str, error: str
) -> None:
    world = await worlds(reward_fn=f"{__name__}:{function}")
    status, got = await http.post(world.url + "/compute_reward", solution_str="4")
    assert (status, got["error"]["code"]) == (500, "reward_failed")
    assert error in got["error"]["message"]


class _Panic(BaseException):
    """A package that is written in Rust raises such."""


def _panicking_score(solution_str: str) -> float:
    raise _Panic


async def _async_panicking_score(solution_str: str) -> float:
    raise _Panic


def _stopping_score(solution_str: str) -> float:
    return next(float(c) for c in solution_str if c == "5")


def _ending_score(solution_str: str) -> float:
    sys.exit(f"no verifier for {solution_str}")


async def _async_ending_score(solution_str: str) -> float:
    sys.exit(f"no verifier for {solution_str}")


async def test_a_reward_functions_details_and_arguments_may_be_any(worlds: Any, http: Http) -> None:
    world = await worlds(reward_fn=f"{__name__}:_detailed_score")
    got = await http.post(world.url + "/compute_reward", function="f")
    details = {"exact": True, "n": 3, "parts": [0.5], "big": str(2**80), "kinds": "{'f'}"}
    assert got == (200, {"reward": 1.0, "details": details})


def _detailed_score(function: str) -> dict[str, Any]:
    details = {"exact": np.bool_(True), "n": np.int64(3), "parts": np.array([0.5])}
    return {"score": np.float64(1), **details, "big": 2**80, "kinds": {function}}


async def test_without_a_reward_function_the_endpoint_says_what_to_set(
    world: Any, http: Http
) -> None:
    status, got = await http.post(world.url + "/compute_reward", solution_str="4")
    assert status == 400
    assert "gateway.reward_fn" in got["error"]["message"]


# -- health ----------------------------------------------------------------------------------


async def test_health_is_the_process_and_ready_is_the_engine(worlds: Any, http: Http) -> None:
    world = await worlds()
    assert (await http.get(world.url + "/health"))[0] == 200
    assert await http.get(world.url + "/ready") == (
        200,
        {"status": "ready", "context_length": 4096},
    )
    alone = await worlds(engine_urls=("http://127.0.0.1:9",))
    assert (await http.get(alone.url + "/health"))[0] == 200
    status, got = await http.get(alone.url + "/ready")
    assert status == 503
    assert got["error"]["message"].startswith("no engine is healthy")
    assert "127.0.0.1" not in got["error"]["message"]


STEP: dict[str, Any] = {
    "trajectory_uid": "w1",
    "prompt_uid": "p1",
    "prompt_ids": [1, 2],
    "response_ids": [3],
}


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("finish_reason", "evil", "'stop', 'length', 'abort' or None"),
        ("finish_reason", ["stop"], "'stop', 'length', 'abort' or None"),
        ("is_last", "yes", "True or False"),
        ("is_last", 1, "True or False"),
        ("step_index", 1e30, "integer in"),
        ("step_index", 2**63, "integer in"),
        ("policy_version", 2**63, "integer in"),
        ("policy_version", "1", "integer in"),
        ("parent_index", 0.5, "integer in"),
        ("version_spans", [{"version": "0", "start": 0, "end": 1}], "integers"),
        ("version_spans", [{"version": 0, "start": 0, "end": 1.0}], "integers"),
        ("response_ids", [3.5], "integers"),
        ("rollout_log_probs", ["-1"], "numbers"),
        ("reward", "high", "a number within"),
        ("attempt", 1e30, "no field of a Step"),
    ],
)
async def test_a_step_from_outside_with_a_wrong_field_is_refused_by_its_name(
    world: Any, field: str, value: Any, remedy: str
) -> None:
    step = {**STEP, "step_index": 1, field: value}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.url}/submit_steps", json={"steps": [step]}) as answer,
    ):
        error = (await answer.json())["error"]
    assert answer.status == 400
    assert error["param"].startswith("steps[0]")
    assert field in error["message"]
    assert remedy in error["message"]
    shown = value if field not in ("version_spans", "response_ids", "rollout_log_probs") else ""
    assert field == "attempt" or str(shown) in error["message"]
    assert world.stored() == []


@pytest.mark.parametrize("attempt", [1e30, 10**30, 1.5, "1", True, -1])
async def test_an_attempt_that_is_no_small_number_is_refused(world: Any, attempt: Any) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.url}/init_trajectory", json={"attempt": attempt}) as answer,
    ):
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "attempt")


async def test_a_deleted_trajectory_leaves_nothing_in_gateway_and_pool(
    world: Any, http: Http
) -> None:
    """Turn graph, calls for retries, stored responses and cached prompts go; it cannot go on."""
    client = await world.client("mine", "p1")
    other = await world.client("other", "p2")
    answered = await client.responses.create(model="m", input="a secret", store=True)
    kept = await other.responses.create(model="m", input="hello", store=True)
    async with http.session.delete(f"{world.url}/v1/trajectories/mine") as response:
        assert (response.status, await response.json()) == (
            200,
            {"deleted": ["mine"], "leased": []},
        )
    stats = await world.pool.get_statistics("train")
    assert stats["groups"]["drop_reasons"] == {"deleted": 1}
    assert world.gateway.trajectories.known("mine") is None
    assert world.gateway.calls.prompts.cached.currsize == 0
    status, _ = await http.get(f"{world.url}/v1/responses/{answered.id}")
    assert status == 404
    status, _ = await http.get(f"{world.url}/v1/responses/{kept.id}")
    assert status == 200
    with pytest.raises(openai.APIStatusError, match="deleted") as refused:
        await ask(client)
    assert refused.value.status_code == 410
    await ask(other)
    async with http.session.delete(f"{world.url}/v1/trajectories/mine") as response:
        assert (await response.json())["deleted"] == [], "twice is no error"


async def test_a_prompt_that_is_rendered_as_it_is_deleted_is_not_kept(
    worlds: Any, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await worlds(tuning=Tuning(offload_chars=10))
    prompts = world.gateway.calls.prompts
    begun, gate, whole = threading.Event(), threading.Event(), prompts.renderer.whole

    def slow(*args: Any) -> Any:
        begun.set()
        assert gate.wait(10)
        return whole(*args)

    monkeypatch.setattr(prompts.renderer, "whole", slow)
    call = asyncio.create_task(ask(await world.client("mine", "p1"), "a secret " * 9))
    await until(begun.is_set)
    async with http.session.delete(f"{world.url}/v1/trajectories/mine") as response:
        assert response.status == 200
    gate.set()
    with pytest.raises(openai.APIStatusError, match="deleted"):
        await call
    assert prompts.cached.currsize == 0


async def test_the_key_of_a_trajectory_deletes_that_one_only(world: Any, http: Http) -> None:
    _, mine = await http.post(f"{world.url}/init_trajectory", trajectory_uid="mine")
    key = {"Authorization": f"Bearer {mine['api_key']}"}
    url = f"{world.url}/v1/trajectories"
    async with http.session.delete(f"{url}/other", headers=key) as response:
        assert response.status == 403
    async with http.session.delete(f"{url}/mine", headers=key) as response:
        assert response.status == 200


async def test_no_log_line_has_what_agents_and_model_say(
    world: Any, http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a good call, refused ones and a pool that does not answer."""
    caplog.set_level("DEBUG")
    client = await world.client("t", "p")
    await ask(client, "a secret of mine")
    world.port.failures = ["before"]
    with pytest.raises(openai.APIStatusError):
        await ask(client, "a secret of mine, again")
    with pytest.raises(openai.APIStatusError):
        await client.chat.completions.create(
            model="m", messages=[{"role": "a secret role", "content": "a secret of mine"}]
        )
    with pytest.raises(openai.APIStatusError):
        await client.post(
            "/chat/completions", body={"messages": "a secret of mine"}, cast_to=object
        )
    await http.post(f"{world.base_url('t', 'p')}/v1/complete_trajectory", reward="a secret reward")
    assert [r for r in caplog.records if r.name.startswith("stepwell")], "the pool failed aloud"
    said = [
        *(r.getMessage() for r in caplog.records if not r.name.startswith(("openai", "httpx"))),
        *(str(r.exc_info) for r in caplog.records if r.exc_info),
    ]
    assert not [line for line in said if "secret" in line]


@pytest.mark.parametrize("under", ["", "/t/p"])
@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "/v1 is missing: add it to the end of the client's base URL"),
        ("/v1/v1/chat/completions", "/v1 is there twice: leave it out of the client's base URL"),
        ("/v1/no/such", "see /openapi.json for what this gateway serves"),
    ],
)
async def test_a_base_url_with_a_wrong_end_is_told_what_to_change(
    world: Any, http: Http, under: str, path: str, remedy: str
) -> None:
    async with http.session.post(world.url + under + path, json={}) as response:
        assert response.status in (404, 405)
        assert remedy in (await response.json())["error"]["message"]

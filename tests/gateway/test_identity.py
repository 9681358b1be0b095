"""The trajectory that a call belongs to, by URL, headers, sessions, or the conversation itself."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import aiohttp
import openai
import pytest

from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from tests.builders import until
from tests.gateway.conftest import Sampled


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def plain(world: Any, **headers: str) -> openai.AsyncOpenAI:
    """A client that knows nothing but the gateway's address."""
    client: openai.AsyncOpenAI = await world.clients.enter_async_context(
        openai.AsyncOpenAI(
            base_url=f"{world.url}/v1", api_key="x", default_headers=headers, max_retries=0
        )
    )
    return client


async def talk(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> list[Any]:
    """The conversation with the reply to it."""
    got = await client.chat.completions.create(model="m", messages=messages, **options)
    return [*messages, got.choices[0].message.model_dump(exclude_none=True)]


def uids(world: Any) -> list[str]:
    return [s.trajectory_uid for s in world.stored()]


async def test_a_conversation_without_identity_is_one_trajectory(world: Any) -> None:
    client = await plain(world)
    messages = [user("hi")]
    for turn in range(3):
        messages = [*await talk(client, messages), user(f"and {turn}?")]
    assert len(set(uids(world))) == 1
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, 1]
    assert len({s.prompt_uid for s in steps}) == 1
    world.check_exact()


async def test_a_plain_text_whose_reply_ended_by_itself_goes_on_in_its_trajectory(
    world: Any,
) -> None:
    client = await plain(world)
    text = "It was"
    for _ in range(2):
        got = await client.completions.create(model="m", prompt=text, max_tokens=20)
        assert got.choices[0].finish_reason == "stop"
        text += got.choices[0].text + " and"
    first, second = world.stored()
    assert second.trajectory_uid == first.trajectory_uid
    # The token that ended the first reply is not in the text: these are other tokens.
    assert second.metadata["branch"] == "new_conversation"
    world.check_exact()


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_plain_text_that_goes_on_without_identity_is_one_trajectory(
    world: Any, as_ids: bool
) -> None:
    client = await plain(world)
    texts = {"one": "It was the first of many days", "two": "It was the last"}
    for turn in range(3):
        for name, text in texts.items():
            prompt: Any = world.tokenizer.encode(text).tolist() if as_ids else text
            got = await client.completions.create(model="m", prompt=prompt, max_tokens=2)
            texts[name] = f"{text}{got.choices[0].text}" + f" and {turn} more" * (not as_ids)
    steps = world.stored()
    assert len(steps) == 6
    assert len(set(uids(world))) == 2
    for uid in set(uids(world)):
        assert [s.step_index for s in steps if s.trajectory_uid == uid] == [0, 1, 2]
    if not as_ids:
        assert all(s.parent_index == (s.step_index - 1 if s.step_index else None) for s in steps)
    for trajectory in list(world.gateway.trajectories):
        await trajectory.complete(1.0, {})
    assert not world.gateway.identities._conversations._lengths
    await client.completions.create(model="m", prompt=texts["one"], max_tokens=2)
    assert len(set(uids(world))) == 3


async def test_two_conversations_without_identity_are_two_groups(world: Any) -> None:
    client = await plain(world)
    world.say("one")
    world.say("two")
    first = await talk(client, [user("hi")])
    second = await talk(client, [user("hi")])  # the very same words are another conversation
    await talk(client, [*second, user("go on")])
    await talk(client, [*first, user("go on")])
    a, b, c, d = world.stored()
    assert a.trajectory_uid != b.trajectory_uid
    assert a.prompt_uid != b.prompt_uid
    assert (c.trajectory_uid, c.parent_index) == (b.trajectory_uid, 0)
    assert (d.trajectory_uid, d.parent_index) == (a.trajectory_uid, 0)


async def test_other_tools_are_another_conversation(world: Any) -> None:
    client = await plain(world)
    messages = await talk(client, [user("hi")])
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    await talk(client, [*messages, user("go on")], tools=[tool])
    assert len(set(uids(world))) == 2


async def test_a_retry_of_a_first_call_is_the_same_trajectory(world: Any) -> None:
    client = await plain(world)
    await talk(client, [user("hi")])
    again = await client.chat.completions.create(
        model="m", messages=[user("hi")], extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.choices[0].message.content == "fine"
    assert len(uids(world)) == 1


FIRST_CALLS: dict[str, Any] = {
    "chat/completions": {"model": "m", "messages": [user("hi")]},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [user("hi")]},
}


async def post(world: Any, path: str, body: Any, **headers: str) -> Any:
    """Over a connection of its own."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.url}/v1/{path}", json=body, headers=headers) as answer,
    ):
        said = await answer.json()
        assert answer.status == 200, said
        return said


@pytest.mark.parametrize("path", FIRST_CALLS)
@pytest.mark.parametrize("first", [{}, {"x-stainless-retry-count": "1"}], ids=["plain", "retry"])
async def test_a_retry_of_an_agent_joins_no_conversation_of_another_one(
    world: Any, path: str, first: dict[str, str]
) -> None:
    world.say("one")
    world.say("two")
    body = FIRST_CALLS[path]
    said = await post(world, path, body, **first)
    # The other one's own first try never arrived here.
    other = await post(world, path, body, **{"x-stainless-retry-count": "1"})
    assert len(set(uids(world))) == 2
    assert said["id"] != other["id"]
    assert "two" in str(other)


async def test_agents_behind_one_proxy_are_not_one_client(world: Any) -> None:
    world.say("one")
    world.say("two")
    body = FIRST_CALLS["chat/completions"]
    proxy = {"x-forwarded-for": "10.0.0.5"}  # of the machine, not of the agent on it
    await post(world, "chat/completions", body, **proxy)
    other = await post(world, "chat/completions", body, **proxy, **{"x-stainless-retry-count": "1"})
    assert len(set(uids(world))) == 2
    assert "two" in str(other)


async def test_a_retry_of_a_first_call_that_failed_goes_on_in_its_conversation(world: Any) -> None:
    world.engine.script += [Sampled([1], status=500)] * 2
    body, retry = FIRST_CALLS["chat/completions"], {"x-stainless-retry-count": "1"}
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(f"{world.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 502
    before = len(world.gateway.trajectories)
    await post(world, "chat/completions", body, **retry)
    assert len(world.gateway.trajectories) == before
    await post(world, "chat/completions", body, **retry)
    assert len(set(uids(world))) == 2, "one failure is one agent's"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_retry_of_a_first_call_that_nobody_waited_for_gets_its_replies(
    world: Any, n: int
) -> None:
    body = FIRST_CALLS["chat/completions"] | {"n": n}
    world.port.door.clear()
    asking = asyncio.create_task(post(world, "chat/completions", body))
    await world.port.waiting.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    world.port.door.set()
    await until(lambda: len(world.stored()) == n)
    said = await post(world, "chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert len(said["choices"]) == n
    assert len(world.engine.requests) == len(world.stored()) == n


async def test_an_idempotency_key_is_its_callers_and_its_requests(world: Any) -> None:
    for text in ("one", "two", "three"):
        world.say(text)
    hi, hello = ({"model": "m", "messages": [user(text)]} for text in ("hi", "hello"))
    mine = {"idempotency-key": "1", "authorization": "Bearer mine"}
    yours = {"idempotency-key": "1", "authorization": "Bearer yours"}
    said = [
        (await post(world, "chat/completions", body, **headers))["choices"][0]["message"]["content"]
        for body, headers in ((hi, mine), (hi, yours), (hello, mine), (hi, mine), (hello, mine))
    ]
    assert said == ["one", "two", "three", "one", "three"]
    assert len(uids(world)) == len(set(uids(world))) == 3


async def test_conversations_of_two_callers_are_apart_whatever_they_say(world: Any) -> None:
    for key in ("mine", "yours"):
        client = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)
        client = await world.clients.enter_async_context(client)
        await talk(client, [user("hi")])
    messages = [user("hi"), {"role": "assistant", "content": "fine"}, user("go on")]
    first, second = uids(world)
    for key, uid in (("mine", first), ("yours", second)):
        await post(
            world,
            "chat/completions",
            {"model": "m", "messages": messages},
            authorization=f"Bearer {key}",
        )
        assert uids(world)[-1] == uid


async def test_every_session_has_a_name_of_its_own(world: Any) -> None:
    names = ["team/a", "team_a", "team%2Fa", "team~2", "team"]
    for name in names:
        await talk(await plain(world, **{"x-session-id": name}), [user("hi")])
    assert len(set(uids(world))) == len(names)
    await world.gateway.identities.close_idle(time.monotonic() + 1)
    await talk(await plain(world, **{"x-session-id": "team"}), [user("hi again")])
    assert len(set(uids(world))) == len(names) + 1
    for name, uid in zip(names, uids(world), strict=False):
        assert "/" not in uid, name


async def test_idle_conversations_are_completed_unscored_and_others_are_not(world: Any) -> None:
    client = await plain(world)
    messages = await talk(client, [user("hi")])
    named = await world.client()
    await talk(named, [user("hi")])
    identities = world.gateway.identities
    assert await identities.close_idle(time.monotonic() - 1) == 0
    assert await identities.close_idle(time.monotonic()) == 1
    first = uids(world)[0]
    lease = await world.pool.lease_batch(1, "train")
    [trajectory] = lease.groups[0].trajectories
    assert trajectory.trajectory_uid == first
    assert trajectory.reward is None
    assert trajectory.metadata["closed_by"] == "idle"
    await talk(client, [*messages, user("still there?")])
    assert uids(world)[-1] not in (first, "t1")
    await talk(named, [user("more")])
    assert uids(world)[-1] == "t1"


async def test_the_sweeper_completes_by_itself(worlds: Any) -> None:
    world = await worlds(conversation_idle_s=0.1)
    client = await plain(world)
    await talk(client, [user("hi")])
    await until(lambda: not len(world.gateway.trajectories), 5)
    assert await world.pool.lease_batch(1, "train") is not None


async def test_a_trajectory_that_the_pool_closed_is_let_go_without_another_call(world: Any) -> None:
    for uid in ("dead", "alive"):
        await talk(await world.client(uid, f"prompt-{uid}"), [user("hi")])
    await world.pool.drop_group("prompt-dead", "its deadline")
    identities = world.gateway.identities
    await identities.close_idle(time.monotonic() - 9)
    assert len(world.gateway.trajectories) == 2
    await identities.close_idle(time.monotonic() + 1)
    assert [t.uid for t in world.gateway.trajectories] == ["alive"]


async def test_a_conversation_is_idle_from_the_end_of_its_last_call_on(world: Any) -> None:
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    asked = asyncio.create_task(talk(await plain(world), [user("hi")]))
    await world.engine.arrived.wait()
    in_flight = time.monotonic()
    gate.set()
    await asked
    assert await world.gateway.identities.close_idle(in_flight) == 0
    assert await world.gateway.identities.close_idle(time.monotonic()) == 1


async def test_a_conversation_in_flight_is_not_idle(world: Any) -> None:
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    client = await plain(world)
    asked = asyncio.create_task(talk(client, [user("hi")]))
    await until(lambda: world.engine.requests, 5)
    assert await world.gateway.identities.close_idle(time.monotonic() + 9) == 0
    gate.set()
    await asked


def held(world: Any, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold the pool's answers to this question: (set when it is asked, its gate)."""
    ask, asked, gate = getattr(world.pool, name), asyncio.Event(), asyncio.Event()

    async def hold(*arguments: Any, **options: Any) -> Any:
        asked.set()
        await gate.wait()
        return await ask(*arguments, **options)

    setattr(world.pool, name, hold)
    return asked, gate


async def test_a_conversation_that_goes_on_while_the_pool_is_asked_about_it_is_not_idle(
    world: Any,
) -> None:
    client = await plain(world)
    messages = await talk(client, [user("hi")])
    asked, gate = held(world, "list_trajectories")
    sweep = asyncio.create_task(world.gateway.identities.close_idle(time.monotonic()))
    await asked.wait()
    slow = asyncio.Event()
    world.say("still here", gate=slow)
    call = asyncio.create_task(talk(client, [*messages, user("go on")]))
    await until(lambda: len(world.engine.requests) == 2, 5)
    gate.set()
    assert await sweep == 0
    slow.set()
    await call
    assert len(world.stored(uids(world)[0])) == 2


@pytest.mark.parametrize("by", ["idle", "name"])
async def test_a_call_that_comes_while_its_conversation_is_completed_begins_another(
    world: Any, by: str
) -> None:
    client = await plain(world)
    messages = await talk(client, [user("hi")])
    [trajectory] = world.gateway.trajectories
    asked, gate = held(world, "complete_trajectory")
    if by == "idle":
        ending = world.gateway.identities.close_idle(time.monotonic() + 1)
    else:
        ending = world.gateway.outcomes.complete(trajectory.uid, 1.0, {})
    end = asyncio.create_task(ending)
    await asked.wait()
    call = asyncio.create_task(talk(client, [*messages, user("go on")]))
    await until(lambda: trajectory.users > 1 or len(world.engine.requests) == 2, 5)
    gate.set()
    await end
    await call
    first, second = world.stored()
    assert first.trajectory_uid == trajectory.uid != second.trajectory_uid
    assert (await world.pool.lease_batch(1, "train")).groups[0].steps[0].trajectory_uid == (
        trajectory.uid
    )


@pytest.mark.parametrize("how", ["complete", "delete"])
@pytest.mark.parametrize("under", ["", "/t1/p1"], ids=["conversation", "url"])
async def test_a_call_whose_trajectory_is_closed_as_its_prompt_is_made_is_not_lost(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, how: str, under: str
) -> None:
    world = await worlds(tuning=Tuning(offload_chars=10))
    client = await (world.client() if under else plain(world))
    messages = await talk(client, [user("hi")])
    [trajectory] = world.gateway.trajectories
    renderer, begun, gate = (
        world.gateway.calls.prompts.renderer,
        threading.Event(),
        threading.Event(),
    )
    suffix = renderer.suffix

    def slow(*args: Any) -> Any:
        begun.set()
        assert gate.wait(10)
        return suffix(*args)

    monkeypatch.setattr(renderer, "suffix", slow)
    call = asyncio.create_task(talk(client, [*messages, user("go on " * 9)]))
    await until(begun.is_set, 5)
    async with aiohttp.ClientSession() as session:
        if how == "complete":
            body = {"trajectory_uid": trajectory.uid, "reward": 1}
            asking = session.post(f"{world.url}/v1/complete_trajectory", json=body)
        else:
            asking = session.delete(f"{world.url}/v1/trajectories/{trajectory.uid}")
        async with asking as answer:
            assert answer.status == 200
    gate.set()
    if how == "complete" and not under:
        await call
        assert len(set(uids(world))) == 2, "it is stored in another trajectory"
    else:
        with pytest.raises(openai.APIStatusError, match=f"{how}d") as refused:
            await call
        assert refused.value.status_code == 410
        assert len(world.engine.requests) == 1, "nothing is sampled for a closed one"


async def test_headers_name_a_trajectory(world: Any) -> None:
    client = await plain(world, **{"x-trajectory-uid": "t7", "x-prompt-uid": "p%207"})
    await talk(client, [user("hi")])
    await talk(client, [user("something else")])
    assert {(s.trajectory_uid, s.prompt_uid) for s in world.stored()} == {("t7", "p 7")}
    async with aiohttp.ClientSession() as session:
        url = f"{world.base_url('t7', 'p 7')}/v1/complete_trajectory"
        async with session.post(url, json={"reward": 1}) as response:
            assert response.status == 200
    with pytest.raises(openai.APIStatusError) as e:
        await talk(client, [user("late")])
    assert e.value.status_code == 410
    assert len(world.stored()) == 2


async def test_a_malformed_header_is_refused_by_name(world: Any) -> None:
    client = await plain(world, **{"x-trajectory-uid": ""})
    with pytest.raises(openai.BadRequestError, match="x-trajectory-uid is empty"):
        await talk(client, [user("hi")])
    assert not world.stored()


async def test_the_url_wins_over_headers(world: Any) -> None:
    client = await world.client("t1", default_headers={"x-trajectory-uid": "t7"})
    await talk(client, [user("hi")])
    assert uids(world) == ["t1"]


async def test_a_session_with_its_sub_agents_is_one_trajectory(world: Any) -> None:
    main = await plain(world, **{"x-session-id": "s1"})
    sub = await plain(world, **{"x-session-id": "s1-sub", "x-parent-session-id": "s1"})
    other = await plain(world, **{"x-session-id": "s2"})
    messages = await talk(main, [user("hi")])
    await talk(sub, [{"role": "system", "content": "You search."}, user("find it")])
    await talk(main, [*messages, user("go on")])
    await talk(other, [user("hi")])
    steps = world.stored()
    assert [s.trajectory_uid for s in steps] == ["session-s1"] * 3 + ["session-s2"]
    assert [s.parent_index for s in steps] == [None, None, 0, None]
    assert steps[1].metadata["branch"] == "new_conversation"


async def test_a_session_that_returns_after_its_end_begins_another_trajectory(world: Any) -> None:
    client = await plain(world, **{"x-session-id": "s1"})
    await talk(client, [user("hi")])
    await world.gateway.identities.close_idle(time.monotonic() + 1)
    await talk(client, [user("hi again")])
    await talk(client, [user("and again")])
    assert uids(world) == ["session-s1", "session-s1~2", "session-s1~2"]


async def test_a_session_of_many_ends_goes_on_at_a_gateway_that_saw_none_of_them(
    worlds: Any,
) -> None:
    world = await worlds()
    client = await plain(world, **{"x-session-id": "s1"})
    for _ in range(6):
        await talk(client, [user("hi")])
        await world.gateway.identities.close_idle(time.monotonic() + 1)
    other = await worlds(pool=world.pool)
    await talk(await plain(other, **{"x-session-id": "s1"}), [user("hi again")])
    await talk(client, [user("and again")])
    assert uids(world)[-3:] == ["session-s1~6", "session-s1~7", "session-s1~7"]


@pytest.mark.parametrize("headers", [{}, {"x-prompt-uid": "team"}])
async def test_a_session_that_goes_on_elsewhere_ends_and_opens_no_group_of_others(
    worlds: Any, headers: dict[str, str]
) -> None:
    options: Any = {"groups": {"form": "first_prompt", "n": 8}}
    world = await worlds(**options)
    client = await plain(world, **{"x-session-id": "s1", **headers})
    for _ in range(3):
        await talk(client, [user("hi")])
        await world.gateway.identities.close_idle(time.monotonic() + 1)
    other = await worlds(pool=world.pool, **options)
    for session in ("s2", "s1", "s3"):
        await talk(await plain(other, **{"x-session-id": session, **headers}), [user("hi")])
    steps = world.stored()[3:]
    assert [s.trajectory_uid for s in steps] == ["session-s2", "session-s1~4", "session-s3"]
    assert len({s.prompt_uid for s in steps}) == 1
    groups = (await world.pool.list_groups("train")).items
    assert {s.prompt_uid for s in world.stored()} == {group.prompt_uid for group in groups}


@pytest.mark.parametrize("form", ["first_prompt", "single"])
async def test_a_session_goes_on_in_its_group_at_another_gateway(worlds: Any, form: str) -> None:
    options: Any = {"groups": {"form": form, "n": 8}}
    world = await worlds(**options)
    client = await plain(world, **{"x-session-id": "s1"})
    messages = [*await talk(client, [user("hi")]), user("go on")]
    other = await worlds(pool=world.pool, **options)
    await talk(await plain(other, **{"x-session-id": "s1"}), messages)
    first, second = world.stored()
    assert (second.trajectory_uid, second.prompt_uid) == (first.trajectory_uid, first.prompt_uid)
    assert (second.step_index, second.parent_index) == (1, 0)
    assert len((await world.pool.list_groups("train")).items) == 1


async def test_a_session_that_is_held_out_stays_so_at_another_gateway(worlds: Any) -> None:
    options: Any = {"groups": {"form": "first_prompt", "n": 8}, "holdout": 0.5}
    world = await worlds(**options)
    other = await worlds(pool=world.pool, **options)
    for i in range(8):
        named = {"x-session-id": f"s{i}"}
        messages = await talk(await plain(world, **named), [user(f"hi {i}")])
        await talk(await plain(other, **named), [*messages, user("go on")])
    found = {(s.trajectory_uid, s.prompt_uid, channel) for s, channel in world.port.steps}
    assert len(found) == 8


async def test_a_session_that_went_on_at_another_gateway_is_not_idle_at_the_first(
    worlds: Any,
) -> None:
    world = await worlds()
    messages = await talk(await plain(world, **{"x-session-id": "s1"}), [user("hi")])
    other = await worlds(pool=world.pool)
    client = await plain(other, **{"x-session-id": "s1"})
    identities = world.gateway.identities
    for _ in range(2):
        messages = await talk(client, [*messages, user("go on")])
        assert await identities.close_idle(time.monotonic() + 1) == 0
    assert uids(world) == ["session-s1"] * 3
    assert await identities.close_idle(time.monotonic() + 1) == 1


async def test_nothing_of_closed_conversations_is_kept(world: Any) -> None:
    client = await plain(world)
    for i in range(5):
        await talk(client, [user(f"hi {i}")])
    identities = world.gateway.identities
    await identities.close_idle(time.monotonic() + 1)
    conversations = world.gateway.trajectories.conversations
    assert len(conversations) == 0
    assert not conversations._lengths


async def test_text_that_changes_on_every_call_can_be_normalised(worlds: Any) -> None:
    rule = {"role": "system", "pattern": r"It is \d\d:\d\d\.", "replacement": "It is now."}
    world = await worlds(normalize=[rule])
    client = await world.client()
    messages = [user("hi")]
    for turn in range(3):
        system = {"role": "system", "content": f"Be kind. It is 12:0{turn}."}
        messages = [*(await talk(client, [system, *messages]))[1:], user("go on")]
    assert [s.parent_index for s in world.stored()] == [None, 0, 1]
    assert "It is now." in world.tokenizer.decode(world.engine.requests[0]["input_ids"])
    world.check_exact()


def test_a_rule_that_is_no_regular_expression_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"pattern is '\('"):
        create_app(GatewayConfig(normalize=[{"pattern": "("}]), Wiring(), None, tokenizer)  # type: ignore

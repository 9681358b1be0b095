"""slime's Rollout Buffer API, used as slime's own consumer uses it, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.config import ChannelConfig, PoolConfig, SelectionConfig
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.start import client_of, start_data_pool
from stepwell.datapool.types import DUPLICATE_OF, Group, Step, Trajectory
from stepwell.gateway.app import create_app
from stepwell.gateway.config import LAST_START, GatewayConfig, Wiring
from stepwell.gateway.pool_access import PoolAccess
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.slime_buffer.items import make_item, messages_of, rows
from stepwell.gateway.slime_buffer.writes import Item
from stepwell.gateway.tokens.messages import TurnMessages
from stepwell.gateway.tokens.render import ChatRenderer
from tests.builders import until
from tests.gateway.conftest import serving

# -- a consumer that does what slime's rollout_buffer_example.py does ---------------------------

REQUIRED = {"uid", "instance_id", "messages", "reward", "raw_reward", "extra_info"}


class Consumer:
    """Sends and reads what slime's does: numbers as text, a session per poll, grouping by
    instance id over all answers."""

    def __init__(self, url: str, n_samples_per_prompt: int = 2, key: str | None = None) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.n = n_samples_per_prompt
        self.meta: list[dict[str, Any]] = []

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(headers=self.headers) as session,
            session.post(f"{self.url}{path}", json=body) as response,
        ):
            return response.status, await response.json()

    async def start(self, **changes: Any) -> dict[str, Any]:
        payload = {
            "num_process": "4",
            "num_epoch": "3",
            "remote_engine_url": "http://127.0.0.1:30000",
            "remote_buffer_url": self.url,
            "task_type": "external",
            "input_file": "/data/train.jsonl",
            "num_repeat_per_sample": str(self.n),
            "max_tokens": "64",
            "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 1.0},
            "tokenizer_path": "/models/m",
            "skip_instance_ids": [],
            **changes,
        }
        status, answer = await self.post("/start_rollout", payload)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def poll(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/get_rollout_data", body)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def items(self) -> list[dict[str, Any]]:
        """Items of one poll; [] if it was not successful."""
        answer = await self.poll()
        if not answer["success"]:
            return []
        self.meta.append(answer["data"]["meta_info"])
        found: list[dict[str, Any]] = answer["data"]["data"]
        for item in found:
            assert REQUIRED.issubset(item)
        return found

    def groups(self, items: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
        grouped = defaultdict(list)
        for item in items:
            grouped[item["instance_id"]].append(item)
        for group in grouped.values():
            assert len(group) == self.n
        return dict(grouped)


async def rollout(
    world: Any,
    prompt_uid: str,
    uid: str,
    reward: float | None = 1.0,
    *,
    metadata: dict[str, Any] | None = None,
    text: str = "fine",
    question: str = "what is it",
) -> None:
    """An agent's: one call and its end."""
    if metadata is not None:
        init = {"prompt_uid": prompt_uid, "trajectory_uid": uid, "metadata": metadata}
        assert (await Consumer(world.url).post("/init_trajectory", init))[0] == 200
    world.say(text)
    client = await world.client(uid, prompt_uid)
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question}]
    )
    await finish(world, prompt_uid, uid, reward)


async def finish(world: Any, prompt_uid: str, uid: str, reward: float | None) -> None:
    path = f"/{uid}/{prompt_uid}/v1/complete_trajectory"
    status, answer = await Consumer(world.url).post(path, {"reward": reward})
    assert status == 200, answer


async def rollouts(world: Any, prompt_uid: str, n: int = 2, **how: Any) -> None:
    for i in range(n):
        await rollout(world, prompt_uid, f"{prompt_uid}-{i}", **how)


FILTERED = PoolConfig(default=ChannelConfig(selection=SelectionConfig(filters=("scored",))))
"""The pool holds unscored groups back."""


def statistics(world: Any) -> dict[str, Any]:
    return world.gateway.statistics()["rollout_buffer"]  # type: ignore[no-any-return]


async def pool_groups(world: Any) -> dict[str, Any]:
    return (await world.pool.get_statistics("train"))["groups"]  # type: ignore[no-any-return]


@pytest.fixture
def consumer(world: Any) -> Consumer:
    return Consumer(world.url)


# -- shapes --------------------------------------------------------------------------------------


async def test_a_slime_consumer_gets_its_groups_in_its_shapes(world: Any, consumer: Consumer):
    said = "Nothing was started: task_type external waits for rollouts from outside"
    assert await consumer.start() == {"message": said}
    await rollout(world, "p7", "a", 1.0, metadata={"instance_id": 7, "label": "42"})
    await rollout(world, "p7", "b", 0.0, metadata={"instance_id": 7})
    await rollouts(world, "p8", reward=0.5)

    answer = await consumer.poll()

    assert list(answer) == ["success", "message", "data"]
    assert answer["success"] is True
    assert answer["message"] == "Successfully read 4 items"
    assert set(answer["data"]) == {"data", "meta_info"}
    assert answer["data"]["meta_info"] == {
        "total_samples": 4,
        "num_groups": 2,
        "avg_group_size": 2.0,
        "avg_reward": 0.5,
        "finished_groups": [7, "p8"],
        "dropped_groups": {},
    }
    groups = consumer.groups(answer["data"]["data"])
    assert list(groups) == [7, "p8"]
    first = groups[7][0]
    assert first["uid"] == "a"
    assert first["reward"] == 1.0
    assert groups[7][1]["reward"] == 0.0
    assert first["messages"] == [
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": "fine"},
    ]
    assert first["extra_info"] == {
        "finish_reason": "stop",
        "round_number": 1,
        "trajectory_uid": "a",
        "prompt_uid": "p7",
        "instance_id": 7,
        "delivery": 1,
        "label": "42",
    }
    step = world.stored("a")[0]
    assert first["tokens"] == [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
    assert first["response_length"] == len(step.response_ids)
    assert first["loss_mask"] == [1] * len(step.response_ids)
    assert first["rollout_log_probs"] == pytest.approx(step.rollout_log_probs.tolist())
    assert first["weight_versions"] == ["0"]
    assert first["branches"] == []
    assert (await pool_groups(world))["acked"] == 2


async def test_nothing_to_read_is_said_as_slime_says_it(world: Any, consumer: Consumer):
    await consumer.start()
    assert await consumer.poll() == {
        "success": False,
        "message": "No data available to read",
        "data": {"data": [], "meta_info": {}},
    }


@pytest.mark.parametrize(
    "item",
    ["text", ["a list"], None, {"extra_info": "text"}, {"extra_info": 5}, {"uid": ["a list"]}],
)
async def test_what_agents_send_as_metadata_keeps_no_group_from_being_served(
    world: Any, consumer: Consumer, item: object
):
    await consumer.start()
    await rollouts(world, "p", metadata={"rollout_item": item, "label": "42"})
    found = await consumer.items()
    assert [i["uid"] for i in found] == ["p-0", "p-1"]
    assert [i["extra_info"]["label"] for i in found] == ["42", "42"]


async def test_a_group_is_served_only_when_it_is_whole(world: Any, consumer: Consumer):
    await consumer.start()
    await rollouts(world, "p", n=1)
    assert await consumer.items() == []
    await rollout(world, "p", "p-1")
    assert [i["uid"] for i in await consumer.items()] == ["p-0", "p-1"]
    assert await consumer.items() == []


async def test_a_group_with_more_trajectories_is_served_at_its_size(world: Any, consumer: Consumer):
    await rollouts(world, "p", n=3)
    await consumer.start()
    consumer.groups(await consumer.items())


async def test_a_declared_group_that_ended_smaller_is_dropped(world: Any, consumer: Consumer):
    await consumer.start()
    await world.pool.open_group("p", 2, min_rollouts=1)
    await rollouts(world, "p", n=1)
    await world.pool.open_trajectory("gone", "p")
    await world.pool.abort_trajectory("gone", "crashed")
    await rollouts(world, "q")
    assert list(consumer.groups(await consumer.items())) == ["q"]
    assert (await pool_groups(world))["drop_reasons"] == {"group_size": 1}
    assert consumer.meta[0]["dropped_groups"] == {"group_size": 1}


async def test_before_start_rollout_the_pools_own_group_size_counts(world: Any, consumer: Consumer):
    await world.pool.open_group("p", 2)
    await rollouts(world, "p")
    assert [i["uid"] for i in await consumer.items()] == ["p-0", "p-1"]


async def test_an_instance_that_comes_again_is_another_group(world: Any, consumer: Consumer):
    """slime groups by instance id over several answers."""
    await consumer.start()
    for prompt_uid in ("epoch0", "epoch1"):
        for i in range(2):
            uid = f"{prompt_uid}-{i}"
            await rollout(world, prompt_uid, uid, metadata={"instance_id": 3})
    groups = consumer.groups(await consumer.items())
    assert list(groups) == [3, "epoch1"]
    # A resumed run skips it by the name that its producer knows.
    assert consumer.meta[0]["finished_groups"] == [3, 3]
    assert {item["extra_info"]["instance_id"] for own in groups.values() for item in own} == {3}


async def test_answers_of_exactly_one_batch_leave_nothing_to_throw_away(
    worlds: Callable[..., Any],
):
    world = await worlds(rollout_batch_groups=2)
    consumer = Consumer(world.url)
    await consumer.start()
    await rollouts(world, "p0")
    assert await consumer.items() == []
    assert (await pool_groups(world))["leased"] == 0
    await rollouts(world, "p1")
    await rollouts(world, "p2")
    assert list(consumer.groups(await consumer.items())) == ["p0", "p1"]
    assert await consumer.items() == []


# -- tokens and text ------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def call_text(family: str) -> str:
    if family == "llama3":
        return '{"name": "look", "parameters": {"at": "é"}}'
    return '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "no_tools"])
async def test_a_conversation_is_one_item_with_the_exact_ids_and_readable_text(
    worlds: Callable[..., Any], family: str
):
    world = await worlds(family)
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start()
    client = await world.client("t", "p")
    with_tools = family in ("chatml", "qwen3")
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say <|im_end|>\n and look"},
    ]
    replies = [call_text(family) if with_tools else "first", "then ü", "cut"]
    asked: list[Any] = [{"role": "user", "content": "go on"}, {"role": "user", "content": "end"}]
    for i, text in enumerate(replies):
        last = i == 2
        world.say(text, close=not last, finish="length" if last else "stop")
        kwargs: dict[str, Any] = {"tools": TOOLS} if with_tools else {}
        done = await client.chat.completions.create(model="m", messages=messages, **kwargs)
        reply = done.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if reply.tool_calls:
            messages.append(
                {"role": "tool", "content": "saw it", "tool_call_id": reply.tool_calls[0].id}
            )
        elif not last:
            messages.append(asked.pop(0))
    await finish(world, "p", "t", 1.0)

    (item,) = await consumer.items()

    steps = world.stored("t")
    assert item["tokens"] == [*steps[-1].prompt_ids.tolist(), *steps[-1].response_ids.tolist()]
    start = len(steps[0].prompt_ids)
    assert item["response_length"] == len(item["tokens"]) - start
    trained = [t for t, m in zip(item["tokens"][start:], item["loss_mask"], strict=True) if m]
    assert trained == [i for s in steps for i in s.response_ids.tolist()]
    for at, (m, lp) in enumerate(zip(item["loss_mask"], item["rollout_log_probs"], strict=True)):
        assert (lp < 0) if m else (lp == 0), at
    assert item["extra_info"]["finish_reason"] == "length"  # slime: TRUNCATED
    assert item["extra_info"]["round_number"] == 3
    said = [(m["role"], m["content"]) for m in item["messages"]]
    middle = ("tool", "saw it") if with_tools else ("user", "go on")
    assert said[1:] == [
        ("user", "say <|im_end|>\n and look"),
        ("assistant", replies[0]),
        middle,
        ("assistant", replies[1]),
        ("user", "end" if not with_tools else "go on"),
        ("assistant", "cut"),
    ]
    assert said[0][0] == "system"
    assert said[0][1].startswith("be brief")


@pytest.mark.parametrize("family", ["chatml", "llama3", "no_tools"])
async def test_rendering_the_messages_again_gives_the_same_ids(
    worlds: Callable[..., Any], family: str
):
    """slime's consumer renders messages again. (Qwen3's template writes thinking of its own.)"""
    world = await worlds(family)
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start()
    client = await world.client("t", "p")
    messages: list[Any] = [{"role": "user", "content": "one <|im_start|> two"}]
    for text in ("first", "second"):
        world.say(text)
        await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    await finish(world, "p", "t", 1.0)
    (item,) = await consumer.items()
    text = world.tokenizer.render(item["messages"], None, {}, add_generation_prompt=False)
    ids = world.tokenizer.encode(text).tolist()
    assert ids[: len(item["tokens"])] == item["tokens"]
    assert len(ids) - len(item["tokens"]) <= 1  # a line break behind the turn close


async def test_history_that_was_not_sampled_here_is_marked_for_slimes_masks(
    world: Any, consumer: Consumer
):
    await consumer.start(num_repeat_per_sample="1")
    world.say("now")
    client = await world.client("t", "p")
    shots = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    await client.chat.completions.create(model="m", messages=shots)  # type: ignore[arg-type]
    await finish(world, "p", "t", 1.0)
    (item,) = await consumer.items()
    assert item["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "step_loss_mask": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "now"},
    ]


async def test_what_was_sampled_beside_the_main_branch_comes_as_branches(
    world: Any, consumer: Consumer
):
    await consumer.start(num_repeat_per_sample="1")
    client = await world.client("t", "p")

    async def ask(*said: str) -> None:
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[i % 2], "content": c} for i, c in enumerate(said)]
        await client.chat.completions.create(model="m", messages=messages)

    for text in ("hi", "a title", "left", "right"):
        world.say(text)
    await ask("hello")
    await ask("make a title")  # a side call
    await ask("hello", "hi", "go left")  # a fork
    await ask("hello", "hi", "go right")
    await finish(world, "p", "t", 1.0)
    (item,) = await consumer.items()

    def sampled(row: dict[str, Any]) -> list[int]:
        response = row["tokens"][len(row["tokens"]) - row["response_length"] :]
        return [t for t, m in zip(response, row["loss_mask"], strict=True) if m]

    assert sampled(item) == world.ids("hi") + world.ids("right")
    assert [sampled(b) for b in item["branches"]] == [world.ids("left"), world.ids("a title")]
    assert item["messages"][-1]["content"] == "right"


async def test_a_reply_that_nobody_saw_is_not_served(world: Any, consumer: Consumer):
    """Its request was repeated at another gateway; the agent has the other answer."""
    await consumer.start(num_repeat_per_sample="1")
    await rollout(world, "p", "t", text="seen")
    (seen,) = world.stored("t")
    lost = replace(
        seen,
        response_ids=world.ids("lost"),
        rollout_log_probs=None,
        trajectory_uid="u",
        prompt_uid="q",
        step_index=1,
        metadata={**seen.metadata, DUPLICATE_OF: 0},
    )
    first = replace(seen, trajectory_uid="u", prompt_uid="q")
    await world.pool.submit_steps([first, lost])
    await world.pool.complete_trajectory("u", 1.0)
    for item in await consumer.items():
        assert item["tokens"][-item["response_length"] :] == world.ids("seen")
        assert (item["branches"], item["messages"][-1]["content"]) == ([], "seen")
    assert statistics(world)["delivered_items"] == 2


@pytest.mark.parametrize("kept", [{}, {"messages": "odd"}, {"messages": [{"content": "x"}]}])
def test_a_step_that_keeps_no_messages_shows_its_text(
    tokenizer_of: Callable[..., Any], kept: dict[str, Any]
):
    tokenizer = tokenizer_of("chatml")
    step = Step(
        prompt_ids=tokenizer.encode("bare <|im_start|> text"),
        response_ids=tokenizer.encode("yes"),
        trajectory_uid="t",
        prompt_uid="p",
        step_index=0,
        policy_version=0,
        metadata=kept,
    )
    assert messages_of([step], tokenizer) == [
        {"role": "user", "content": "bare <|im_start|> text"},
        {"role": "assistant", "content": "yes"},
    ]


async def test_messages_that_are_not_kept_are_the_text_of_the_prompt(worlds: Callable[..., Any]):
    world = await worlds(keep_messages=False)
    consumer = Consumer(world.url, n_samples_per_prompt=1)
    await consumer.start()
    await rollout(world, "p", "t", question="what is it")
    (item,) = await consumer.items()
    assert [m["role"] for m in item["messages"]] == ["user", "assistant"]
    assert "what is it" in item["messages"][0]["content"]
    assert item["messages"][1]["content"] == "fine"


# -- who gets what --------------------------------------------------------------------------------


async def test_listed_instances_are_skipped_once_per_entry(world: Any, consumer: Consumer):
    await consumer.start(skip_instance_ids=[1, "p2", 1])
    for n, prompt_uid in enumerate(("e0", "e1", "e2")):
        for i in range(2):
            await rollout(world, prompt_uid, f"{n}-{i}", metadata={"instance_id": 1})
    await rollouts(world, "p2")
    await rollouts(world, "p3")
    served = list(consumer.groups(await consumer.items()))
    assert served == [1, "p3"]
    assert (await pool_groups(world))["drop_reasons"] == {"skip_instance_ids": 3}


async def test_a_listed_instance_is_skipped_though_the_pool_fails_to_drop_it_at_first(
    world: Any, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
):
    await consumer.start(skip_instance_ids=[1])
    for i in range(2):
        await rollout(world, "e0", str(i), metadata={"instance_id": 1})
    drop_group, calls = world.pool.drop_group, []

    async def failing(*args: Any, **how: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise PoolUnavailableError("scripted")
        await drop_group(*args, **how)

    monkeypatch.setattr(world.pool, "drop_group", failing)
    status, _ = await consumer.post("/get_rollout_data", {})
    assert status == 503
    assert await consumer.items() == []
    assert (await pool_groups(world))["drop_reasons"] == {"skip_instance_ids": 1}


async def test_several_consumers_never_get_the_same_group(world: Any):
    consumers = [Consumer(world.url) for _ in range(4)]
    await consumers[0].start()
    for k in range(8):
        await rollouts(world, f"p{k}")
    got = await asyncio.gather(*(c.items() for c in consumers for _ in range(2)))
    uids = [i["uid"] for items in got for i in items]
    assert sorted(uids) == sorted(f"p{k}-{i}" for k in range(8) for i in range(2))
    assert (await pool_groups(world))["acked"] == 8


async def disconnecting(world: Any, path: str) -> Callable[[], None]:
    """Sends a request and returns what drops the connection."""
    at = urlsplit(world.url)
    _, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: 2\r\n\r\n{{}}".encode())
    await writer.drain()
    return writer.transport.abort


async def test_a_consumer_that_leaves_before_the_end_loses_nothing(
    world: Any, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
):
    await consumer.start()
    await rollouts(world, "p0")
    await rollouts(world, "p1")
    buffer = world.gateway.rollout_buffer
    encode, reached, go = buffer.encode, asyncio.Event(), asyncio.Event()

    async def slowly(served: Any) -> bytes:
        reached.set()
        await go.wait()
        return await encode(served)  # type: ignore[no-any-return]

    monkeypatch.setattr(buffer, "encode", slowly)
    leave = await disconnecting(world, "/get_rollout_data")
    await reached.wait()
    assert (await pool_groups(world))["leased"] == 2
    leave()

    async def both_are_back() -> bool:
        return bool((await pool_groups(world))["ready"] == 2)

    await until(both_are_back)
    go.set()
    monkeypatch.undo()
    assert statistics(world)["returned_groups"] == 2
    items = await consumer.items()
    assert list(consumer.groups(items)) == ["p0", "p1"]
    assert {i["extra_info"]["delivery"] for i in items} == {2}


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_an_ack_whose_answer_is_lost_is_asked_for_again(
    world: Any, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, lost: str
):
    monkeypatch.setattr("stepwell.gateway.slime_buffer.buffer.ACK_RETRY_S", 0.01)
    await consumer.start()
    await rollouts(world, "p")
    ack, calls = world.pool.ack, []

    async def failing(lease_id: str) -> None:
        calls.append(lease_id)
        if len(calls) > 1 or lost == "answer":
            await ack(lease_id)
        if len(calls) == 1:
            raise ConnectionError("scripted")

    monkeypatch.setattr(world.pool, "ack", failing)
    assert len(await consumer.items()) == 2
    assert len(calls) == 2
    assert await consumer.items() == []
    assert (await pool_groups(world))["acked"] == 1


async def test_an_answer_whose_lease_ran_out_is_cut_and_its_groups_are_served_again(
    world: Any, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
):
    await consumer.start()
    await rollouts(world, "p")
    buffer = world.gateway.rollout_buffer
    encode = buffer.encode

    async def too_slowly(served: Any) -> bytes:
        world.port.pass_time(1e6)
        return await encode(served)  # type: ignore[no-any-return]

    monkeypatch.setattr(buffer, "encode", too_slowly)
    with pytest.raises(aiohttp.ClientPayloadError):
        await consumer.poll()
    monkeypatch.undo()
    assert len(await consumer.items()) == 2


async def test_a_consumer_that_holds_acks_itself(world: Any, consumer: Consumer):
    await consumer.start()
    await rollouts(world, "p")
    meta = (await consumer.poll(hold=True))["data"]["meta_info"]
    assert (await pool_groups(world))["leased"] == 1
    assert await consumer.items() == []
    body = {"lease_id": meta["lease_id"]}
    assert (await consumer.post("/ack_rollout_data", body))[0] == 200
    assert (await consumer.post("/ack_rollout_data", body))[0] == 200
    assert (await pool_groups(world))["acked"] == 1
    assert (await consumer.post("/ack_rollout_data", {"lease_id": "none-1"}))[0] == 400
    assert (await consumer.post("/ack_rollout_data", {}))[0] == 400


async def test_held_groups_come_again_when_nobody_acks(world: Any, consumer: Consumer):
    await consumer.start()
    await rollouts(world, "p")
    meta = (await consumer.poll(hold=True))["data"]["meta_info"]
    world.port.pass_time(PoolConfig().default.lease_s)
    assert len(await consumer.items()) == 2
    assert (await consumer.post("/ack_rollout_data", {"lease_id": meta["lease_id"]}))[0] == 409


@pytest.mark.usefixtures("cluster")
async def test_a_pool_that_dies_during_an_answer_neither_loses_nor_repeats_it(
    tokenizer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    handle = start_data_pool(PoolConfig())
    pool = client_of([handle])
    app = create_app(GatewayConfig(), Wiring(), pool, tokenizer_of("chatml"))
    async with serving(app) as url:
        consumer = Consumer(url)
        await consumer.start()
        for k in range(4):
            item = written(uid=f"u{k}", instance_id=k // 2)
            assert (await consumer.post("/buffer/write", item))[0] == 200
        buffer = app.state.services.rollout_buffer
        encode = buffer.encode

        async def deadly(served: Any) -> bytes:
            if served.instance_id == 0:
                ray.kill(handle, no_restart=False)
            return await encode(served)  # type: ignore[no-any-return]

        monkeypatch.setattr(buffer, "encode", deadly)
        assert list(consumer.groups(await consumer.items())) == [0, 1]
        assert await consumer.items() == []
        groups = (await pool.get_statistics("train"))["groups"]
        assert (groups["acked"], groups["submitted"]) == (2, 2)


# -- rewards --------------------------------------------------------------------------------------


async def test_an_unscored_group_is_never_served_as_zero(world: Any, consumer: Consumer):
    await consumer.start()
    await rollout(world, "p", "a", 1.0)
    await rollout(world, "p", "b", None)
    await rollouts(world, "q", reward=0.0)
    assert list(consumer.groups(await consumer.items())) == ["q"]
    assert (await pool_groups(world))["drop_reasons"] == {"unscored": 1}
    assert consumer.meta[0]["avg_reward"] == 0.0
    assert consumer.meta[0]["dropped_groups"] == {"unscored": 1}


async def test_a_group_with_pictures_is_not_served_as_text(
    world: Any, consumer: Consumer, caplog: pytest.LogCaptureFixture
):
    await consumer.start(num_repeat_per_sample=1)
    png = b"of no model here"
    picture = Picture("a" * 64, 56, 56, 1, 4)
    step = Step(
        prompt_ids=[1, 5, 5, 5, 5, 2],
        response_ids=[3],
        trajectory_uid="shown-0",
        prompt_uid="shown",
        pictures=(picture,),
    )
    await world.pool.open_group("shown", 1)
    await world.pool.put_pictures("shown-0", {picture.digest: png}, prompt_uid="shown")
    await world.pool.submit_steps([step])
    await world.pool.complete_trajectory("shown-0", 1.0)
    await rollout(world, "q", "a", 1.0)
    assert [item["instance_id"] for item in await consumer.items()] == ["q"]
    assert (await pool_groups(world))["drop_reasons"] == {"pictures": 1}
    assert consumer.meta[0]["dropped_groups"] == {"pictures": 1}
    assert "'shown' has pictures and was dropped" in caplog.text


async def test_a_pool_that_filters_holds_an_unscored_group_until_it_is_scored(
    worlds: Callable[..., Any],
):
    world = await worlds(pool_config=FILTERED)
    consumer = Consumer(world.url)
    await consumer.start()
    await rollouts(world, "p", reward=None)
    assert await consumer.items() == []
    for i in range(2):
        item = {"trajectory_uid": f"p-{i}", "instance_id": "p", "reward": i}
        assert (await consumer.post("/buffer/write", item))[0] == 200
    assert [i["reward"] for i in await consumer.items()] == [0.0, 1.0]


# -- writing --------------------------------------------------------------------------------------


def written(**changes: Any) -> dict[str, Any]:
    """An item of a generator that sampled elsewhere."""
    return {
        "uid": "u0",
        "instance_id": 17,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "reward": 0.25,
        "extra_info": {"timestamp": "12.5", "temperature": 0.8},
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "response_length": 5,
        "loss_mask": [1, 1, 0, 1, 1],
        "rollout_log_probs": [-0.5, -0.25, 0.0, -1.0, -2.0],
        "weight_versions": ["3", 4],
        **changes,
    }


async def test_writing_a_recorded_trajectory_completes_it_with_its_reward(
    world: Any, consumer: Consumer
):
    await consumer.start(num_repeat_per_sample=1)
    world.say("fine")
    client = await world.client("t", "p")
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    await client.chat.completions.create(**ask)
    item = {
        "uid": 5,
        "instance_id": 17,
        "trajectory_uid": "t",
        "reward": 0.75,
        "messages": [{"role": "user", "content": "as the agent kept it"}],
        "extra_info": {"finish_reason": "length", "label": "x"},
    }
    for _ in range(2):  # slime's generator tries twice
        status, answer = await consumer.post("/buffer/write", item)
        assert status == 200
        assert answer == {
            "success": True,
            "message": "Data has been successfully written to buffer",
            "data": {"data": [item], "meta_info": "write to buffer"},
        }
    (got,) = await consumer.items()
    assert (got["uid"], got["instance_id"], got["reward"]) == ("5", 17, 0.75)
    assert got["messages"] == item["messages"]
    assert got["extra_info"]["finish_reason"] == "length"
    assert got["extra_info"]["label"] == "x"
    assert got["tokens"] == [i for s in world.stored("t") for i in (*s.prompt_ids, *s.response_ids)]
    assert (await consumer.post("/buffer/write", item))[0] == 200  # also after it was served
    assert (await consumer.post("/buffer/write", {**item, "reward": 1}))[0] == 410


async def test_a_trajectory_that_no_call_was_recorded_for_is_refused(
    world: Any, consumer: Consumer
):
    item = {"instance_id": 1, "trajectory_uid": "nobody", "reward": 1}
    status, answer = await consumer.post("/buffer/write", item)
    assert status == 400
    assert answer["error"]["param"] == "trajectory_uid"
    await consumer.post("/init_trajectory", {"trajectory_uid": "empty", "prompt_uid": "p"})
    assert (await consumer.post("/buffer/write", {**item, "trajectory_uid": "empty"}))[0] == 409


async def test_written_tokens_come_back_as_they_were(world: Any, consumer: Consumer):
    await consumer.start(num_repeat_per_sample="1")
    item = written()
    assert (await consumer.post("/buffer/write", item))[0] == 200
    first, second = world.stored("u0")
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.response_ids.tolist() == [3, 4]
    assert second.prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert (first.policy_version, second.policy_version) == (3, 4)
    assert second.parent_index == 0
    assert second.temperature == 0.8
    (got,) = await consumer.items()
    for name in ("uid", "instance_id", "messages", "reward", "tokens", "response_length"):
        assert got[name] == item[name]
    for name in ("loss_mask", "rollout_log_probs"):
        assert got[name] == item[name]
    assert got["weight_versions"] == ["3", "4"]
    assert got["extra_info"]["timestamp"] == "12.5"
    assert got["branches"] == []


async def test_unknown_log_probs_stay_unknown(world: Any, consumer: Consumer):
    await consumer.start(num_repeat_per_sample="1")
    item = written(loss_mask=None, weight_versions=["default"])
    del item["rollout_log_probs"]
    assert (await consumer.post("/buffer/write", item))[0] == 200
    (got,) = await consumer.items()
    assert got["rollout_log_probs"] is None
    assert got["loss_mask"] == [1] * 5


async def test_an_instance_that_is_called_as_the_next_group_of_another_has_its_own(
    world: Any, consumer: Consumer
):
    await consumer.start(num_repeat_per_sample="1")
    for uid, instance in (("a", 17), ("b", 17), ("c", "17#1"), ("d", "17#1")):
        item = written(uid=uid, instance_id=instance)
        assert (await consumer.post("/buffer/write", item))[0] == 200
    assert len({step.prompt_uid for step in world.stored()}) == 4


async def test_written_items_fill_one_group_after_the_other(world: Any, consumer: Consumer):
    await consumer.start()
    answers = await asyncio.gather(
        *(consumer.post("/buffer/write", written(uid=f"u{i}")) for i in range(5))
    )
    assert {status for status, _ in answers} == {200}
    groups = consumer.groups(await consumer.items())
    assert list(groups) == [17, "17#1"]
    # The fifth waits for a sixth, and a group that was served takes none.
    assert await consumer.items() == []
    assert (await consumer.post("/buffer/write", written(uid="u5")))[0] == 200
    assert list(consumer.groups(await consumer.items())) == ["17#2"]


async def test_an_item_for_a_group_that_was_served_begins_the_next(world: Any, consumer: Consumer):
    await rollouts(world, "17")
    await consumer.start()
    assert len(await consumer.items()) == 2
    for i in range(2):
        for _ in range(2):
            assert (await consumer.post("/buffer/write", written(uid=f"u{i}")))[0] == 200
    (items,) = consumer.groups(await consumer.items()).values()
    assert [i["uid"] for i in items] == ["u0", "u1"]


async def test_a_repeated_write_is_one_rollout_and_other_content_a_conflict(
    world: Any, consumer: Consumer
):
    await consumer.start()
    for _ in range(3):
        assert (await consumer.post("/buffer/write", written()))[0] == 200
    other = written(tokens=[9, 2, 3, 4, 5, 6, 7])
    assert (await consumer.post("/buffer/write", other))[0] == 409
    assert (await consumer.post("/buffer/write", written(reward=1)))[0] == 410
    assert (await consumer.post("/buffer/write", written(uid="u1")))[0] == 200
    assert [i["uid"] for i in await consumer.items()] == ["u0", "u1"]


async def test_a_write_that_failed_keeps_its_place(
    world: Any, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
):
    await consumer.start()
    for failure in ("before", "after"):
        world.port.failures.append(failure)
        assert (await consumer.post("/buffer/write", written()))[0] == 503
    assert (await consumer.post("/buffer/write", written()))[0] == 200
    assert (await consumer.post("/buffer/write", written(uid="u1")))[0] == 200
    assert list(consumer.groups(await consumer.items())) == [17]


async def test_a_gateway_that_was_restarted_goes_on_with_the_groups_that_it_filled(
    worlds: Callable[..., Any], tmp_path: Path
):
    world = await worlds(run_dir=tmp_path)
    consumer = Consumer(world.url)
    await consumer.start(skip_instance_ids=[18])
    for uid in ("u0", "u1", "u2"):
        assert (await consumer.post("/buffer/write", written(uid=uid)))[0] == 200
    world = await worlds(run_dir=tmp_path, pool=world.pool)
    consumer = Consumer(world.url)
    items = [written(uid=uid) for uid in ("u2", "u0", "u3", "u4", "u5")]
    items += [written(uid=uid, instance_id=18) for uid in ("v0", "v1")]
    answers = await asyncio.gather(*(consumer.post("/buffer/write", item) for item in items))
    assert {status for status, _ in answers} == {200}
    groups = consumer.groups(await consumer.items())
    assert list(groups) == [17, "17#1", "17#2"]
    uids = [{item["uid"] for item in group} for group in groups.values()]
    assert uids[0] == {"u0", "u1"}
    assert set.union(*uids) == {f"u{i}" for i in range(6)}
    assert statistics(world)["dropped_groups"] == {"skip_instance_ids": 1}


async def test_an_instance_that_was_skipped_before_a_restart_is_served_after_it(
    worlds: Callable[..., Any], tmp_path: Path
):
    world = await worlds(run_dir=tmp_path)
    await Consumer(world.url).start(skip_instance_ids=[17])
    for again in (False, True):
        consumer = Consumer(world.url)
        for i in range(2):
            await consumer.post("/buffer/write", written(uid=f"u{again}{i}"))
        assert len(await consumer.items()) == 2 * again
        world = await worlds(run_dir=tmp_path, pool=world.pool)


async def test_a_memory_of_the_last_start_that_is_damaged_is_told_and_begun_anew(
    worlds: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    world = await worlds(run_dir=tmp_path)
    await Consumer(world.url).start()
    file = tmp_path / LAST_START
    file.write_text(file.read_text().replace("2", "3", 1))
    world = await worlds(run_dir=tmp_path, pool=world.pool)
    assert statistics(world)["num_repeat_per_sample"] is None
    assert str(file) in caplog.text
    assert "POST /start_rollout" in caplog.text


async def test_a_write_without_a_uid_that_found_no_room_takes_no_place_in_a_group(
    worlds: Callable[..., Any],
):
    full = PoolConfig(default=ChannelConfig(max_queue_size=1, overflow="block"))
    world = await worlds(pool_config=full, queue_timeout_s=0.1)
    consumer = Consumer(world.url)
    await consumer.start()
    for uid in ("u0", "u1"):
        assert (await consumer.post("/buffer/write", written(uid=uid)))[0] == 200
    item = written(uid=None, instance_id=18)
    for _ in range(3):
        assert (await consumer.post("/buffer/write", item))[0] == 503
    assert list(consumer.groups(await consumer.items())) == [17]
    for _ in range(2):
        assert (await consumer.post("/buffer/write", item))[0] == 200
    assert list(consumer.groups(await consumer.items())) == [18]


# -- bad payloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"num_repeat_per_sample": None}, "num_repeat_per_sample"),
        ({"num_repeat_per_sample": "0"}, "num_repeat_per_sample"),
        ({"num_repeat_per_sample": "eight"}, "num_repeat_per_sample"),
        pytest.param({"num_repeat_per_sample": "9" * 5000}, "num_repeat_per_sample", id="long"),
        ({"num_repeat_per_sample": True}, "num_repeat_per_sample"),
        ({"skip_instance_ids": "all"}, "skip_instance_ids"),
        ({"skip_instance_ids": [1, None]}, "skip_instance_ids[1]"),
        ({"task_type": "other"}, "task_type"),
        ({"task_type": None}, "task_type"),
    ],
)
async def test_a_bad_start_is_refused_by_field(
    world: Any, consumer: Consumer, change: dict[str, Any], param: str
):
    status, answer = await consumer.post("/start_rollout", {"num_repeat_per_sample": "2", **change})
    assert status == 400
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"instance_id": None}, "instance_id"),
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": [1]}, "instance_id"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": 2e9}, "reward"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"extra_info": []}, "extra_info"),
        ({"tokens": None, "messages": []}, "messages"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, "2"]}, "tokens"),
        ({"tokens": [1, True, 3, 4, 5, 6]}, "tokens"),
        ({"tokens": [1, -1, 3, 4, 5, 6]}, "tokens"),
        ({"tokens": [1, 2**31, 3, 4, 5, 6]}, "tokens"),
        ({"response_length": None}, "response_length"),
        ({"response_length": 0}, "response_length"),
        ({"response_length": 7}, "response_length"),
        ({"loss_mask": [1, 1]}, "loss_mask"),
        ({"loss_mask": [0, 0, 0, 0, 0]}, "loss_mask"),
        ({"loss_mask": [1, 2, 0, 1, 1]}, "loss_mask"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs"),
        ({"rollout_log_probs": [1.0, 1.0, 0.0, 1.0, 1.0]}, "tokens"),
        ({"weight_versions": None}, "weight_versions"),
        ({"weight_versions": []}, "weight_versions"),
        ({"weight_versions": ["v1"]}, "weight_versions"),
        ({"weight_versions": ["9" * 40]}, "weight_versions"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
    ],
)
async def test_a_bad_item_is_refused_by_field_and_stores_nothing(
    world: Any, consumer: Consumer, change: dict[str, Any], param: str
):
    await consumer.start()
    status, answer = await consumer.post("/buffer/write", written(**change))
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert (await pool_groups(world))["submitted"] == 0


async def test_an_item_with_nothing_to_train_is_refused_with_the_ways_to_do_it(
    world: Any, consumer: Consumer
):
    item = {k: written()[k] for k in ("uid", "instance_id", "reward", "extra_info")}
    status, answer = await consumer.post("/buffer/write", item)
    assert status == 400
    message = answer["error"]["message"]
    for word in ("trajectory_uid", "/init_trajectory", "tokens", "response_length", "messages"):
        assert word in message
    missing = {k: v for k, v in item.items() if k != "reward"}
    assert (await consumer.post("/buffer/write", missing))[1]["error"]["param"] == "reward"


async def test_a_body_that_is_no_object_is_refused(world: Any, consumer: Consumer):
    for path in ("/start_rollout", "/buffer/write", "/get_rollout_data", "/ack_rollout_data"):
        assert (await consumer.post(path, [1]))[0] == 400
    assert (await consumer.post("/get_rollout_data", {"hold": "yes"}))[0] == 400


# -- properties -----------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> list[Step]:
    """Trajectories with forks, roots and, now and then, a parent that does not fit."""
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.sampled_from(steps)) if steps else None
        before = [] if parent is None else [*parent.prompt_ids, *parent.response_ids]
        if before and draw(st.integers(0, 5)) == 0:
            before[-1] += 1
        new = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        response = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        log_probs = [-float(index) - i / 8 for i in range(len(response))]
        steps.append(
            Step(
                prompt_ids=[*before, *new],  # type: ignore[arg-type]
                response_ids=response,  # type: ignore[arg-type]
                trajectory_uid="t",
                prompt_uid="p",
                step_index=index,
                policy_version=index,
                rollout_log_probs=log_probs,  # type: ignore[arg-type]
                parent_index=None if parent is None else parent.step_index,
            )
        )
    return steps


@given(trees())
def test_each_sampled_token_is_trained_in_exactly_one_row(steps: list[Step]):
    trained: list[tuple[int, float]] = []
    for row in rows(steps):
        assert row.steps[-1].step_index <= steps[-1].step_index
        response = row.tokens[len(row.tokens) - len(row.loss_mask) :]
        assert row.log_probs is not None
        trained += [
            (int(t), float(lp))
            for t, lp, m in zip(response, row.log_probs, row.loss_mask, strict=True)
            if m
        ]
        for before, after in pairwise(row.steps):
            n = before.n_tokens
            assert after.prompt_ids[:n].tolist() == [*before.prompt_ids, *before.response_ids]
        last = row.steps[-1]
        assert row.tokens.tolist() == [*last.prompt_ids, *last.response_ids]
    assert sorted(trained) == sorted(
        (int(t), float(lp))
        for s in steps
        for t, lp in zip(s.response_ids, s.rollout_log_probs, strict=True)  # type: ignore[arg-type]
    )
    assert rows(steps)[0].steps[-1] is steps[-1]


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12).filter(
        lambda r: any(sampled for _, sampled in r)
    ),
)
def test_a_written_sample_comes_back_as_it_was(prompt: list[int], response: list[Any]):
    mask = [int(sampled) for _, sampled in response]
    item = {
        "instance_id": 1,
        "reward": 0.0,
        "tokens": [*prompt, *(t for t, _ in response)],
        "response_length": len(response),
        "loss_mask": mask,
        "rollout_log_probs": [-0.5 * m for m in mask],
        "weight_versions": ["2"],
    }
    steps = tuple(Item.read(item)._of_tokens(truncated=False))
    trajectory = Trajectory("t", "p", steps)
    (row,) = rows(trajectory.steps)
    # Leading zeros are prompt, and behind the last sampled token nothing is kept.
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    assert row.tokens.tolist() == item["tokens"][: len(prompt) + last]
    assert row.loss_mask.tolist() == mask[first:last]
    assert row.log_probs is not None
    assert row.log_probs.tolist() == item["rollout_log_probs"][first:last]


def test_metadata_that_is_no_json_does_not_keep_a_group_from_being_served(
    tokenizer_of: Callable[..., Any],
):
    from stepwell.gateway.slime_buffer.buffer import RolloutBuffer, Served

    step = Step(
        prompt_ids=[1],
        response_ids=[2],
        trajectory_uid="t",
        prompt_uid="p",
        step_index=0,
        policy_version=0,
        reward=1.0,
    )  # type: ignore[arg-type]
    odd = {"big": 2**80, "half": "\ud800", "object": object()}
    trajectory = Trajectory("t", "p", (step,), metadata=odd)
    prompts = Prompts(GatewayConfig(), ChatRenderer(tokenizer_of("chatml")), None)  # type: ignore[arg-type]
    turns = TurnMessages(GatewayConfig())
    pool_access = PoolAccess(None, GatewayConfig())  # type: ignore[arg-type]
    buffer = RolloutBuffer(GatewayConfig(), pool_access, None, prompts, turns, None, ())  # type: ignore[arg-type]
    group_ = Group("p", (trajectory,))
    item = json.loads(buffer._encode(Served(group_, "p", (trajectory,))))
    assert item["tokens"] == [1, 2]
    assert make_item(trajectory, group_, "p", buffer._tokenizer)["reward"] == 1.0

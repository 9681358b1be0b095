"""Metrics at `/metrics`, parsed with the parser of Prometheus's own client."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from stepwell.datapool.inspect.metrics import MOST_VALUES, POOL, Family, families
from stepwell.datapool.types import Step
from stepwell.gateway.metrics import ENGINES, GATEWAY, POOL_UP
from tests.gateway.test_traffic import TRAJECTORY, agents, user

__all__ = ["agents"]

OURS = (*GATEWAY, *ENGINES, POOL_UP, *POOL)


async def scrape(world: Any, accept: str = "*/*", key: str | None = None) -> tuple[Any, str]:
    headers = {"accept": accept} | ({} if key is None else {"authorization": f"Bearer {key}"})
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{world.url}/metrics") as answer,
    ):
        assert answer.status == 200
        return answer.headers["content-type"], await answer.text()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def of(found: Any, name: str, **labels: str) -> float:
    value: float = found[name, frozenset(labels.items())]
    return value


async def test_the_page_tells_of_calls_engines_and_the_pool(world: Any, agents: Any) -> None:
    agent = agents(world)
    before = samples((await scrape(world))[1])
    assert of(before, "stepwell_gateway_calls_total") == 0
    world.say("fine", version="3")
    await agent.say(user("hi"))
    done = {"trajectory_uid": agent.headers[TRAJECTORY], "reward": 1}
    await agent.post("/v1/complete_trajectory", done)
    await world.pool.drop_group((await world.pool.list_groups()).items[0].prompt_uid, "too long")
    content_type, text = await scrape(world)
    assert content_type.startswith("text/plain; version=")
    found = samples(text)
    assert of(found, "stepwell_gateway_calls_total") == 1
    assert of(found, "stepwell_gateway_steps_stored_total") == 1
    assert of(found, "stepwell_gateway_trajectories_open") == 0
    assert 0 < of(found, "stepwell_gateway_added_latency_seconds", quantile="0.99") < 5
    engine = world.engine.url
    assert of(found, "stepwell_engine_up", engine=engine) == 1
    assert of(found, "stepwell_engine_policy_version", engine=engine) == 3
    assert of(found, "stepwell_pool_up") == 1
    dropped = {"channel": "train", "reason": "too long"}
    assert of(found, "stepwell_pool_groups_dropped_total", **dropped) == 1
    assert of(found, "stepwell_pool_groups", channel="train", state="ready") == 0
    assert (
        of(found, "stepwell_pool_steps_submitted_total", channel="train", outcome="accepted") == 1
    )
    assert of(found, "process_resident_memory_bytes") > 0


async def test_names_have_their_unit_a_help_text_and_the_labels_of_the_table(world: Any) -> None:
    _, text = await scrape(world)
    shown = {f.name: f for f in text_string_to_metric_families(text)}
    for family in OURS:
        assert re.fullmatch(r"stepwell_(gateway|engines?|pool)_[a-z_]+", family.name)
        assert not family.name.endswith(("_total", "_s", "_ms"))
        assert shown[family.name].documentation == family.help
        assert shown[family.name].type == family.kind
        for sample in shown[family.name].samples:
            assert set(sample.labels) == set(family.labels)
    assert len({family.name for family in OURS}) == len(OURS)


async def test_a_scraper_that_asks_for_openmetrics_gets_it(world: Any) -> None:
    content_type, text = await scrape(world, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert {f.name for f in parse_openmetrics(text)} >= {family.name for family in OURS}


async def test_the_page_comes_without_the_pool_and_says_so(world: Any) -> None:
    world.port.is_away = True
    found = samples((await scrape(world))[1])
    assert of(found, "stepwell_pool_up") == 0
    assert of(found, "stepwell_gateway_calls_total") == 0
    assert not any(name.startswith("stepwell_pool_groups") for name, _ in found)


async def test_channels_that_agents_name_do_not_make_the_page_grow(world: Any) -> None:
    for i in range(2 * MOST_VALUES):
        step = Step(prompt_ids=[1], response_ids=[2], prompt_uid="p", trajectory_uid="t")
        await world.pool.submit_step(step, channel=f"c{i}")
    found = samples((await scrape(world))[1])
    channels = {dict(labels)["channel"] for name, labels in found if name == "stepwell_pool_steps"}
    assert len(channels) == MOST_VALUES + 1
    steps = [value for (name, _), value in found.items() if name == "stepwell_pool_steps"]
    assert sum(steps) == 2 * MOST_VALUES
    assert of(found, "stepwell_pool_steps", channel="other") > MOST_VALUES - 5


async def test_metrics_need_the_admin_key_where_there_are_keys(worlds: Any) -> None:
    key = "an-admin-key-of-32-characters-00"
    world = await worlds(admin_keys=[key], agent_keys={"a": {"key": "an-agents-key-of-this"}})
    await scrape(world, key=key)
    async with aiohttp.ClientSession() as session:
        for headers, status in (({}, 401), ({"x-api-key": "an-agents-key-of-this"}, 403)):
            async with session.get(f"{world.url}/metrics", headers=headers) as answer:
                assert answer.status == status


def test_a_count_that_is_unknown_has_no_sample() -> None:
    table = [Family("stepwell_pool_x", "gauge", "x", dict, ("channel", "b"))]
    (metric,) = families(table, {"train": {"one": 1, "two": None}, "val": None})
    assert [(s.labels, s.value) for s in metric.samples] == [({"channel": "train", "b": "one"}, 1)]


async def test_rewards_that_are_not_kept_are_counted_and_answered_with_why(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    uids = []
    for prompt in ("trained", "dropped", "leased"):
        await agent.say(user("hi"), under=f"/t-{prompt}/{prompt}")
        uids.append(agent.headers[TRAJECTORY])
        done = {"trajectory_uid": uids[-1], "reward": 1}
        assert (await agent.post("/v1/complete_trajectory", done))[1]["outcome"] == "complete"
        if prompt == "trained":
            await world.pool.ack((await world.pool.lease_batch(1)).lease_id)
        elif prompt == "dropped":
            await world.pool.drop_group(prompt, "too long")
    await world.pool.lease_batch(1)

    why = ["its group was trained", "its group was dropped (too long)"]
    why.append("its group was leased by a trainer before")
    for uid, reason in zip(uids, why, strict=True):
        answer = {"trajectory_uid": uid, "outcome": "late", "accepted": False, "reason": reason}
        reward = {"trajectory_uid": uid, "reward": 0.5}
        assert await agent.post("/v1/rewards", reward) == (200, answer)
        again = {"trajectory_uid": uid, "reward": 0.5}
        status, refused = await agent.post("/v1/complete_trajectory", again)
        assert status == 409
        assert "already completed with outcome reward 1.0" in refused["error"]["message"]
    status, _ = await agent.post("/t-leased/leased/v1/complete_trajectory", {"reward": 0.5})
    assert status == 410
    assert (await agent.post("/t-leased/leased/v1/feedback", {"label": "bad"}))[0] == 410
    await agent.post("/init_trajectory", {"trajectory_uid": "silent", "prompt_uid": "q"})
    _, silent = await agent.post("/silent/q/v1/complete_trajectory", {"reward": 1})
    assert (silent["outcome"], silent["accepted"]) == ("aborted", False)

    found = samples((await scrape(world))[1])
    name = "stepwell_gateway_rewards_not_kept_total"
    assert of(found, name, reason="late") == 4
    assert of(found, name, reason="closed") == 4
    assert of(found, name, reason="unrecorded") == 1

"""Dashboard of what left the pool: the three questions of somebody who looks, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.ops import AbortTrajectory
from stepwell.datapool.types import TRAIN, Step
from stepwell.gateway.ui import dashboard
from tests.ui.demo import Demo, archive_all, demo, fill, in_order, show_picture

BASE = "chain_sum/1001"


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Demo]:
    async with demo(tmp_path) as served:
        await fill(served, groups=3)
        lease = await served.pool.lease_batch(1, timeout_s=5)
        await served.pool.ack(lease.lease_id)
        await served.pool.drop_group("chain_sum/1002", "too easy")
        yield served


@pytest.fixture
async def http(shown: Demo) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{shown.url}/ui/api/", timeout=30) as client:
        yield client


async def ok(http: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("is_archived", [False, True])
async def test_why_was_it_dropped_and_what_did_the_model_say(
    shown: Demo, http: httpx.AsyncClient, is_archived: bool
) -> None:
    if is_archived:
        await archive_all(shown)
    led = await ok(http, "find", uid="chain_sum/1002:1")
    assert led["page"] == "trajectory"
    told = await ok(http, "trajectory", trajectory_uid=led["params"]["uid"])
    assert told["archived"]["fate"] == "its group was dropped (too easy)"
    assert told["reward"] is not None
    said = [m["content"] for m in told["steps"][-1]["messages"]]
    assert any(str(text).startswith("The answer is") for text in said)
    tokens = await ok(http, "tokens", trajectory_uid=led["params"]["uid"], index=0)
    assert tokens["ids"]


async def test_which_prompts_never_get_a_reward(shown: Demo, http: httpx.AsyncClient) -> None:
    await archive_all(shown)
    rows = (await ok(http, "prompts", which="never"))["items"]
    assert all(row["rewarded"] == 0 for row in rows)
    everything = (await ok(http, "prompts"))["items"]
    assert everything
    for order, name in {"tries": "tries", "mean": "mean", "first": "first"}.items():
        listed = await ok(http, "prompts", order=order, ascending="1")
        values = [row[name] for row in listed["items"]]
        assert values == in_order(values, descending=False)
        assert len(values) == len(everything)
    wrong = await http.get("prompts", params={"order": "size"})
    assert wrong.status_code == 400
    assert "order is 'size'; there are time, tries" in wrong.text


async def test_prompts_come_in_pages(
    shown: Demo, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await archive_all(shown)
    everything = (await ok(http, "prompts", order="first"))["items"]
    monkeypatch.setattr(dashboard, "PAGE", 1)
    seen, cursor = [], None
    while True:
        page = await ok(
            http, "prompts", order="first", **({} if cursor is None else {"cursor": cursor})
        )
        seen += page["items"]
        if (cursor := page["cursor"]) is None:
            break
    assert seen == everything
    assert len(seen) > 1


async def test_prompts_that_come_meanwhile_neither_double_nor_skip_others(
    shown: Demo, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await archive_all(shown)
    every = [row["prompt"] for row in (await ok(http, "prompts"))["items"]]
    monkeypatch.setattr(dashboard, "PAGE", 1)
    seen, cursor = [], ""
    for n in range(len(every)):
        page = await ok(http, "prompts", cursor=cursor)
        seen += [row["prompt"] for row in page["items"]]
        cursor = page["cursor"]
        await answered(shown, f"new-{n}")
        await shown.pool.drop_group(f"new-{n}", "enough")
        await archive_all(shown)
    assert (seen, cursor) == (every, None)
    for wrong in ("100", "zz", (await ok(http, "prompts", order="mean"))["cursor"]):
        refused = await http.get("prompts", params={"cursor": wrong})
        assert refused.status_code == 400
        assert "pass that of the page before" in refused.text


@pytest.mark.parametrize("is_archived", [False, True])
async def test_what_has_left_another_channel_is_of_that_one(
    shown: Demo, http: httpx.AsyncClient, is_archived: bool
) -> None:
    await answered(shown, "judged", "val")
    await shown.pool.drop_group("judged", "enough", "val")
    if is_archived:
        await archive_all(shown)
    told = await ok(http, "trajectory", trajectory_uid="judged")
    assert told["archived"]["channel"] == told["channel"] == "val"


async def answered(shown: Demo, uid: str, channel: str = TRAIN) -> None:
    """A trajectory of a group of its own, with one step."""
    step = Step(
        prompt_ids=[1],  # type: ignore[arg-type]
        response_ids=[2],  # type: ignore[arg-type]
        trajectory_uid=uid,
        prompt_uid=uid,
        metadata={"messages": [{"role": "user", "content": f"question of {uid}"}]},
    )
    await shown.pool.submit_steps([step], channel)
    await shown.pool.complete_trajectory(uid, 1.0, channel=channel)


async def test_a_group_of_which_only_what_came_late_is_kept_has_its_page(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    await answered(shown, "late")
    await shown.pool.drop_group("late", "enough")
    await archive_all(shown)
    for index in (1, 2):
        step = Step(
            prompt_ids=[1, 2, 3],  # type: ignore[arg-type]
            response_ids=[4],  # type: ignore[arg-type]
            trajectory_uid="late",
            prompt_uid="late",
            step_index=index,
        )
        assert await shown.pool.submit_step(step) == "late"
        await archive_all(shown)
    files = sorted((shown.run_dir / "archive" / "trajectories").iterdir())
    for path in files[:-2]:  # as they go when they are too old
        path.unlink()
    assert ArchiveReader(shown.run_dir / "archive").check() == []
    group = await ok(http, "group", prompt_uid="late")
    assert [row["state"] for row in group["trajectories"]] == ["late"]


async def test_archived_prompts_have_a_kind(shown: Demo, http: httpx.AsyncClient) -> None:
    await archive_all(shown)
    everything = (await ok(http, "prompts"))["items"]
    assert {row["kind"] for row in everything} <= {"never", "mixed", "always"}


async def test_a_uid_its_beginning_and_a_groups_uid_lead_somewhere(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    await archive_all(shown)
    assert (await ok(http, "find", uid="chain_sum/1002"))["page"] == "group"
    group = await ok(http, "group", prompt_uid="chain_sum/1002")
    assert group["archived"]
    assert len(group["trajectories"]) == 4
    assert group["prefixes"]["tree"]
    rewards = {row["trajectory_uid"]: row["reward"] for row in group["trajectories"]}
    assert labels_of(group["prefixes"]["roots"]) == rewards
    begun = await ok(http, "find", uid="chain_sum/1002:")
    assert len(begun["items"]) == 4
    unknown = await http.get("find", params={"uid": "nothing"})
    assert unknown.status_code == 404


def labels_of(nodes: Any) -> dict[str, float | None]:
    """Rewards at the ends of a prefix tree, by uid."""
    found = {end["trajectory_uid"]: end["reward"] for node in nodes for end in node["ends"]}
    for node in nodes:
        found |= labels_of(node["children"])
    return found


async def test_the_beginning_of_a_live_uid_leads_there(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    await shown.pool.open_trajectory("live-conversation", "live-group")
    found = await ok(http, "find", uid="live-conv")
    assert found == {"page": "trajectory", "params": {"uid": "live-conversation"}}
    assert (await ok(http, "find", uid="live-g"))["params"]["uid"] == "live-conversation"
    several = (await ok(http, "find", uid="chain_sum/100"))["items"]
    assert {row["prompt_uid"] for row in several} >= {"chain_sum/1001", "chain_sum/1002"}
    assert all(row["first"].startswith("State the final answer") for row in several)
    assert "its group was dropped (too easy)" in {row["fate"] for row in several}


async def test_a_group_that_waits_to_be_archived_has_its_page(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    assert (await ok(http, "find", uid="chain_sum/1002"))["page"] == "group"
    group = await ok(http, "group", prompt_uid="chain_sum/1002")
    assert group["trajectories"][0]["fate"] == "its group was dropped (too easy)"
    assert len(group["last"]) == 4


async def test_an_archived_group_that_is_called_as_a_trajectory_has_its_page(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    """One rollout is called as its own group, another one as another group."""
    for uid, prompt in (("task", "task"), ("task-2", "task"), ("chain_sum/1002", "other")):
        step = Step(
            prompt_ids=[1],
            response_ids=[2],
            trajectory_uid=uid,
            prompt_uid=prompt,
            rollout_log_probs=[-0.5],
        )
        await shown.pool.submit_steps([step])
        await shown.pool.complete_trajectory(uid, 1.0)
    for prompt in ("task", "other"):
        await shown.pool.drop_group(prompt, "enough")
    await archive_all(shown)
    for prompt, n in (("task", 2), ("chain_sum/1002", 4), ("other", 1)):
        group = await ok(http, "group", prompt_uid=prompt)
        assert len(group["trajectories"]) == len(group["last"]) == n


async def test_an_aborted_trajectory_has_its_page_without_an_archive(tmp_path: Path) -> None:
    async with demo(tmp_path, archived=False) as served:
        await fill(served, groups=3)
        uid = "chain_sum/1002:3"
        await served.pool.call(AbortTrajectory(uid, "timeout"))
        async with httpx.AsyncClient(base_url=f"{served.url}/ui/api/", timeout=30) as http:
            assert (await ok(http, "find", uid=uid))["page"] == "trajectory"
            told = await ok(http, "trajectory", trajectory_uid=uid)
            assert told["archived"]["fate"] == "aborted (timeout); its group is in the pool"
            assert told["steps"][0]["messages"]
            await served.pool.drop_group("chain_sum/1002", "too easy")
            gone = await http.get("find", params={"uid": uid})
            assert gone.status_code == 404
            assert "nothing is kept any more: it was aborted (timeout)" in gone.text
            other = await http.get("find", params={"uid": "chain_sum/1002:0"})
            assert "nothing is kept any more: its group was dropped (too easy)" in other.text


async def test_what_has_gone_is_listed_with_its_first_message(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    waits = (await ok(http, "events", kinds="dropped"))["items"]
    assert {event["first"] for event in waits} == {None}
    await archive_all(shown)
    gone = (await ok(http, "events", kinds="dropped"))["items"]
    assert gone
    assert all(event["first"].startswith("State the final answer") for event in gone)
    for order in ("time", "first", "uid", "kind", "reason", "complete", "returned", "prompt"):
        for ascending in ("", "1"):
            listed = await ok(http, "events", kinds="dropped", order=order, ascending=ascending)
            same = {event["number"] for event in listed["items"]}
            assert same == {event["number"] for event in gone}
            assert listed["looked"] is None
    by_prompt = (await ok(http, "events", order="prompt", ascending="1"))["items"]
    prompts = [event["prompt_uid"] for event in by_prompt]
    assert prompts == sorted(prompts)


async def test_a_list_is_searched_sorted_and_filtered(shown: Demo, http: httpx.AsyncClient) -> None:
    await archive_all(shown)
    rows = (await ok(http, "archive"))["items"]
    assert rows
    assert all(row["first"].startswith("State the final answer") for row in rows)
    assert [r["time"] for r in rows] == sorted((r["time"] for r in rows), reverse=True)
    found = await ok(http, "archive", search='"the answer is"', query="left == 'dropped'")
    assert {row["prompt_uid"] for row in found["items"]} <= {"chain_sum/1000", "chain_sum/1002"}
    by_reward = (await ok(http, "archive", order="reward"))["items"]
    rewards = [row["reward"] for row in by_reward]
    assert rewards == in_order(rewards, descending=True)
    assert len(rewards) == len(rows), "those without a reward come last, and are not lost"
    for order in ("state", "first", "last", "uid", "turns", "tokens", "version"):
        for ascending in ("", "1"):
            listed = await ok(http, "archive", order=order, ascending=ascending)
            assert {row["uid"] for row in listed["items"]} == {row["uid"] for row in rows}
    assert listed["items"][0]["version"] == min(row["version"] for row in rows)
    wrong = await http.get("archive", params={"query": "rewards < 1"})
    assert wrong.status_code == 400
    assert "no such column" in wrong.text


async def test_what_is_deleted_by_the_gateway_is_deleted_from_the_archive_too(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    await archive_all(shown)
    uid = "chain_sum/1002:1"
    answer = await http.post("delete", json={"trajectory_uid": uid})
    assert answer.status_code == 200, answer.text
    assert (await ok(http, "find", uid=uid))["deleted"]["uid"] == uid
    assert (await ok(http, "find", uid=uid[:-1]))["deleted"]["uid"].startswith(uid[:-1])
    gone = await http.get("trajectory", params={"trajectory_uid": uid})
    assert gone.status_code == 404
    assert "was deleted at" in gone.text
    files = (shown.run_dir / "archive").rglob("*.parquet")
    assert uid.encode() not in b"".join(path.read_bytes() for path in files)
    assert (await ok(http, "find", uid="chain_sum/1002:0"))["deleted"], "its group goes with it"


ODD_MESSAGES = (5, "text", {"role": "user"}, [5], [{"role": "user", "content": {"x": 1}}])
ODD_CALLS = {"role": "assistant", "content": "Two.", "tool_calls": 5}


async def test_messages_of_any_shape_hold_up_neither_archive_nor_lists(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    for n, messages in enumerate((*ODD_MESSAGES, [ODD_CALLS])):
        ids = {"prompt_ids": [1], "response_ids": [2], "rollout_log_probs": [-0.5]}
        names = {"trajectory_uid": f"odd-{n}", "prompt_uid": f"odd-{n}"}
        step = Step(**ids, **names, metadata={"messages": messages})  # type: ignore[arg-type]
        await shown.pool.submit_steps([step])
        await shown.pool.complete_trajectory(f"odd-{n}", 1.0)
    listed = await ok(http, "trajectories")
    assert "Two." in {row["last"] for row in listed["items"]}
    for n in range(len(ODD_MESSAGES) + 1):
        await shown.pool.drop_group(f"odd-{n}", "enough")
    await archive_all(shown)
    assert len((await ok(http, "archive", search="Two"))["items"]) == 1
    for n in range(len(ODD_MESSAGES) + 1):
        assert (await ok(http, "trajectory", trajectory_uid=f"odd-{n}"))["archived"]


async def test_a_late_reward_is_shown_with_its_trajectory(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    assert await shown.pool.set_reward("chain_sum/1002:0", 0.5) == "late"
    await archive_all(shown)
    told = await ok(http, "trajectory", trajectory_uid="chain_sum/1002:0")
    (late,) = told["archived"]["feedback"]
    assert late["reward"] == 0.5
    assert "dropped (too easy)" in late["why"]


async def test_a_picture_is_shown_while_the_pool_has_it_and_out_of_the_archive(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    digest = await show_picture(shown, "seen")
    asked = {"trajectory_uid": "seen", "digest": digest}
    live = await http.get("picture", params=asked)
    await shown.pool.drop_group("seen", "enough")
    await archive_all(shown)
    kept = await http.get("picture", params=asked)
    assert (live.status_code, kept.status_code) == (200, 200)
    assert kept.content == live.content
    assert kept.content.startswith(b"\x89PNG")
    told = await ok(http, "trajectory", trajectory_uid="seen")
    (part, _) = told["steps"][0]["messages"][0]["content"]
    assert part["digest"] == digest
    for wrong in ({**asked, "digest": "0" * 64}, {**asked, "trajectory_uid": "chain_sum/1002:1"}):
        answer = await http.get("picture", params=wrong)
        assert answer.status_code == 404, answer.text
        assert "is of no picture of trajectory" in answer.text
    await http.post("delete", json={"trajectory_uid": "seen"})
    assert (await http.get("picture", params=asked)).status_code == 404

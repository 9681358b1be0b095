"""The dashboard over HTTP: who may look, what the answers say, what marks do. In a browser:
`in_browser.py` (make test-ui)."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
from yarl import URL

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.files.export import read
from stepwell.datapool.sealed import sealed
from stepwell.datapool.types import Step, Trajectory
from stepwell.gateway.endpoints import ENDPOINTS
from stepwell.gateway.openapi import described
from stepwell.gateway.ui import dashboard
from stepwell.gateway.ui.dashboard import as_json
from stepwell.gateway.ui.router import STATIC
from stepwell.gateway.ui.run_folder import RunFolder
from stepwell.gateway.ui.trajectories import prefixes
from stepwell.trainer.rollout.gateway import GatewayClient
from tests.ui.demo import HOSTILE, Demo, demo, fill, in_order, train, write_run

ADMIN, AGENT = "an-admin-key-for-tests", "an-agent-key-for-tests"


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Demo]:
    folder = tmp_path / "runs" / "shown"  # the runs beside it are listed: no other test's folders
    folder.mkdir(parents=True)
    async with demo(folder) as served:
        await fill(served, groups=3)
        await train(served, steps=12)
        yield served


@pytest.fixture
async def http(shown: Demo) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{shown.url}/ui/api/") as client:
        yield client


async def ok(http: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def posted(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- who may look --------------------------------------------------------------------------------


async def test_data_needs_an_admin_key_or_the_cookie_that_one_was_exchanged_for(
    tmp_path: Path,
) -> None:
    keys: dict[str, Any] = {"admin_keys": ADMIN, "agent_keys": {"bot": {"key": AGENT}}}
    async with (
        demo(tmp_path, **keys) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        assert (await http.get("/ui")).status_code == 200
        assert (await http.get("/ui/app.js")).status_code == 200
        assert (await http.get("/ui/api/groups")).status_code == 401
        assert (await http.get("/ui/api/groups", params={"key": ADMIN})).status_code == 401
        bearer = {"authorization": f"Bearer {ADMIN}"}
        assert (await http.get("/ui/api/groups", headers=bearer)).status_code == 200
        agent = {"authorization": f"Bearer {AGENT}"}
        for path in ("groups", "archive", "prompts", "find?uid=t", "trajectory?trajectory_uid=t"):
            assert (await http.get(f"/ui/api/{path}", headers=agent)).status_code == 403, path
        for wrong in ("no-key-of-this-gateway", AGENT, ""):
            assert (await http.post("/ui/api/login", json={"key": wrong})).status_code == 401
        long = await http.post("/ui/api/login", json={"key": "k" * 10_000})
        assert long.status_code == 413, "nobody without a key fills the memory"
        page = {"origin": "https://elsewhere.example"}
        login = await http.post("/ui/api/login", json={"key": ADMIN}, headers=page)
        assert login.status_code == 403
        login = await http.post("/ui/api/login", json={"key": ADMIN})
        cookie = login.headers["set-cookie"]
        assert login.status_code == 200
        assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= set(cookie.split("; "))
        assert ADMIN not in cookie
        assert (await http.get("/ui/api/groups")).status_code == 200
        beside = {"cookie": 'prefs={"a": [1, 2]}; =; \x22; ' + cookie.split(";")[0]}
        assert (await http.get("/ui/api/groups", headers=beside)).status_code == 200
        # It opens the dashboard alone.
        name, _, value = cookie.split(";")[0].partition("=")
        http.cookies.set(name, value, path="/")
        assert (await http.get("/statistics")).status_code == 401
        until, _, mac = value.partition(".")
        for forged in (f"{int(until) + 9}.{mac}", f"{until}.{mac[:-1]}", f"99999999999.{'A' * 43}"):
            http.cookies.clear()
            http.cookies.set(name, forged, path="/")
            assert (await http.get("/ui/api/groups")).status_code == 401
        left = (await http.post("/ui/api/logout")).headers["set-cookie"]
        assert {f'{name}=""', "Max-Age=0", "Path=/ui"} <= set(left.split("; "))


async def test_a_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.gateway.access.SESSION_S", -1)
    async with (
        demo(tmp_path, admin_keys=ADMIN) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        cookie = (await http.post("/ui/api/login", json={"key": ADMIN})).headers["set-cookie"]
        name, _, value = cookie.split(";")[0].partition("=")
        http.cookies.set(name, value, path="/")
        assert (await http.get("/ui/api/groups")).status_code == 401


async def test_no_script_runs_but_the_dashboards_own_files(shown: Demo) -> None:
    async with httpx.AsyncClient(base_url=shown.url) as http:
        page = await http.get("/ui")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        for script in re.findall(r"<script([^>]*)>(.*?)</script>", page.text, re.DOTALL):
            assert "src=" in script[0]
            assert not script[1]
        assert not re.search(r'\son\w+="|style="|javascript:', page.text)
        again = await http.get("/ui/app.js")
        tag = {"if-none-match": again.headers["etag"]}
        assert (await http.get("/ui/app.js", headers=tag)).status_code == 304
        for outside in ("/ui/../router.py", "/ui/%2e%2e/router.py", "/ui/tsconfig.json"):
            assert (await http.get(outside)).status_code == 404
    for module in STATIC.glob("*.js"):
        assert not re.search(r"innerHTML|dangerously|\beval\(|new Function", module.read_text())


async def test_a_trajectory_may_be_called_ui(shown: Demo) -> None:
    async with httpx.AsyncClient(base_url=shown.url) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = await http.post("/ui/api/v1/chat/completions", json=body)
        assert answer.headers["x-stepwell-trajectory"] == "ui"


# -- what is shown -------------------------------------------------------------------------------


async def test_listings_come_in_pages_and_filtered(http: httpx.AsyncClient) -> None:
    every = (await ok(http, "trajectories"))["items"]
    assert len(every) == 8
    # chain_sum/1000 was dropped: all of its rollouts were right
    assert {row["group_state"] for row in every} == {"ready", "open"}
    wrong = await ok(http, "trajectories", max_reward=0.5)
    assert {row["reward"] for row in wrong["items"]} == {0.0}
    assert (await ok(http, "groups", state="open"))["items"][0]["n_running"] == 1
    tagged = (await ok(http, "groups", tag="looked at"))["items"]
    assert [row["prompt_uid"] for row in tagged] == ["chain_sum/1002"]
    gone = await ok(http, "events", kinds="dropped", channel="train")
    assert gone["reasons"] == ["zero_variance"]
    assert [e["prompt_uid"] for e in gone["items"]] == ["chain_sum/1000"]
    assert not (await ok(http, "events", kinds="dropped", reason="stale"))["items"]
    for name, value in (("min_reward", "much"), ("min_reward", "nan"), ("min_version", "9" * 19)):
        refused = await http.get("groups", params={name: value})
        assert refused.status_code == 400
        assert f"{name} is '{value}'" in refused.text


async def test_lists_show_what_was_said_the_newest_first(http: httpx.AsyncClient) -> None:
    rows = (await ok(http, "trajectories"))["items"]
    groups = [row["prompt_uid"] for row in rows]
    assert groups == sorted(groups, reverse=True)
    assert all(row["first"].startswith("State the final answer to:") for row in rows)
    assert {row["last"] for row in rows if row["state"] == "complete"} != {None}
    assert all(row["n_unique_tokens"] < row["n_tokens"] for row in rows)
    listed = (await ok(http, "groups"))["items"]
    assert [row["prompt_uid"] for row in listed] == [*dict.fromkeys(groups)]
    assert all(row["first"].startswith("State the final answer to:") for row in listed)


async def test_a_list_is_sorted_and_searched(http: httpx.AsyncClient) -> None:
    every = (await ok(http, "trajectories"))["items"]
    by_reward = (await ok(http, "trajectories", order="reward"))["items"]
    rewards = [row["reward"] for row in by_reward]
    assert len(by_reward) == len(every)
    assert rewards == [*sorted((r for r in rewards if r is not None), reverse=True), None]
    least = (await ok(http, "trajectories", order="tokens", ascending="1"))["items"]
    tokens = [row["n_unique_tokens"] for row in least]
    assert tokens == sorted(tokens)
    oldest = (await ok(http, "trajectories", ascending="1"))["items"]
    assert oldest[0]["opened_at"] == min(row["opened_at"] for row in every)
    word = every[0]["first"].split()[-2]
    found = (await ok(http, "trajectories", search=f"STATE {word}"))["items"]
    assert 0 < len(found) < len(every)
    assert all(word in row["first"] for row in found)
    assert (await ok(http, "trajectories", search="nobody said this"))["items"] == []
    wrong = await http.get("trajectories", params={"order": "size"})
    assert wrong.status_code == 400
    assert "order is 'size'" in wrong.text


def marked(row: Any) -> str | None:
    marks = row["marks"]
    return " ".join([*marks["tags"], marks["note"]]).strip() or None


TRAJECTORIES: dict[str, Callable[[Any], Any]] = {
    "time": lambda row: row["opened_at"],
    "reward": lambda row: row["reward"],
    "turns": lambda row: row["n_steps"],
    "tokens": lambda row: row["n_unique_tokens"],
    "version": lambda row: row["newest_version"],
    "state": lambda row: row["state"],
    "group": lambda row: row["group_state"],
    "attempt": lambda row: row["attempt"],
    "marks": marked,
    "first": lambda row: row["first"] and row["first"].lower(),
    "last": lambda row: row["last"] and row["last"].lower(),
    "uid": lambda row: row["trajectory_uid"],
    "prompt": lambda row: row["prompt_uid"],
}
GROUPS: dict[str, Callable[[Any], Any]] = {
    "time": lambda row: row["opened_at"],
    "first": lambda row: row["first"] and row["first"].lower(),
    "state": lambda row: row["state"],
    "rollouts": lambda row: row["n_complete"],
    "reward": lambda row: row["reward_mean"],
    "spread": lambda row: row["reward_std"],
    "version": lambda row: row["newest_version"],
    "turns": lambda row: row["n_steps"],
    "tokens": lambda row: row["n_tokens"],
    "delivery": lambda row: row["delivery"],
    "marks": marked,
    "why": lambda row: row["reason"],
    "prompt": lambda row: row["prompt_uid"],
}


@pytest.mark.parametrize(
    ("page", "orders", "uid"),
    [("trajectories", TRAJECTORIES, "trajectory_uid"), ("groups", GROUPS, "prompt_uid")],
)
async def test_each_column_of_the_pools_lists_sorts_them(
    shown: Demo, http: httpx.AsyncClient, page: str, orders: dict[str, Any], uid: str
) -> None:
    await shown.pool.open_trajectory("mute", "mute")
    every = {row[uid]: row for row in (await ok(http, page))["items"]}
    for order, value in orders.items():
        for ascending in ("", "1"):
            rows = (await ok(http, page, order=order, ascending=ascending))["items"]
            assert {row[uid]: row for row in rows} == every, order
            values = [value(row) for row in rows]
            assert values == in_order(values, descending=not ascending), order
    wrong = await http.get(page, params={"order": "size"})
    assert wrong.status_code == 400
    assert "order is 'size'; there are time" in wrong.text


async def test_groups_are_searched(http: httpx.AsyncClient) -> None:
    every = (await ok(http, "groups"))["items"]
    word = every[0]["first"].split()[-2]
    (found,) = (await ok(http, "groups", search=f"STATE {word}"))["items"]
    assert found == every[0]


async def test_optimizer_steps_are_sorted_by_any_metric(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = (await ok(http, "batches"))["items"]
    for order in ("step", "reward/mean", "grad_norm", "log_prob_gap", "sampled"):
        for ascending in ("", "1"):
            answer = await ok(http, "batches", order=order, ascending=ascending)
            assert {row["step"] for row in answer["items"]} == {row["step"] for row in every}
            values = [row.get(order) for row in answer["items"]]
            assert values == in_order(values, descending=not ascending), order
            assert (answer["cursor"], answer["looked"]) == (None, None)
    wrong = await http.get("batches", params={"order": "size"})
    assert wrong.status_code == 400
    assert "order is 'size'; there are" in wrong.text
    monkeypatch.setattr(dashboard, "MOST_SORTED", 3)
    some = await ok(http, "batches", order="grad_norm")
    assert (len(some["items"]), some["looked"]) == (3, 3)


async def test_a_list_says_of_how_many_its_order_is(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "MOST_SORTED", 4)
    monkeypatch.setattr(dashboard, "LISTED", 4)
    answer = await ok(http, "trajectories", order="reward")
    assert (answer["looked"], answer["cursor"]) == (4, None)
    assert (await ok(http, "trajectories"))["looked"] is None
    monkeypatch.setattr(dashboard, "MOST_GROUPS", 1)
    answer = await ok(http, "groups", order="reward")
    assert (len(answer["items"]), answer["looked"], answer["cursor"]) == (1, 1, None)


async def test_a_trajectory_shows_its_tree_and_the_tokens_of_the_journal(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    for row in (await ok(http, "trajectories"))["items"]:
        named = {"channel": "train", "trajectory_uid": row["trajectory_uid"]}
        tree = await ok(http, "trajectory", **named)
        page = await shown.pool.read_trajectories(trajectory_uid=row["trajectory_uid"])
        (stored,) = page.unpack()
        steps = stored.trajectory.steps
        assert [s["index"] for s in tree["steps"]] == [s.step_index for s in steps]
        assert [s["parent"] for s in tree["steps"]] == [s.parent_index for s in steps]
        for step in steps:
            told = await ok(http, "tokens", **named, index=step.step_index, start=0)
            check_tokens(told, step)
    branches = [s["branch"] for s in tree["steps"]]
    assert branches == [None, None]  # the last one listed has no side question
    side = await ok(http, "trajectory", trajectory_uid="chain_sum/1002:1")
    assert [s["branch"] for s in side["steps"]] == [None, "new_conversation", None]
    assert side["branches"] == [[1], [0, 2]]
    assert side["steps"][2]["messages"][-1]["content"].startswith("The answer is")
    assert side["steps"][0]["messages"][-1]["tool_calls"][0]["function"]["name"] == "calculator"
    assert side["steps"][0]["timing"]["engine_s"] > 0


async def test_a_grading_function_is_given_the_messages_of_all_calls(shown: Demo) -> None:
    """A page asks for those of a long trajectory as it needs them."""
    said = [[{"role": "user", "content": f"{i}" * 300_000}] for i in range(4)]
    for i, messages in enumerate(said):
        step = Step(
            prompt_ids=[*range(3 + 2 * i)],
            response_ids=[i],
            trajectory_uid="long",
            prompt_uid="p",
            step_index=i,
            metadata={"messages": messages},
        )
        await shown.pool.submit_step(step)
    gateway = GatewayClient([shown.url])
    try:
        transcript = await gateway.transcript(f"{shown.url}/long/p")
    finally:
        await gateway.close()
    assert [call.get("messages") for call in transcript] == said


def check_tokens(told: Any, step: Step) -> None:
    assert told["ids"] == step.token_ids.tolist()
    assert step.rollout_log_probs is not None
    n = len(step.prompt_ids)
    assert told["columns"]["log_probs"][:n] == [None] * n
    assert told["columns"]["log_probs"][n:] == pytest.approx(step.rollout_log_probs, abs=1e-5)
    spans = step.version_spans
    versions = [s.version for s in spans for _ in range(s.start, s.end)]
    assert told["versions"][n:] == (versions or [step.policy_version] * len(step.response_ids))
    assert "".join(told["texts"][n:]).endswith("<|im_end|>")


async def test_metadata_with_any_keys_is_shown_and_no_integer_is_rounded(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    """A browser has doubles."""
    seeds = {"seed": 2**63 - 1, "user_id": 2**53 + 1, "least": -(2**53) - 1, "small": 2**53 - 1}
    exact = {name: n if name == "small" else str(n) for name, n in seeds.items()}
    await shown.pool.open_group("odd", 1, metadata={"labels": {0: "no", 1: "yes"}, **seeds})
    step = Step(
        prompt_ids=[1],  # type: ignore[arg-type]
        response_ids=[2],  # type: ignore[arg-type]
        trajectory_uid="odd",
        prompt_uid="odd",
        metadata={
            "messages": [{"role": "user", "content": "hi", 5: True}],
            "sampling_params": {"seed": 2**63 - 1},
        },
    )
    await shown.pool.open_trajectory("odd", "odd", metadata={7: "seven"})
    await shown.pool.submit_step(step)
    assert (await ok(http, "trajectories"))["items"][0]["metadata"] == {"7": "seven"}
    labels = {"labels": {"0": "no", "1": "yes"}}
    assert (await ok(http, "groups"))["items"][0]["metadata"] == labels | exact
    assert (await ok(http, "group", prompt_uid="odd"))["group"]["metadata"] == labels | exact
    (told,) = (await ok(http, "trajectory", trajectory_uid="odd"))["steps"]
    assert told["sampling_params"]["seed"] == str(2**63 - 1)
    assert told["messages"] == [{"role": "user", "content": "hi", "5": True}]


async def test_a_running_trajectory_shows_its_steps_so_far(http: httpx.AsyncClient) -> None:
    running = await ok(http, "trajectory", trajectory_uid="chain_sum/1002:3")
    assert running["row"]["state"] == "open"
    assert len(running["steps"]) == 2


async def test_a_group_shows_its_rollouts_and_the_tokens_that_they_share(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    told = await ok(http, "group", prompt_uid="chain_sum/1001")
    page = await shown.pool.read_trajectories(prompt_uid="chain_sum/1001")
    steps = [s for each in page.unpack() for s in each.trajectory.steps]
    assert told["prefixes"]["calls"] == sum(s.n_tokens for s in steps)
    distinct = {tuple(s.token_ids.tolist()[: n + 1]) for s in steps for n in range(s.n_tokens)}
    assert told["prefixes"]["tree"] == len(distinct)
    assert [row["state"] for row in told["trajectories"]] == ["complete"] * 4
    assert len([text for text in told["last"].values() if text.startswith("The answer is")]) == 4
    gone = await ok(http, "group", prompt_uid="chain_sum/1000")
    assert gone["archived"], "it waits for the archiver"
    missing = await http.get("group", params={"prompt_uid": "nobody"})
    assert missing.status_code == 404
    assert "Recently gone" in missing.text


def test_a_tree_of_any_depth_can_be_written() -> None:
    """A conversation that goes back one turn further each time."""
    trajectory = Trajectory("t", "p", tuple(_step(i, 400 - i) for i in range(400)))
    tree = prefixes([trajectory], lambda ids: "")
    assert tree["branches"] == sum(402 - i for i in range(400))
    assert tree["tree"] < tree["branches"]
    assert json.loads(as_json(tree))


def _step(index: int, n: int) -> Step:
    ids: dict[str, Any] = {"prompt_ids": [5] * n, "response_ids": [7, 8]}
    return Step(**ids, trajectory_uid="t", prompt_uid="p", step_index=index)


async def test_what_a_step_was_trained_on_is_shown_with_the_trainers_columns(
    http: httpx.AsyncClient,
) -> None:
    batches = (await ok(http, "batches"))["items"]
    assert [b["step"] for b in batches if b["sampled"]] == [12, 11]
    sample = (await ok(http, "batch", step=12))["sample"]
    first = sample["trajectories"][0]
    assert first["advantage"] != 0
    named = {"trajectory_uid": first["trajectory_uid"], "step": 12}
    tree = await ok(http, "trajectory", **named)
    assert tree["steps"][0]["advantages"] == pytest.approx(first["advantage"], abs=1e-4)
    told = await ok(http, "tokens", **named, index=0)
    assert {"advantages", "weights", "prox_log_probs", "mask", "log_probs"} == set(told["columns"])
    group = await ok(http, "group", prompt_uid=first["prompt_uid"], step=12)
    assert group["trajectories"] == sample["trajectories"]
    assert 0 < group["prefixes"]["tree"] < group["prefixes"]["calls"]
    assert (await http.get("batch", params={"step": 99})).status_code == 404


async def test_what_no_sample_is_kept_of_is_shown_as_the_pool_has_it(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    """A link to what a step was trained on outlives the step's file."""
    sample = (await ok(http, "batch", step=12))["sample"]
    first = sample["trajectories"][0]
    (shown.run_dir / "trained" / f"{12:012d}.jsonl").unlink()
    group = await ok(http, "group", prompt_uid=first["prompt_uid"], step=12)
    assert (group["step"], len(group["trajectories"])) == (None, len(sample["trajectories"]))
    named = {"trajectory_uid": first["trajectory_uid"], "step": 12}
    told = await ok(http, "trajectory", **named)
    assert (told["step"], told["row"]["state"]) == (None, "complete")
    assert (await ok(http, "tokens", **named, index=0))["ids"]


async def test_curves_hold_every_evaluation_and_the_lag_of_the_last_steps(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    write_run(shown.run_dir, 3000)
    told = await ok(http, "metrics", key=["reward/mean", "val/score"])
    steps, scores = told["series"]["step"], told["series"]["val/score"]
    assert len(steps) <= 1000
    assert steps[-1] == 3000
    assert [s for s, v in zip(steps, scores, strict=True) if v] == list(range(10, 3001, 10))
    assert [name for name, _ in told["lag"]] == ["0-1", "1-2", "2-4"]


async def test_the_runs_beside_this_one_are_compared_by_step_tokens_and_time(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    other, empty = shown.run_dir.parent / "=other", shown.run_dir.parent / "no-run"
    for folder in (other, empty):
        folder.mkdir()
    write_run(other, 20)
    listed = await ok(http, "runs")
    assert listed["this"] == shown.run_dir.name
    assert {shown.run_dir.name, "=other"} <= set(listed["runs"])
    assert "no-run" not in listed["runs"]

    names, keys = [shown.run_dir.name, "=other"], ["reward/mean", "val/score"]
    told = await ok(http, "compare", run=names, key=keys)
    assert "loss" in told["keys"]
    assert [run["name"] for run in told["runs"]] == names
    curves = told["runs"][1]["curves"]
    assert curves["reward/mean"]["step"] == list(range(1, 21))
    records = RunFolder(other).records(range(1, 21))
    assert curves["reward/mean"]["value"] == [r["reward/mean"] for r in records]
    tokens = [sum(r["tokens"] for r in records[:n]) for n in range(1, 21)]
    assert curves["reward/mean"]["tokens"] == tokens
    assert curves["reward/mean"]["seconds"][-1] == pytest.approx(20 * 1.55)
    assert curves["val/score"]["step"] == [10, 20]
    assert curves["val/score"]["tokens"] == [tokens[9], tokens[19]]

    table = await http.get("compare.csv", params={"run": names, "key": keys})
    assert table.headers["content-type"].startswith("text/csv")
    head, *rows = table.text.splitlines()
    assert head == "run,step,tokens,seconds,reward/mean,val/score"
    assert rows[-1].split(",")[:2] == ["'=other", "20"], "a name is no formula"
    assert len(rows) == 12 + 20
    linked = await http.get("compare.csv", params={"run": names[:1], "key": "=1+1"})
    assert linked.text.splitlines()[0] == "run,step,tokens,seconds,'=1+1", "nor is a link's key"


async def test_any_metric_can_be_chosen_those_of_the_last_evaluation_too(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    with (shown.run_dir / "metrics.jsonl").open("ab") as file:
        for step in range(13, 60):
            file.write(sealed(b'{"step": %d, "loss": 1}' % step))
    for told in (await ok(http, "metrics"), await ok(http, "compare", run=shown.run_dir.name)):
        assert {"loss", "val/score"} <= set(told["keys"])


async def test_a_table_of_runs_has_each_column_once(shown: Demo, http: httpx.AsyncClient) -> None:
    named = {"run": shown.run_dir.name, "key": ["loss", "reward/mean", "loss", "tokens"]}
    table = await http.get("compare.csv", params=named)
    assert table.text.splitlines()[0] == "run,step,tokens,seconds,loss,reward/mean"


async def test_a_folder_of_somebody_else_beside_the_runs_is_passed_by(
    shown: Demo, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, stat = shown.run_dir.parent / "lost+found", Path.stat
    theirs.mkdir()

    def refused(path: Path, **how: Any) -> os.stat_result:  # root would be let in
        if path.parent == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    try:
        assert shown.run_dir.name in (await ok(http, "runs"))["runs"]
    finally:
        theirs.rmdir()


@pytest.mark.parametrize("name", ["no-run", "..", "../other", "/etc", "nowhere"])
async def test_a_page_names_no_folder_but_those_of_runs_beside_this_one(
    shown: Demo, http: httpx.AsyncClient, name: str
) -> None:
    for question in ("compare", "compare.csv"):
        answer = await http.get(question, params={"run": name, "key": "loss"})
        assert answer.status_code == 404
        assert "is no folder with metrics.jsonl" in answer.text
    many = await http.get("compare", params={"run": ["x"] * 9, "key": "loss"})
    assert (many.status_code, "at most 8" in many.text) == (400, True)


# -- live ----------------------------------------------------------------------------------------


async def test_pages_are_told_once_a_second_and_nobody_is_asked_when_they_have_left(
    shown: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.ui.live.TICK_S", 0.05)
    live = shown.app[0].state.services.dashboard.live
    async with (
        httpx.AsyncClient(base_url=shown.url) as http,
        http.stream("GET", "/ui/api/live") as stream,
    ):
        lines = (line async for line in stream.aiter_lines() if line)
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["pool"]["train"]["groups"]["dropped"] == 1
        assert first["metrics"]["step"] == 12
        assert await anext(lines)
        assert live._task is not None
    async with asyncio.timeout(5):
        await live._task


async def test_damaged_figures_of_a_trainer_are_an_alert_and_hold_up_no_page(shown: Demo) -> None:
    path = shown.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss"', b'"lost"', 1))
    async with (
        httpx.AsyncClient(base_url=shown.url) as http,
        http.stream("GET", "/ui/api/live") as stream,
        asyncio.timeout(30),
    ):
        lines = (line async for line in stream.aiter_lines() if line)
        tick = json.loads((await anext(lines)).removeprefix("data: "))
    assert tick["pool"]["train"]["groups"]["dropped"] == 1
    (alert,) = (a for a in tick["alerts"] if a["key"] == "metrics")
    assert str(path) in alert["why"]
    assert "delete that line" in alert["why"]


# -- curation ------------------------------------------------------------------------------------


async def test_what_is_marked_untrainable_is_not_in_the_next_batch_until_that_is_undone(
    shown: Demo, http: httpx.AsyncClient
) -> None:
    uid = f"chain_sum/1001:{HOSTILE}"
    marked = await posted(http, "mark", trajectory_uid=uid, marks={"trainable": False})
    assert marked["before"]["trainable"] is None
    run = await posted(http, "dry_run", batch_size=1)
    assert run["decisions"][0]["n_withheld"] == 1
    await posted(http, "mark", trajectory_uid=uid, marks={"trainable": None})
    run = await posted(http, "dry_run", batch_size=1)
    assert run["decisions"][0]["n_withheld"] == 0
    await posted(http, "mark", trajectory_uid=uid, marks={"trainable": False})
    lease = await shown.pool.lease_batch()
    assert lease is not None
    assert len(lease.groups[0].trajectories) == 3
    assert uid not in {s.trajectory_uid for s in lease.steps}
    refused = await http.post("mark", json={"trajectory_uid": uid, "marks": {"tags": ["late"]}})
    assert "was served already" in refused.text
    refused = await http.post("mark", json={"trajectory_uid": uid, "marks": {"channel": "val"}})
    assert refused.status_code == 400
    assert "marks have no field 'channel'" in refused.text


async def test_a_reward_is_corrected_and_put_back(shown: Demo, http: httpx.AsyncClient) -> None:
    named = {"trajectory_uid": "chain_sum/1001:0"}
    assert await posted(http, "reward", **named, reward=0.25) == {
        "before": 1.0,
        "outcome": "accepted",
    }
    assert (await ok(http, "trajectories", **named))["items"][0]["reward"] == 0.25
    await posted(http, "reward", **named, reward=1.0)
    assert (await ok(http, "trajectories", **named))["items"][0]["reward"] == 1.0
    assert (await http.post("reward", json={**named, "reward": "much"})).status_code == 400


async def test_a_dry_run_that_would_hold_up_the_pool_is_refused(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.ui.dashboard.MOST_TRIED", 0)
    refused = await http.post("dry_run", json={"batch_size": 1})
    assert refused.status_code == 400
    assert "has 1 ready groups" in refused.text


async def test_a_dry_run_tries_built_in_rules(http: httpx.AsyncClient) -> None:
    strict = SelectionConfig(order="freshest", filters=("all_correct(1.0)", "scored"))
    run = await posted(http, "dry_run", batch_size=1, selection=strict.model_dump())
    assert run["counts"] == {"serve": {"in_order": 1}}
    for wrong in ({"sort": "fifo"}, {"filters": None}, {"filters": 5}, {"order": ["fifo"]}):
        answer = await http.post("dry_run", json={"selection": wrong})
        assert answer.status_code == 400, answer.text
    for rule in ("scored(1)", "all_correct(nan)", "all_correct(x)", "slime_filter", " scored"):
        answer = await http.post("dry_run", json={"selection": {"filters": [rule]}})
        assert answer.status_code == 400, answer.text
        assert "selection.filters[0] is" in answer.text
        assert "path" not in answer.text, "a page is not told of what only a configuration may"


def code_texts(path: Path, *, all_pairs: bool = True) -> list[str]:
    """Texts that name the code in `path` (an absolute one, without its suffix) in some way.

    Args:
        all_pairs: every name in every rule; else each name alone, and one in each rule.
    """
    file = f"{path}.py"
    # From the working folder, in which a folder `scored(` need not be: `..` takes it away again.
    up = os.path.relpath(file)
    named = [f"{file}:f", f"{path.name}:f", f"{path.name}.f", file, f"file://{file}"]
    around = ("{}", "scored({}", "fifo({}", "scored({})", "fifo {}")
    rules = ("all_correct({})", "slime_filter({})", "slime_filter(\n{})", "\n{}", "scored\n({}")
    climbing = [f"{rule}(/../{up}:f" for rule in ("scored", "fifo", "all_correct", "slime_filter")]
    in_rules = named if all_pairs else named[:1]
    return climbing + named + [f.format(name) for f in (*around[1:], *rules) for name in in_rules]


@pytest.mark.parametrize("dry", ["order", "filters"])
async def test_a_dry_run_loads_no_code(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: str
) -> None:
    ran = plant(tmp_path, monkeypatch)
    for text in code_texts(tmp_path / "evil"):
        value = text if dry == "order" else [text]
        answer = await http.post("dry_run", json={"selection": {dry: value}})
        assert answer.status_code == 400, (text, answer.text)
        assert not ran.exists(), text


async def test_no_route_loads_code_that_a_request_names(
    shown: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route of the application, with such a text in its path, its query and its body."""
    ran = plant(tmp_path, monkeypatch)
    paths = described(ENDPOINTS, {})["paths"]
    routes = {(m.upper(), path) for path, ways in paths.items() for m in ways}
    routes |= {(each.method, each.path) for each in ENDPOINTS if each.method != "HEAD"}
    assert {
        ("POST", "/ui/api/dry_run"),
        ("POST", "/start_rollout"),
        ("POST", "/v1/groups"),
    } < routes
    names = sorted(
        {name for each in list_of(described) for name in each}
        | {"channel", "selection", "task_type", "reward_fn", "state", "key", "filters", "order"}
    )
    async with aiohttp.ClientSession() as client:  # five times as fast as httpx

        async def ask(method: str, path: str, text: str, body: Any = None) -> None:
            quoted = quote(text, safe="")
            named = re.sub(r"{[^}]*}", quoted, path)
            url = URL(f"{shown.url}{named}?channel={quoted}", encoded=True)
            async with client.request(method, url, json=body) as answer:
                await answer.read()

        for method, path in sorted(routes):
            # A stream without end, and a document that a process makes for seconds: neither takes
            # anything.
            if path in ("/ui/api/live", "/openapi.json"):
                continue
            texts = code_texts(tmp_path / "evil", all_pairs=False)
            if method == "POST":
                bodies = [(text, dict.fromkeys(names, text)) for text in texts]
                # The dry run, which reads it, is asked with all of them above.
                bodies.append((texts[0], {"selection": {"order": texts[0], "filters": texts[:1]}}))
                asked = [ask(method, path, text, body) for text, body in bodies]
            else:
                asked = [ask(method, path, text) for text in texts]
            await asyncio.gather(*asked)
            assert not ran.exists(), (method, path)


def list_of(described: Any) -> list[list[str]]:
    """Names of the properties of every schema in a description."""
    if isinstance(described, list):
        return [names for each in described for names in list_of(each)]
    if not isinstance(described, dict):
        return []
    found = [list(described["properties"])] if isinstance(described.get("properties"), dict) else []
    return found + [names for each in described.values() for names in list_of(each)]


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that anybody who names it could run; the file that it makes when it does."""
    ran = folder / "ran"
    source = f"open({str(ran)!r}, 'w').close()\ndef f(*args): return None\n"
    (folder / "evil.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return ran


async def test_data_is_exported_as_a_file_and_deleted(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    for form in ("jsonl", "parquet"):
        answer = await http.get("export", params={"format": form, "state": "complete"})
        path = tmp_path / f"all.{form}"
        path.write_bytes(answer.content)
        assert len(list(read(path))) == 7
    assert (await http.get("export", params={"format": "csv"})).status_code == 400
    deleted = await posted(http, "delete", trajectory_uid="chain_sum/1001:0")
    assert len(deleted["deleted"]) == 4
    assert len((await ok(http, "trajectories"))["items"]) == 4


# -- the run's folder ----------------------------------------------------------------------------


def test_metrics_are_read_as_they_grow_and_a_step_that_was_done_again_counts_once(
    tmp_path: Path,
) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    assert folder.steps() == []
    first, second, third, again = (
        sealed(b'{"step": %d, "loss": %d}' % record) for record in ((1, 3), (2, 2), (3, 1), (2, 9))
    )
    path.write_bytes(first + second + third[:17])
    assert folder.steps() == [1, 2]
    with path.open("ab") as file:
        file.write(third[17:] + again)
    assert folder.series(["loss"]) == {"step": [1, 2, 3], "loss": [3, 9, 1]}
    path.unlink()
    path.write_bytes(sealed(b'{"step": 1, "loss": 7}'))
    assert folder.series(["loss"])["loss"] == [7]
    # Of another start, and longer; a file system gives the number of a removed file again.
    path.write_bytes(b"".join(sealed(b'{"step": %d, "loss": 10}' % n) for n in range(1, 4)))
    assert folder.series(["loss"])["loss"] == [10, 10, 10]

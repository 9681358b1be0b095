"""Isolation of agent keys: each route, caller and trajectory, at the gateway that opened it, at
another one, and after a restart with rotated secrets."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepwell.datapool.config import PoolConfig
from tests.gateway.conftest import local_pool

ADMIN, NEW = "an-admin-key-for-tests", "-rotated"
A, B = "key-of-agent-a-for-tests", "key-of-agent-b-for-tests"
HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": HI}
UID, GROUP = "group-of-a-0", "group-of-a"
SESSION = "session-s@a"
REFUSED = "has another owner; use the key that opened it"

# name: (path, headers, body). {t}, {g}: a trajectory and its group.
ROUTES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "chat": ("/{t}/{g}/v1/chat/completions", {}, CHAT),
    "completions": ("/{t}/{g}/v1/completions", {}, {"prompt": "hi"}),
    "responses": ("/{t}/{g}/v1/responses", {}, {"input": "hi"}),
    "messages": ("/{t}/{g}/v1/messages", {}, {**CHAT, "max_tokens": 9}),
    "header": ("/v1/chat/completions", {"x-trajectory-uid": "{t}", "x-prompt-uid": "{g}"}, CHAT),
    "retry": ("/{t}/{g}/v1/chat/completions", {"idempotency-key": "k"}, CHAT),
    "register": ("/{t}/{g}/v1/register_trajectory", {}, {"metadata": {"x": 1}}),
    "sibling": ("/new/{g}/v1/chat/completions", {}, CHAT),
    "feedback": ("/{t}/{g}/v1/feedback", {}, {"label": "bad"}),
    "feedback by name": ("/v1/feedback", {}, {"trajectory_uid": "{t}", "label": "bad"}),
    "reward": ("/v1/rewards", {}, {"trajectory_uid": "{t}", "reward": -9}),
    "abort": ("/{t}/{g}/v1/abort_trajectory", {}, {"reason": "no"}),
    "complete": ("/{t}/{g}/v1/complete_trajectory", {}, {"reward": -9}),
    "complete by name": ("/v1/complete_trajectory", {}, {"trajectory_uid": "{t}", "reward": -9}),
    "groups": ("/v1/groups", {}, {"n": 2, "prompt_uid": "{g}"}),
}
OPERATORS = ("/init_trajectory", "/generate", "/submit_steps", "/buffer/write", "/get_rollout_data")


def keys(suffix: str = "") -> dict[str, Any]:
    agents = {"a": {"key": A + suffix, "channel": "chan-a"}}
    agents["b"] = {"key": B + suffix, "channel": "chan-b"}
    agents["c"] = {"key": "key-of-agent-c-for-tests", "channel": "chan-a"}
    agents["d"] = {"key": "key-of-agent-d-for-tests"}
    return {"admin_keys": [ADMIN], "agent_keys": agents}


def filled(value: Any, **names: str) -> Any:
    if isinstance(value, dict):
        return {k: filled(v, **names) for k, v in value.items()}
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace(f"{{{name}}}", text)
    return value


class Http:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url

    async def __call__(
        self, path: str, key: str | None, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        sent = dict(headers) if key is None else {**headers, "authorization": f"Bearer {key}"}
        call = self._session.request(method, self.url + path, json=body, headers=sent)
        async with call as answer:
            return answer.status, await answer.json(content_type=None)

    async def route(self, name: str, key: str | None, t: str = UID, g: str = GROUP) -> Any:
        path, headers, body = (filled(part, t=t, g=g) for part in ROUTES[name])
        return await self(path, key, body, **headers)


@pytest.mark.parametrize("where", ["here", "another gateway", "after a restart"])
@pytest.mark.parametrize("name", ROUTES)
async def test_what_one_agents_key_opened_is_no_other_agents(
    worlds: Any, tmp_path: Path, name: str, where: str
) -> None:
    async with aiohttp.ClientSession() as session:
        async with local_pool(PoolConfig(), tmp_path) as pool:
            world = await worlds(pool=pool, **keys())
            here = Http(session, world.url)
            status, opened = await here("/v1/groups", A, {"n": 2, "prompt_uid": GROUP})
            assert status == 200, opened
            own, sibling = (each["api_key"] for each in opened["trajectories"])
            assert (await here.route("chat", A))[0] == 200
            if where != "after a restart":
                other = world if where == "here" else await worlds(pool=pool, **keys())
                await _check(Http(session, other.url), name, "", own, sibling, pool)
        if where == "after a restart":
            async with local_pool(PoolConfig(), tmp_path) as pool:
                world = await worlds(pool=pool, **keys(NEW))
                await _check(Http(session, world.url), name, NEW, own, sibling, pool)


async def _check(http: Http, name: str, suffix: str, own: str, sibling: str, pool: Any) -> None:
    before = await _state(pool)
    assert (await http.route(name, None))[0] == 401
    others = (B + suffix, "key-of-agent-d-for-tests", "key-of-agent-c-for-tests")
    # In a channel of one's own, a prompt_uid names a group of one's own.
    for key in others[2:] if name == "sibling" else others:
        status, refused = await http.route(name, key)
        assert status == 403, (key, refused)
        assert REFUSED in str(refused)
    status, refused = await http.route(name, sibling)
    if name == "header":  # its key says whose the call is
        assert status == 200
    else:
        assert status == 403, refused
        assert await _state(pool) == before
    for key in (A + suffix, ADMIN, own):
        status, answer = await http.route(name, key)
        refuses = key == own and name in ("groups", "sibling")
        assert (
            status == (403 if refuses else 200)
            or "closed" in str(answer)
            or status
            in (
                409,
                410,
            )
        ), (key, status, answer)
        assert REFUSED not in str(answer)


async def _state(pool: Any) -> Any:
    """All that is stored, and how often."""
    rows = []
    for channel in ("chan-a", "chan-b", "train", "val"):
        for row in (await pool.list_trajectories(channel)).items:
            if row.trajectory_uid in (UID, f"{GROUP}-1", "new"):
                marks = row.marks.as_dict()
                rows.append(
                    (channel, row.trajectory_uid, row.state, row.n_steps, row.reward, marks)
                )
                rows.append((row.metadata,))
    return rows


async def test_a_session_of_another_key_is_not_found_by_its_uid(worlds: Any) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        assert (await http("/v1/chat/completions", A, CHAT, **{"x-session-id": "s"}))[0] == 200
        for other in (B, "key-of-agent-c-for-tests"):
            named = {"x-trajectory-uid": SESSION}
            status, refused = await http("/v1/chat/completions", other, CHAT, **named)
            assert (status, REFUSED in str(refused)) == (403, True)
            count = {**CHAT, "model": "m"}
            for way in (named, {}):
                path = "/v1" if way else f"/{SESSION}/prompt-{SESSION}/v1"
                got = await http(f"{path}/messages/count_tokens", other, count, **way)
                assert got[0] == 403
            # The same session's name is another conversation for another key.
            same = {"x-session-id": "s"}
            assert (await http("/v1/chat/completions", other, CHAT, **same))[0] == 200
    stored = [s.trajectory_uid for s in world.stored()]
    assert stored.count(SESSION) == 1
    assert {"session-s@b", "session-s@c"} < set(stored)


async def test_stored_responses_of_another_key_are_not_there(worlds: Any) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        _, response = await http("/v1/responses", A, {"input": "hi"})
        path = f"/v1/responses/{response['id']}"
        for other in (B, "key-of-agent-c-for-tests", "key-of-agent-d-for-tests"):
            more = {"input": "go on", "previous_response_id": response["id"]}
            status, refused = await http("/v1/responses", other, more)
            assert (status, refused["error"]["code"]) == (400, "previous_response_not_found")
            item = {"input": [{"type": "item_reference", "id": response["output"][0]["id"]}]}
            assert (await http("/v1/responses", other, item))[0] in (400, 404)
            for method in ("GET", "DELETE"):
                assert (await http(path, other, None, method))[0] == 404
        for key in (A, ADMIN):
            assert (await http(path, key, None, "GET"))[0] == 200


async def test_what_the_operator_opened_is_open_to_agent_keys_and_others_routes_are_the_operators(
    worlds: Any,
) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        opening = {"trajectory_uid": "op", "prompt_uid": "op-group"}
        assert (await http("/init_trajectory", ADMIN, opening))[0] == 200
        for key in (A, B, "key-of-agent-d-for-tests"):
            assert (await http.route("chat", key, "op", "op-group"))[0] == 200
            for path in OPERATORS:
                assert (await http(path, key, {}))[0] == 403
            assert (await http("/v1/trajectories/op", key, None, "DELETE"))[0] == 403
        taken = {"metadata": {"stepwell_owner": "b"}}
        status, refused = await http("/op/op-group/v1/register_trajectory", B, taken)
        assert (status, "leave it out" in str(refused)) == (400, True)


@pytest.mark.parametrize("where", ["here", "another gateway", "after a restart"])
async def test_a_trajectorys_own_key_deletes_it_alone_and_its_siblings_go_on(
    worlds: Any, tmp_path: Path, where: str
) -> None:
    path, body = f"/v1/trajectories/{UID}", {"input": "a secret", "store": True}
    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        pool = await stack.enter_async_context(local_pool(PoolConfig(), tmp_path))
        world = await worlds(pool=pool, **keys())
        http = Http(session, world.url)
        _, opened = await http("/v1/groups", A, {"n": 2, "prompt_uid": GROUP})
        own, sibling = (each["api_key"] for each in opened["trajectories"])
        _, answered = await http("/v1/responses", own, body)
        first = f"/v1/responses/{answered['id']}"
        _, kept = await http("/v1/responses", sibling, body)
        if where == "another gateway":  # which answered the trajectory, too
            http = Http(session, (await worlds(pool=pool, **keys())).url)
            _, answered = await http("/v1/responses", own, body)
            _, kept = await http("/v1/responses", sibling, body)
        elif where == "after a restart":
            await stack.aclose()
            pool = await stack.enter_async_context(local_pool(PoolConfig(), tmp_path))
            http = Http(session, (await worlds(pool=pool, **keys())).url)
            _, kept = await http("/v1/responses", sibling, body)
        before = await _state(pool)
        for key in (None, A, B, sibling):
            assert (await http(path, key, None, "DELETE"))[0] == (401 if key is None else 403)
        assert await _state(pool) == before
        gone = {"deleted": [UID], "leased": []}
        assert await http(path, own, None, "DELETE") == (200, gone)
        rows = {r.trajectory_uid: r for r in (await pool.list_trajectories("chan-a")).items}
        assert (rows[UID].state, rows[UID].reason, rows[UID].n_steps) == ("aborted", "deleted", 0)
        assert [each for each in await _state(pool) if UID not in each][1:] == before[2:]
        assert (await http(f"/v1/responses/{answered['id']}", own, None, "GET"))[0] == 404
        assert (await http(f"/v1/responses/{kept['id']}", sibling, None, "GET"))[0] == 200
        gateways = [http, Http(session, (await worlds(pool=pool, **keys())).url)]
        if where == "another gateway":
            gateways.append(Http(session, world.url))
        for gateway in gateways:
            for name in ("chat", "responses", "retry", "register", "feedback", "feedback by name"):
                status, refused = await gateway.route(name, own)
                assert (status, "deleted" in str(refused)) == (410, True), (name, refused)
            late = {"trajectory_uid": UID, "outcome": "late"}
            for name in ("complete", "abort", "reward", "complete by name"):
                assert await gateway.route(name, own) == (200, late), name
        rows = {r.trajectory_uid: r for r in (await pool.list_trajectories("chan-a")).items}
        assert (rows[UID].n_steps, rows[UID].metadata) == (0, {"stepwell_owner": "a"})
        for gateway in gateways:  # each forgets what it has, whichever was asked first
            again = await gateway(path, own, None, "DELETE")
            assert again == (200, {"deleted": [], "leased": []})
            assert (await gateway(first, own, None, "GET"))[0] == 404
        assert (await http.route("chat", sibling, f"{GROUP}-1"))[0] == 200
        assert (await http.route("complete", sibling, f"{GROUP}-1"))[0] == 200
        (group,) = (await pool.lease_batch(channel="chan-a")).groups
        assert [t.trajectory_uid for t in group.trajectories] == [f"{GROUP}-1"]


async def test_a_trajectory_that_is_alone_goes_with_its_group(worlds: Any) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        _, opened = await http("/v1/groups", A, {"n": 1, "prompt_uid": "one"})
        (only,) = opened["trajectories"]
        assert (await http.route("chat", only["api_key"], "one-0", "one"))[0] == 200
        gone = {"deleted": ["one-0"], "leased": []}
        assert await http("/v1/trajectories/one-0", only["api_key"], None, "DELETE") == (200, gone)
        groups = (await world.pool.get_statistics("chan-a"))["groups"]
        assert groups["drop_reasons"] == {"deleted": 1}


async def test_the_operator_deletes_a_trajectory_with_its_group(worlds: Any) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        _, opened = await http("/v1/groups", A, {"n": 2, "prompt_uid": GROUP})
        for k, each in enumerate(opened["trajectories"]):
            assert (await http.route("chat", each["api_key"], f"{GROUP}-{k}"))[0] == 200
        status, gone = await http(f"/v1/trajectories/{UID}", ADMIN, None, "DELETE")
        assert (status, sorted(gone["deleted"])) == (200, [UID, f"{GROUP}-1"])

"""Isolation of agent keys: each route, caller and trajectory, at the gateway that opened it, at
another one, and after a restart with rotated secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepwell.datapool.config import PoolConfig
from stepwell.datapool.ops import Op, OpenGroup, R
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.shard import Shard
from stepwell.datapool.types import OWNER
from stepwell.gateway.access import GEMINI_BASES, UNDER
from tests.gateway.conftest import WatchedPort, local_pool, port_of

ADMIN, NEW = "an-admin-key-for-tests", "-rotated"
KEYS = {name: f"key-of-agent-{name}-for-tests" for name in "abcd"}
"""a and b: each with a channel of its own; c: in the channel of a; d: with none."""
A, B = KEYS["a"], KEYS["b"]
CHANNELS = ("chan-a", "chan-b", "train", "val")
HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": HI}
UID, GROUP = "group-of-a-0", "group-of-a"
SESSION = "session-s@a"
REFUSED = "has another owner; use the key that opened it"


def keys(suffix: str = "") -> dict[str, Any]:
    agents: dict[str, Any] = {name: {"key": key + suffix} for name, key in KEYS.items()}
    for name, channel in {"a": "chan-a", "b": "chan-b", "c": "chan-a"}.items():
        agents[name]["channel"] = channel
    return {"admin_keys": [ADMIN], "agent_keys": agents}


def filled(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: filled(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, names) for v in value]
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
            text = await answer.text()
            is_json = answer.content_type == "application/json" and text
            return answer.status, json.loads(text) if is_json else text

    async def route(self, name: str, key: str | None, t: str = UID, g: str = GROUP) -> Any:
        return await asked(self, ROWS[name], "", key, {"t": t, "g": g})


async def _state(pool: Any) -> Any:
    """All that is stored of `GROUP`, and how often."""
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


async def everything(pool: DataPoolClient) -> dict[tuple[str, ...], Any]:
    """All that is stored, and how often."""
    found: dict[tuple[str, ...], Any] = {}
    for channel in CHANNELS:
        for group in (await pool.list_groups(channel, limit=1000)).items:
            found[channel, group.prompt_uid] = group
        for row in (await pool.list_trajectories(channel, limit=1000)).items:
            found[channel, row.prompt_uid, row.trajectory_uid] = row
    return found


# -- the table -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A request that names something of agent a, and the status that each caller gets. Of those
    that nobody states, `own` is a's."""

    path: str
    """Path of the route."""
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    params: Mapping[str, str] = field(default_factory=dict)
    """Values of the path's parameters, where these are not {t}, {g} and {r}."""
    others: int | Mapping[str, int] = 403
    """Agents b, c, d."""
    sibling: int = 403
    """The key of another trajectory of the group."""
    a: int = 200
    admin: int | None = 200
    """None: not asked."""
    own: int | None = 200
    """The trajectory's own key, after a and the admin."""
    guess: int | Mapping[str, int] = 200
    """Agents and the admin, about what nobody opened."""
    guess_bound: int = 403
    """Keys of trajectories, about what nobody opened."""
    unknown: int | None = None
    """Status for whoever may use the URL, where the thing is not known because another gateway
    answered it; None: it is known everywhere."""
    words: str = REFUSED
    """Words in the 403 that b, c and d get."""


def both(path: str, body: Any, **how: Any) -> dict[str, Row]:
    """Below a trajectory's URL, and without one, named by headers."""
    named = {"x-trajectory-uid": "{t}", "x-prompt-uid": "{g}"}
    # A trajectory's key says by itself whose the call is.
    return {
        path: Row(f"{UNDER}/{path}", body, **how),
        f"{path}, header": Row(f"/v1/{path}", body, named, sibling=200, guess_bound=200, **how),
    }


def operators(path: str, body: Any = None, admin: int | None = 200, **how: Any) -> Row:
    how = {"a": 403, "own": 403, "guess": {"admin": admin or 0}, "words": "admin key", **how}
    return Row(path, body, admin=admin, **how)


STEP = {"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "{t}", "prompt_uid": "{g}"}
STEP |= {"step_index": 1, "rollout_log_probs": [-0.5]}
CALLS = {
    "chat/completions": CHAT,
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "responses/compact": {"input": "hi"},
    "messages": {**CHAT, "max_tokens": 9},
}
RESPONSE = {"guess": 404, "guess_bound": 404, "unknown": 404}
BY_URL = {**RESPONSE, "guess_bound": 403}
ITEM = {"input": [{"type": "item_reference", "id": "{item}"}, *HI]}
ROWS: dict[str, Row] = {
    **{name: row for path, body in CALLS.items() for name, row in both(path, body).items()},
    # Nothing of it is looked up where nobody has called it yet, and nothing is stored.
    **both("messages/count_tokens", CHAT, unknown=200),
    **{
        f"{base.rpartition('/')[2]}, {method}, {'URL' if base.startswith('/{') else 'header'}": Row(
            f"{base}/models/{{model:path}}:{method}",
            {"contents": [{"parts": [{"text": "hi"}]}]},
            *(
                ({},)
                if base.startswith("/{")
                else ({"x-trajectory-uid": "{t}", "x-prompt-uid": "{g}"},)
            ),
            **({} if base.startswith("/{") else {"sibling": 200, "guess_bound": 200}),
            params={"model:path": "m"},
            unknown=200 if method == "countTokens" else None,
        )
        for base in GEMINI_BASES
        for method in ("generateContent", "streamGenerateContent", "countTokens")
    },
    "tokens, URL": Row(f"{UNDER.removesuffix('/v1')}/inference/v1/generate", {"token_ids": [1, 2]}),
    "tokens, header": Row(
        "/inference/v1/generate",
        {"token_ids": [1, 2]},
        {"x-trajectory-uid": "{t}", "x-prompt-uid": "{g}"},
        sibling=200,
        guess_bound=200,
    ),
    "chat": Row(f"{UNDER}/chat/completions", CHAT),
    "retry": Row(f"{UNDER}/chat/completions", CHAT, {"idempotency-key": "k"}),
    "session": Row(
        "/v1/chat/completions",
        CHAT,
        {"x-trajectory-uid": "{s}"},
        sibling=200,
        guess={"b": 403, "c": 403, "d": 403},
        guess_bound=200,
    ),
    "session, URL": Row(
        f"{UNDER}/chat/completions",
        CHAT,
        params={"trajectory_uid": "{s}", "prompt_uid": "prompt-{s}"},
        own=403,
        guess={"b": 403, "c": 403, "d": 403},
    ),
    "new sibling": Row(
        f"{UNDER}/chat/completions",
        CHAT,
        params={"trajectory_uid": "new-{n}-{caller}", "prompt_uid": "{g}"},
        others={"b": 200, "c": 403, "d": 200},  # a prompt_uid names a group of a channel
        own=403,
    ),
    "continue": Row(
        "/v1/responses",
        {"input": "on", "previous_response_id": "{r}"},
        guess=400,
        guess_bound=400,
        unknown=400,
    ),
    "item": Row("/v1/responses", ITEM, **RESPONSE),
    "read": Row("/v1/responses/{response_id}", method="GET", **RESPONSE),
    "read, URL": Row(f"{UNDER}/responses/{{response_id}}", method="GET", **BY_URL),
    "forget": Row("/v1/responses/{response_id}", method="DELETE", admin=404, own=404, **RESPONSE),
    "forget, URL": Row(
        f"{UNDER}/responses/{{response_id}}", method="DELETE", admin=404, own=404, **BY_URL
    ),
    "register": Row(f"{UNDER}/register_trajectory", {"metadata": {"x": 1}}),
    "feedback": Row(f"{UNDER}/feedback", {"label": "bad"}, guess=404),
    "feedback by name": Row("/v1/feedback", {"trajectory_uid": "{t}", "label": "bad"}, guess=404),
    "reward": Row("/v1/rewards", {"trajectory_uid": "{t}", "reward": -9}, guess=404),
    "abort": Row(f"{UNDER}/abort_trajectory", {"reason": "no"}),
    "complete": Row(f"{UNDER}/complete_trajectory", {"reward": -9}),
    "complete by name": Row(
        "/v1/complete_trajectory", {"trajectory_uid": "{t}", "reward": -9}, guess=404
    ),
    "groups": Row("/v1/groups", {"n": 3, "prompt_uid": "{g}"}, own=403, admin=409),
    "models": Row(f"{UNDER}/models", method="GET", others=200),
    "model": Row(f"{UNDER}/models/stepwell", method="GET", others=200),
    "models, no URL": Row("/v1/models", method="GET", others=200, sibling=200, guess_bound=200),
    "model, no URL": Row(
        "/v1/models/stepwell", method="GET", others=200, sibling=200, guess_bound=200
    ),
    "models of Google's": Row(f"{UNDER}beta/models", method="GET", others=200),
    "model of Google's": Row(f"{UNDER}beta/models/stepwell", method="GET", others=200),
    "models of Google's, no URL": Row(
        "/v1beta/models", method="GET", others=200, sibling=200, guess_bound=200
    ),
    "model of Google's, no URL": Row(
        "/v1beta/models/stepwell", method="GET", others=200, sibling=200, guess_bound=200
    ),
    "ready": Row("/ready", method="GET", others=200, sibling=200, guess_bound=200),
    # Whether its own key deletes it is a test of its own.
    "delete": operators("/v1/trajectories/{trajectory_uid}", method="DELETE", own=None),
    "init": operators("/init_trajectory", {"trajectory_uid": "{t}", "prompt_uid": "{g}"}),
    "generate": operators("/generate", {**CHAT, "trajectory_uid": "{t}", "prompt_uid": "{g}"}),
    "submit": operators("/submit_steps", {"steps": [STEP], "channel": "chan-a"}),
    "compute reward": operators("/compute_reward", {"trajectory_uid": "{t}"}, 400),
    "start rollout": operators("/start_rollout", {"task_type": "{t}"}, 400),
    "write": operators(
        "/buffer/write",
        {"instance_id": "{g}", "trajectory_uid": "{t}", "reward": 1.0},
        guess={"admin": 400},
    ),
    "get rollouts": operators("/get_rollout_data", {}),
    "ack rollouts": operators("/ack_rollout_data", {"lease_id": "{t}"}, 400),
    "statistics": operators("/statistics", method="GET"),
    "metrics": operators("/metrics", method="GET"),
    "openapi": operators("/openapi.json", method="GET"),
    "pages": operators("/ui/api/about", method="GET"),
    "pages: live": operators("/ui/api/live", None, None, method="GET"),
    "pages: export": operators("/ui/api/export", method="GET"),
    "pages: metrics": operators("/ui/api/metrics", method="GET"),
    "pages: runs": operators("/ui/api/runs", method="GET"),
    "pages: compare": operators("/ui/api/compare", None, None, method="GET"),
    "pages: compare as CSV": operators("/ui/api/compare.csv", None, None, method="GET"),
    "pages: batches": operators("/ui/api/batches", method="GET"),
    "pages: batch": operators("/ui/api/batch", None, None, method="GET"),
    "pages: groups": operators("/ui/api/groups", method="GET"),
    "pages: trajectories": operators("/ui/api/trajectories", method="GET"),
    "pages: events": operators("/ui/api/events", method="GET"),
    "pages: group": operators("/ui/api/group", None, None, method="GET"),
    "pages: trajectory": operators("/ui/api/trajectory", None, None, method="GET"),
    "pages: tokens": operators("/ui/api/tokens", None, None, method="GET"),
    "pages: archive": operators("/ui/api/archive", None, None, method="GET"),
    "pages: prompts": operators("/ui/api/prompts", None, None, method="GET"),
    "pages: picture": operators("/ui/api/picture", None, None, method="GET"),
    "pages: find": operators("/ui/api/find", None, None, method="GET"),
    "pages: mark": operators("/ui/api/mark", {"trajectory_uid": "{t}"}, None),
    "pages: reward": operators("/ui/api/reward", {"trajectory_uid": "{t}", "reward": 1}, None),
    "pages: dry run": operators("/ui/api/dry_run", {}, None),
    "pages: delete": operators("/ui/api/delete", {"trajectory_uid": "{t}"}, None),
}
OPEN = {
    *(("GET", path) for path in ("/health", "/ui", "/ui/", "/ui/{file:path}")),
    *(("GET", path) for path in ("/", "/{trajectory_uid}/{prompt_uid}", "/ui/api/{question:path}")),
    *(("POST", path) for path in ("/ui/api/login", "/ui/api/logout")),
}
"""Routes that name nobody and tell nothing; `test_keys.py` says who may call them."""


@dataclass
class Opened:
    """Names of what agent a opened for a row: {t} of {g}, its response {r}, and the session {s}."""

    names: dict[str, str]
    own: str
    sibling: str


async def opened(http: Http, n: int) -> Opened:
    def read(answer: tuple[int, Any]) -> Any:
        assert answer[0] == 200, answer
        return answer[1]

    group = read(await http("/v1/groups", A, {"n": 3, "prompt_uid": f"{GROUP}-{n}"}))
    own, sibling = (each["api_key"] for each in group["trajectories"][:2])
    response = read(await http("/v1/responses", own, {"input": "hi"}))
    read(await http("/v1/chat/completions", A, CHAT, **{"x-session-id": f"s{n}"}))
    names = {"t": f"{GROUP}-{n}-0", "g": f"{GROUP}-{n}", "n": str(n), "s": f"session-s{n}@a"}
    names |= {"r": response["id"], "item": response["output"][0]["id"]}
    return Opened(names, own, sibling)


def guessed(n: int, caller: str) -> dict[str, str]:
    """Names of things that nobody opened."""
    names = {"t": f"no-{n}-{caller}", "g": f"no-group-{n}-{caller}", "n": f"no-{n}"}
    names |= {"r": f"resp_{n:032}", "item": f"msg_{n:032}_0", "s": f"session-no{n}{caller}@a"}
    return names


async def asked(http: Http, row: Row, caller: str, key: str | None, names: Any) -> tuple[int, Any]:
    names = {**names, "caller": caller}
    params = {"trajectory_uid": "{t}", "prompt_uid": "{g}", "response_id": "{r}", **row.params}
    path, headers, body = (
        filled(v, names) for v in (filled(row.path, params), row.headers, row.body)
    )
    return await http(path, key, body, row.method, **headers)


@pytest.mark.parametrize("where", ["here", "another gateway", "after a restart"])
async def test_what_one_agents_key_opened_is_no_other_agents(
    worlds: Any, tmp_path: Path, where: str
) -> None:
    suffix = NEW if where == "after a restart" else ""
    async with aiohttp.ClientSession() as session:
        async with local_pool(PoolConfig(), tmp_path) as pool:
            world = await worlds(pool=pool, **keys())
            here = Http(session, world.url)
            targets = [await opened(here, n) for n in range(len(ROWS))]
            if not suffix:
                other = world if where == "here" else await worlds(pool=pool, **keys())
                wrong = await _wrong(session, other, tmp_path, where, targets, suffix)
        if suffix:
            async with local_pool(PoolConfig(), tmp_path) as pool:
                other = await worlds(pool=pool, **keys(suffix))
                wrong = await _wrong(session, other, tmp_path, where, targets, suffix)
    assert not wrong, "\n".join(wrong)


def journalled(folder: Path) -> bytes:
    """The last change that the pool in `folder` has acknowledged. Its segments come and go: those
    that hold nothing alive are removed while one looks."""
    return (folder / "pool.acked").read_bytes()


async def _wrong(
    session: aiohttp.ClientSession,
    world: Any,
    folder: Path,
    where: str,
    targets: list[Opened],
    suffix: str,
) -> list[str]:
    """Answers that are not as the table says, and what they changed."""
    http, pool, wrong = Http(session, world.url), world.pool, []
    before, written = await everything(pool), journalled(folder)
    assert written
    for (name, row), target in zip(ROWS.items(), targets, strict=True):
        n = target.names["n"]
        agents = {who: key + suffix for who, key in KEYS.items()}
        bound = {"own": target.own, "sibling": target.sibling}
        mine = {"a": agents["a"], "admin": ADMIN, "own": target.own}
        foreign = {"nobody": None, **{k: agents[k] for k in "bcd"}, "sibling": target.sibling}
        is_known = row.unknown is None or where == "here"

        def guess(who: str, row: Row = row) -> int:
            if who in ("own", "sibling"):
                return row.guess_bound
            if isinstance(row.guess, int):
                return row.guess
            default = row.a if who in KEYS else 200
            return row.guess.get(who, default)

        def expected(who: str, row: Row = row, is_known: bool = is_known) -> int | None:
            if who == "nobody":
                return 401
            if who == "admin" and row.admin is None:
                return None
            if not is_known and (who != "sibling" or not row.path.startswith(UNDER)):
                return row.unknown
            if who in "bcd":
                return row.others if isinstance(row.others, int) else row.others[who]
            status: int | None = getattr(row, who)
            return status

        tries = [(who, key, target.names, expected(who)) for who, key in foreign.items()]
        guesses = [
            (who, key, guessed(int(n), who), guess(who))
            for who, key in {**agents, "admin": ADMIN, **bound}.items()
            if who != "admin" or row.admin is not None
        ]
        tries += sorted(guesses, key=lambda each: each[3] < 400)  # those that write come last
        tries += [(who, key, target.names, expected(who)) for who, key in mine.items()]
        for who, key, names, status in tries:
            if status is None:
                continue
            is_theirs = names is target.names
            # To list all costs most: it is done where something was written since, and only
            # around a call that may not write, or not to what is a's.
            is_foreign = is_theirs and who in foreign and who != "sibling"
            is_watched = status >= 400 or is_foreign
            if is_watched and (now := journalled(folder)) != written:
                written, before = now, await everything(pool)
            asked_before = len(world.engine.requests)
            got, answer = await asked(http, row, who, key, names)
            text = str(answer)
            case = f"{name}: {who} about {'its' if is_theirs else 'a guessed one'}"
            if got != status:
                wrong.append(f"{case}: {got}, not {status}: {text[:200]}")
            after = before
            if is_watched and (now := journalled(folder)) != written:
                written, after = now, await everything(pool)
            if got >= 400 and after != before and who != "admin":
                wrong.append(f"{case}: {got}, but the pool changed")
            if got >= 400 and len(world.engine.requests) > asked_before:
                wrong.append(f"{case}: {got}, but the engine was asked")
            if is_foreign:
                of_a = {k: v for k, v in before.items() if v.metadata.get(OWNER) == "a"}
                if any(after.get(k) != of_a[k] for k in of_a):
                    wrong.append(f"{case}: changed what is a's")
            if who in foreign:
                if got == 403 and is_theirs and who in "bcd" and row.words not in text:
                    wrong.append(f"{case}: {text}")
                if got >= 400 and ("fine" in text or "sw." in text):
                    wrong.append(f"{case}: tells {text}")
            before = after
    return wrong


def test_every_route_has_a_row(world: Any) -> None:
    """A new one says who may do what with it."""
    served = {(each.method, each.path) for each in world.app.routes if each.method != "HEAD"}
    tested = {
        (row.method, row.path.replace("models/stepwell", "models/{model:path}"))
        for row in ROWS.values()
    }
    assert served > OPEN
    assert tested == served - OPEN


async def test_a_session_of_another_key_is_not_found_by_its_uid(worlds: Any) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        assert (await http("/v1/chat/completions", A, CHAT, **{"x-session-id": "s"}))[0] == 200
        for other in (B, KEYS["c"]):
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


async def test_what_the_operator_opened_is_open_to_agent_keys_and_others_routes_are_the_operators(
    worlds: Any,
) -> None:
    world = await worlds(**keys())
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        opening = {"trajectory_uid": "op", "prompt_uid": "op-group"}
        assert (await http("/init_trajectory", ADMIN, opening))[0] == 200
        for key in (A, B, KEYS["d"]):
            assert (await http.route("chat", key, "op", "op-group"))[0] == 200
            for path in (
                "/init_trajectory",
                "/generate",
                "/submit_steps",
                "/buffer/write",
                "/get_rollout_data",
            ):
                assert (await http(path, key, {}))[0] == 403
            assert (await http("/v1/trajectories/op", key, None, "DELETE"))[0] == 403
        taken = {"metadata": {"stepwell_owner": "b"}}
        status, refused = await http("/op/op-group/v1/register_trajectory", B, taken)
        assert (status, "leave it out" in str(refused)) == (400, True)


@pytest.mark.parametrize("where", ["here", "another gateway"])
async def test_a_session_or_group_of_the_operators_is_taken_by_no_agent_key(
    worlds: Any, where: str
) -> None:
    async with local_pool() as pool, aiohttp.ClientSession() as session:
        worlds_ = [await worlds(pool=pool, **keys()) for _ in range(2)]
        http, other = (Http(session, each.url) for each in worlds_)
        other = http if where == "here" else other
        uid, group = "session-s@admin", "task@admin"
        for is_begun in (False, True):
            for key in KEYS.values():
                for path, body, named in (
                    ("/v1/chat/completions", CHAT, {"x-trajectory-uid": uid}),
                    ("/v1/chat/completions", CHAT, {"x-prompt-uid": group}),
                    (f"/{uid}/prompt-{uid}/v1/chat/completions", CHAT, {}),
                    (f"/{uid}/p/v1/chat/completions", CHAT, {}),
                    (f"/new/{group}/v1/chat/completions", CHAT, {}),
                    ("/v1/groups", {"n": 2, "prompt_uid": group}, {}),
                    *(
                        [("/v1/rewards", {"trajectory_uid": uid, "reward": 1.0}, {})]
                        if is_begun
                        else []
                    ),
                ):
                    status, refused = await other(path, key, body, **named)
                    assert (status, REFUSED in str(refused)) == (403, True), (path, refused)
                # What is named so without the ending is not the operator's session.
                named = {"x-trajectory-uid": "session-s"}
                if key in (A, KEYS["c"]) and where == "here":
                    status = (await other("/v1/chat/completions", key, CHAT, **named))[0]
                    assert status == (200 if key == A else 403)
            mine = {"x-session-id": "s"}
            _, answer = await http("/v1/responses", ADMIN, {"input": "hi"}, **mine)
            for key in KEYS.values():
                read = await http(f"/v1/responses/{answer['id']}", key, None, "GET")
                assert read[0] == 403
            declared = await http("/v1/groups", ADMIN, {"n": 2, "prompt_uid": group})
            uids = [each["trajectory_uid"] for each in declared[1]["trajectories"]]
            assert uids == ["task-0@admin", "task-1@admin"]
        rows = {row.trajectory_uid: row for row in (await pool.list_trajectories()).items}
        assert (rows[uid].n_steps, rows[uid].metadata.get(OWNER)) == (2, None)


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
            assert await gateway.route("abort", own) == (200, late)
            late |= {"accepted": False, "reason": "it was deleted"}
            for name in ("complete", "reward", "complete by name"):
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


@pytest.mark.parametrize("who", ["a", "d", "admin"])
@pytest.mark.parametrize("where", ["here", "another gateway"])
async def test_a_reward_by_uid_is_one_question_to_the_pool(
    worlds: Any, who: str, where: str
) -> None:
    async with local_pool() as pool, aiohttp.ClientSession() as session:
        here, there = [Http(session, (await worlds(pool=pool, **keys())).url) for _ in range(2)]
        key = ADMIN if who == "admin" else KEYS[who]
        assert (await here("/v1/chat/completions", key, CHAT, **{"x-session-id": "s"}))[0] == 200
        http = here if where == "here" else there
        uid = f"session-s@{ {'a': 'a', 'd': '', 'admin': 'admin'}[who] }"
        asked = port_of(pool).asked
        for path, body, op in (
            ("/v1/rewards", {"reward": 0.5}, "SetReward"),
            ("/v1/feedback", {"label": "good"}, "Mark"),
            ("/v1/complete_trajectory", {"reward": 1.0}, "CompleteTrajectory"),
        ):
            asked.clear()
            answer = await http(path, key, {"trajectory_uid": uid, **body})
            assert answer[0] == 200, answer
            told = [type(each).__name__ for each in asked]
            if who != "admin" or where == "here":  # it may be in any channel
                assert told == [op]
            assert "Listing" not in "".join(told)


async def test_without_keys_a_trajectorys_own_key_deletes_it_alone_too(worlds: Any) -> None:
    world = await worlds()
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        _, opened = await http("/v1/groups", None, {"n": 2, "prompt_uid": GROUP})
        own, sibling = (each["api_key"] for each in opened["trajectories"])
        for k, key in enumerate((own, sibling)):
            assert (await http.route("chat", key, f"{GROUP}-{k}"))[0] == 200
        path = f"/v1/trajectories/{UID}"
        assert (await http(path, sibling, None, "DELETE"))[0] == 403
        assert await http(path, own, None, "DELETE") == (200, {"deleted": [UID], "leased": []})
        assert (await http.route("chat", sibling, f"{GROUP}-1"))[0] == 200
        status, gone = await http(f"/v1/trajectories/{GROUP}-1", None, None, "DELETE")
        assert (status, f"{GROUP}-1" in gone["deleted"]) == (200, True)
        assert not (await world.pool.list_groups()).items


class Meeting(WatchedPort):
    """The way to a pool where the first n declarations of groups wait for each other."""

    def __init__(self, port: Shard, n: int) -> None:
        super().__init__(port)
        self._missing, self._all_here = n, asyncio.Event()

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        if isinstance(op, OpenGroup):
            self._missing -= 1
            if self._missing <= 0:
                self._all_here.set()
            await self._all_here.wait()
        return await super().call(op, timeout_s)


@pytest.mark.parametrize("rivals", ["bc", "d"])
async def test_a_group_that_several_keys_declare_at_the_same_moment_is_one_keys(
    worlds: Any, rivals: str
) -> None:
    """In channels of their own and in a common one, over two gateways."""
    async with local_pool() as inner, aiohttp.ClientSession() as session:
        callers = [KEYS[name] for name in ("a", *rivals)]
        pool = DataPoolClient([Meeting(inner.shards[0], len(callers))])
        gateways = [Http(session, (await worlds(pool=pool, **keys())).url) for _ in range(2)]
        tries = [
            gateways[i % 2]("/v1/groups", key, {"n": 2, "prompt_uid": GROUP})
            for i, key in enumerate(callers)
        ]
        answers = await asyncio.gather(*tries)
        won = [i for i, (status, _) in enumerate(answers) if status == 200]
        assert len(won) == 1, answers
        for i, (status, answer) in enumerate(answers):
            if i not in won:
                assert status == 403, answer
                assert f"group {GROUP!r} {REFUSED}" in str(answer)
                assert "sw." not in str(answer), "a trajectory's key"
        owners = {row.metadata.get(OWNER) for row in (await everything(pool)).values()}
        assert len(owners) == 1, "the others opened nothing"
        for http in gateways:
            again = await http("/v1/groups", callers[won[0]], {"n": 2, "prompt_uid": GROUP})
            assert again[0] == 200

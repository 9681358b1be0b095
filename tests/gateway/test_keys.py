"""Access by bearer keys of two scopes and by keys of trajectories; none is ever shown."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from starlette.datastructures import Headers

from stepwell.gateway.access import Access, KeyRing, Named, presented
from stepwell.gateway.config import AgentKey, GatewayConfig, Tuning, Wiring
from stepwell.gateway.endpoints import ENDPOINTS, Finder
from stepwell.gateway.openapi import described
from stepwell.gateway.server import HttpServer
from stepwell.gateway.services import Services
from tests.gateway.conftest import save_tokenizer

ADMIN = "the-admin's-key-of-this-test"
AGENT = "the-agents'-key-of-this-test"
KEYS: Any = {"admin_keys": [ADMIN], "agent_keys": {"bot": {"key": AGENT}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def ring(*admin: str, agent: tuple[str, ...] = ()) -> KeyRing:
    config = GatewayConfig.model_construct(
        admin_keys=tuple(SecretStr(k) for k in admin),
        agent_keys={k: AgentKey.model_construct(key=SecretStr(k)) for k in agent},
    )
    return KeyRing(config)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def x_api_key(key: str) -> dict[str, str]:
    return {"x-api-key": key}


class Http:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def __call__(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None
    ) -> tuple[int, Any]:
        async with self.session.request(
            method, self.url + path, headers=headers, json=body
        ) as response:
            return response.status, await response.json(content_type=None)


@pytest.fixture
async def locked(worlds: Any) -> Any:
    """A gateway with an admin's and an agents' key."""
    return await worlds(**KEYS)


@pytest.fixture
async def http(locked: Any) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session, locked.url)


# -- what needs which key --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", "/health", ("open", None)),
        ("HEAD", "/", ("open", None)),
        ("HEAD", "/t/p", ("open", None)),
        ("GET", "/ready", ("agent", None)),
        ("POST", "/v1/chat/completions", ("agent", None)),
        ("GET", "/v1/models", ("agent", None)),
        ("GET", "/v1/models/stepwell", ("agent", None)),
        ("GET", "/v1/models/Qwen/Qwen3", ("agent", None)),
        ("POST", "/t/p/v1/messages/count_tokens", ("agent", ("t", "p"))),
        ("POST", "/t/p/v1/complete_trajectory", ("agent", ("t", "p"))),
        ("POST", "/v1/p/v1/responses", ("agent", ("v1", "p"))),
        ("POST", "/init_trajectory", ("admin", None)),
        ("POST", "/generate", ("admin", None)),
        ("POST", "/submit_steps", ("admin", None)),
        ("GET", "/statistics", ("admin", None)),
        ("POST", "/buffer/write", ("admin", None)),
        ("POST", "/get_rollout_data", ("admin", None)),
        ("GET", "/openapi.json", ("admin", None)),
        ("GET", "/ui", ("open", None)),
        ("GET", "/ui/vendor/preact.js", ("open", None)),
        ("POST", "/ui/api/login", ("open", None)),
        ("GET", "/ui/api/groups", ("dashboard", None)),
        ("POST", "/ui/api/mark", ("dashboard", None)),
        ("GET", "/ui/api/", ("dashboard", None)),
        ("GET", "/ui/api/no/such", ("dashboard", None)),
        ("GET", "/v1/nothing", ("agent", None)),
        ("HEAD", "/v1/models", ("agent", None)),
        ("GET", "/v1/chat/completions", ("agent", None)),
        ("GET", "/t/p/v1/nothing", ("agent", ("t", "p"))),
        ("GET", "/t/p/v1beta/nothing", ("agent", ("t", "p"))),
        ("GET", "/a%2Fb/p/v1/models/m", ("agent", ("a/b", "p"))),
        ("POST", "/v1beta/models/m:generateContent", ("agent", None)),
        ("POST", "/t/p/v1beta/models/a/b:countTokens", ("agent", ("t", "p"))),
        ("DELETE", "/v1/trajectories/t", ("agent", None)),
        ("GET", "/t/p", ("admin", None)),
        ("GET", "/health\n", ("admin", None)),
        ("GET", "/uix", ("admin", None)),
        ("POST", "/ui/api/v1/responses", ("agent", ("ui", "api"))),
        ("GET", "/", ("open", None)),
        ("POST", "/", ("admin", None)),
        ("GET", "/health/", ("admin", None)),
        ("POST", "//p/v1/responses", ("admin", None)),
        ("POST", "/a/b/c/v1/responses", ("admin", None)),
        ("GET", "", ("admin", None)),
    ],
)
def test_a_path_decides_what_is_needed(method: str, path: str, needed: Any) -> None:
    _, _, access, url = Finder(ENDPOINTS).find(method, path)
    assert (access, url) == needed


ADMINS = frozenset(
    (
        "/init_trajectory",
        "/generate",
        "/submit_steps",
        "/compute_reward",
        "/openapi.json",
        "/start_rollout",
        "/buffer/write",
        "/get_rollout_data",
        "/ack_rollout_data",
        "/statistics",
        "/metrics",
    )
)
PAGES = frozenset(("/ui", "/ui/", "/ui/{file:path}", "/ui/api/login", "/ui/api/logout"))


def due(method: str, path: str) -> Access:
    """The access that the documentation promises of an endpoint."""
    if path in ("/", "/health") or path in PAGES:
        return "open"
    if path == "/{trajectory_uid}/{prompt_uid}":
        return "open" if method == "HEAD" else "admin"
    if path.startswith("/ui/"):
        return "dashboard"
    return "admin" if path in ADMINS else "agent"


async def test_every_endpoint_of_the_router_needs_what_is_promised_and_no_less(
    locked: Any, http: Http
) -> None:
    """Access is as `due` says, also for requests without a key and with an agent's key."""
    routes = locked.app.router.routes
    assert len(routes) > 60
    assert {type(each).__name__ for each in routes} == {"Endpoint"}
    assert {each.path for each in routes} > ADMINS | PAGES
    for each in routes:
        assert each.access == due(each.method, each.path), (each.method, each.path)
        path = re.sub(r"\{\w+(:path)?\}", "x", each.path)
        for headers, may in ((None, ("open",)), (bearer(AGENT), ("open", "agent"))):
            async with http.session.request(
                each.method, http.url + path, headers=headers, allow_redirects=False
            ) as response:
                status = response.status
            refused = 403 if headers else 401
            # A login has its key in the body; whose trajectory is deleted the handler asks.
            is_judged = each.path == "/ui/api/login" and headers is None
            is_judged |= each.path.startswith("/v1/trajectories/") and headers is not None
            is_refused = each.access not in may or is_judged
            assert (status == refused) == is_refused, (each.method, path, status)
    assert not locked.stored()


async def test_no_route_answers_without_a_key_but_health_and_probes(
    locked: Any, http: Http
) -> None:
    served = described(ENDPOINTS, {})["paths"]
    assert len(served) > 15
    tried = [("HEAD", "/"), ("HEAD", "/t/p"), ("HEAD", "/health")]
    for template, methods in served.items():
        path = re.sub(r"\{\w+\}", "x", template)
        tried += [(m.upper(), path) for m in methods if m in ("get", "post", "delete")]
    for method, path in tried:
        status, _ = await http(method, path)
        is_open = path == "/health" or (method, path) in (("HEAD", "/"), ("HEAD", "/t/p"))
        assert (status == 401) != is_open, (method, path, status)
    assert not locked.stored()


async def test_paths_that_do_not_exist_tell_nothing(http: Http) -> None:
    for path in ("/openapi.json", "/no/such/path", "/v1/nothing", "/t/p/v1/nothing"):
        assert (await http("GET", path))[0] == 401
    assert (await http("GET", "/no/such/path", bearer(ADMIN)))[0] == 404
    assert (await http("GET", "/v1/nothing", bearer(AGENT)))[0] == 404


@pytest.mark.parametrize("header", [bearer, x_api_key])
async def test_an_admin_may_do_everything_in_either_header(http: Http, header: Any) -> None:
    key = header(ADMIN)
    assert (await http("POST", "/init_trajectory", key, {"trajectory_uid": "t"}))[0] == 200
    assert (await http("POST", "/t/prompt-t/v1/chat/completions", key, CHAT))[0] == 200
    assert (await http("POST", "/generate", key, CHAT))[0] == 200
    assert (await http("POST", "/t/prompt-t/v1/complete_trajectory", key, {}))[0] == 200
    assert (await http("GET", "/statistics", key))[0] == 200
    assert (await http("GET", "/ready", key))[0] == 200


@pytest.mark.parametrize("header", [bearer, x_api_key])
async def test_an_agent_may_call_and_close_but_nothing_else(http: Http, header: Any) -> None:
    key = header(AGENT)
    assert (await http("POST", "/t/p/v1/register_trajectory", key, {}))[0] == 200
    assert (await http("POST", "/t/p/v1/chat/completions", key, CHAT))[0] == 200
    assert (await http("POST", "/v1/chat/completions", key, CHAT))[0] == 200
    assert (await http("POST", "/t/p/v1/complete_trajectory", key, {"reward": 1.0}))[0] == 200
    for method, path in [
        ("POST", "/init_trajectory"),
        ("POST", "/generate"),
        ("POST", "/submit_steps"),
        ("POST", "/compute_reward"),
        ("POST", "/start_rollout"),
        ("POST", "/get_rollout_data"),
        ("GET", "/statistics"),
        ("DELETE", "/v1/trajectories/t"),
    ]:
        status, got = await http(method, path, key)
        assert status == 403, path
        assert "admin_keys" in got["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        bearer("wrong"),
        bearer(ADMIN[:-1]),
        bearer(ADMIN + "x"),
        bearer("ümlaut"),
        {"authorization": f"Basic {ADMIN}"},
        {"authorization": ADMIN},
        {"authorization": "Bearer "},
        x_api_key("sw.dA.cA"),
        {"cookie": f"key={ADMIN}"},
    ],
)
async def test_anything_but_a_key_is_refused(
    locked: Any, http: Http, headers: dict[str, str]
) -> None:
    status, got = await http("POST", "/v1/chat/completions", headers, CHAT)
    assert status == 401
    assert got["error"]["code"] == "invalid_api_key"
    assert not locked.engine.requests


async def test_of_two_headers_the_one_that_is_known_counts(http: Http) -> None:
    both = {**bearer(AGENT), **x_api_key("dummy")}
    assert (await http("POST", "/v1/chat/completions", both, CHAT))[0] == 200
    assert presented(Headers({"authorization": "bearer  k ", "x-api-key": ""})) == ["k"]


async def test_the_sdks_raise_their_own_errors(locked: Any) -> None:
    def sdks(key: str) -> Any:
        return (
            openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0),
            anthropic.AsyncAnthropic(base_url=locked.url, api_key=key, max_retries=0),
        )

    message: Any = {"model": "m", "max_tokens": 9, "messages": CHAT["messages"]}
    gpt, claude = sdks("wrong")
    async with gpt, claude:
        with pytest.raises(openai.AuthenticationError, match="not valid for this gateway"):
            await gpt.chat.completions.create(**CHAT)
        with pytest.raises(openai.AuthenticationError, match="not valid for this gateway"):
            await gpt.responses.create(model="m", input="hi")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await claude.messages.create(**message)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    other = locked.gateway.keys.issue("t", "p")
    gpt, claude = sdks(other)
    async with gpt, claude:
        elsewhere = claude.with_options(base_url=f"{locked.url}/t2/p")
        with pytest.raises(anthropic.PermissionDeniedError, match="is for /t/p"):
            await elsewhere.messages.create(**message)
        with pytest.raises(openai.PermissionDeniedError, match="is for /t/p"):
            await gpt.with_options(base_url=f"{locked.url}/t2/p/v1").responses.create(
                model="m", input="hi"
            )


async def test_without_keys_everything_is_open(world: Any) -> None:
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        assert (await http("POST", "/init_trajectory", body={}))[0] == 200
        assert (await http("GET", "/statistics", bearer("whatever")))[0] == 200
        assert (await http("POST", "/t/p/v1/chat/completions", bearer("x"), CHAT))[0] == 200


# -- keys of trajectories --------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, KEYS])
async def test_a_trajectory_key_names_its_trajectory_where_the_url_has_none(
    worlds: Any, options: Any
) -> None:
    world = await worlds(**options)
    key = world.gateway.keys.issue("t ü", "p.1")
    async with (
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as gpt,
        anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0) as claude,
    ):
        await gpt.chat.completions.create(**CHAT)
        await claude.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}]
        )
    assert [(s.trajectory_uid, s.prompt_uid) for s in world.stored()] == [("t ü", "p.1")] * 2


async def test_a_trajectory_key_reads_no_other_trajectorys_stored_response(
    locked: Any, http: Http
) -> None:
    mine, other = (bearer(locked.gateway.keys.issue(uid, "p")) for uid in ("mine", "other"))
    _, response = await http("POST", "/v1/responses", mine, {"model": "m", "input": "hello"})
    path = f"/v1/responses/{response['id']}"
    for key, status in ((mine, 200), (other, 403), (bearer(ADMIN), 200)):
        assert (await http("GET", path, key))[0] == status


async def test_a_trajectory_key_continues_no_other_trajectorys_response(
    locked: Any, http: Http
) -> None:
    mine, other = (bearer(locked.gateway.keys.issue(uid, "p")) for uid in ("mine", "other"))
    _, response = await http("POST", "/v1/responses", mine, {"input": "hello"})
    more = {"input": "go on", "previous_response_id": response["id"]}
    status, refused = await http("POST", "/v1/responses", other, more)
    assert status == 403
    assert "has another owner" in refused["error"]["message"]
    for key in (mine, bearer(ADMIN)):
        assert (await http("POST", "/v1/responses", key, more))[0] == 200
    assert [s.trajectory_uid for s in locked.stored()] == ["mine"] * 3


async def test_a_trajectory_key_refers_to_no_other_trajectorys_items(
    locked: Any, http: Http
) -> None:
    mine, other = (bearer(locked.gateway.keys.issue(uid, "p")) for uid in ("mine", "other"))
    _, response = await http("POST", "/v1/responses", mine, {"input": "hello"})
    said = {"type": "item_reference", "id": response["output"][0]["id"]}
    asked = {"type": "message", "role": "user", "content": "hello"}
    more = {"input": [asked, said, {**asked, "content": "go on"}]}
    status, refused = await http("POST", "/v1/responses", other, more)
    assert status == 403
    assert "has another owner" in refused["error"]["message"]
    for key in (mine, bearer(ADMIN)):
        assert (await http("POST", "/v1/responses", key, more))[0] == 200
    assert "other" not in {s.trajectory_uid for s in locked.stored()}


async def test_a_trajectory_key_works_for_its_trajectory_alone(locked: Any, http: Http) -> None:
    key = bearer(locked.gateway.keys.issue("t", "p"))
    assert (await http("POST", "/t/p/v1/chat/completions", key, CHAT))[0] == 200
    for path in ("/u/p/v1/chat/completions", "/t/q/v1/abort_trajectory", "/v1/p/v1/models"):
        status, got = await http("POST", path, key, CHAT)
        assert status == 403
        assert "is for /t/p" in got["error"]["message"]
    for path in ("/init_trajectory", "/generate", "/statistics"):
        assert (await http("POST", path, key))[0] == 403
    assert (await http("POST", "/t/p/v1/complete_trajectory", key, {}))[0] == 200
    assert {s.trajectory_uid for s in locked.stored()} == {"t"}


async def test_without_keys_a_trajectory_key_is_still_held_to_its_url(world: Any) -> None:
    key = bearer(world.gateway.keys.issue("t", "p"))
    async with aiohttp.ClientSession() as session:
        http = Http(session, world.url)
        assert (await http("POST", "/u/p/v1/chat/completions", key, CHAT))[0] == 403
        assert (await http("POST", "/t/p/v1/chat/completions", key, CHAT))[0] == 200


async def test_an_admins_key_beside_a_trajectory_key_goes_anywhere(locked: Any, http: Http) -> None:
    both = {**bearer(locked.gateway.keys.issue("t", "p")), **x_api_key(ADMIN)}
    assert (await http("POST", "/u/p/v1/chat/completions", both, CHAT))[0] == 200


uids = st.text(min_size=1).filter(lambda s: "/" not in s and s.isprintable())


@given(uids, uids, st.booleans())
def test_a_trajectory_key_reads_back_as_what_it_was_made_for(
    uid: str, prompt_uid: str, has_keys: bool
) -> None:
    keys = ring(*[ADMIN] * has_keys)
    key = keys.issue(uid, prompt_uid)
    assert keys.read(key) == (uid, prompt_uid)
    assert key == keys.issue(uid, prompt_uid)
    assert key.isascii()
    assert not set(key) & set(" ,;/\"'\n")


@given(st.text() | st.from_regex(r"sw(\.[A-Za-z0-9_=-]*){1,4}", fullmatch=True))
def test_other_text_is_no_trajectory_key(text: str) -> None:
    assert ring(ADMIN).read(text) is None
    named = ring().read(text)
    # Without keys there is nothing to forge: what reads is exactly what would have been issued.
    assert named is None or text.startswith(ring().issue(*named))


@given(uids, uids, st.data())
def test_a_trajectory_key_cannot_be_altered(uid: str, prompt_uid: str, data: st.DataObject) -> None:
    keys = ring(ADMIN)
    key = keys.issue(uid, prompt_uid)
    at = data.draw(st.integers(0, len(key) - 1))
    char = data.draw(st.sampled_from("Aa0_-.=").filter(lambda c: c != key[at]))
    assert keys.read(key[:at] + char + key[at + 1 :]) is None
    assert keys.read(ring("another-admin's-key").issue(uid, prompt_uid)) is None
    assert keys.read(ring().issue(uid, prompt_uid)) is None


@pytest.mark.parametrize("admins", [(ADMIN,), ()], ids=["admin", "agents alone"])
def test_whoever_has_an_agent_key_can_make_no_key_of_anothers_trajectory(
    admins: tuple[str, ...],
) -> None:
    a, b = "the-key-of-agent-a", "the-key-of-agent-b"
    keys = ring(*admins, agent=(a, b))
    for known in ((a,), (b,)):
        assert keys.read(ring(agent=known).issue("t", "p")) is None
        assert keys.read(ring(*known).issue("t", "p")) is None
    assert keys.read(keys.issue("t", "p")) == ("t", "p")


def test_trajectory_keys_outlive_the_renewal_of_keys() -> None:
    old = ring("the-first-admin's-key").issue("t", "p")
    both = ring("the-second-admin's-key", "the-first-admin's-key")
    assert both.read(old) == ("t", "p")
    new = both.issue("t", "p")
    after = ring("the-second-admin's-key")
    assert after.read(new) == ("t", "p")
    assert after.read(old) is None
    only_agents = ring(agent=("the-only-agents'-key",))
    assert only_agents.read(only_agents.issue("t", "p")) == ("t", "p")


def test_every_configured_key_is_compared() -> None:
    keys = ring("admin-1", "admin-2", agent=("agent-1", "agent-2"))
    url: Named = ("t", "p")
    for key, access in [("admin-2", "admin"), ("agent-1", "agent"), ("agent-2", "agent")]:
        assert keys.authorize(Headers(bearer(key)), "agent", url).access == access


# -- configuration, and what is never shown --------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host": "0.0.0.0"}, "which other machines reach"),
        ({"host": "::"}, "STEPWELL_ADMIN_KEY"),
        ({"admin_keys": ["short-hushed"]}, "key has 12 characters; use at least 16"),
        ({"admin_keys": [""]}, "key has 0 characters"),
        ({"agent_keys": {"bot": {"key": "with a space, hushed"}}}, "key has 20 characters"),
        ({"agent_keys": {"bot": {"key": 12345678901234567890}}}, "agent_keys.bot.key"),
        ({"agent_keys": {"bot": "hushed"}}, "agent_keys.bot"),
        ({"agent_keys": ["hushed"]}, "agent_keys have names"),
        ({"agent_keys": {"admin": {"key": AGENT}}}, "choose another name"),
        ({"admin_keys": [12345678901234567890]}, "list of strings in quotes"),
        ({"admin_keys": {"hushed": 1}}, "list of strings in quotes"),
        ({"admin_keys": ["sw.hushed-hushed-hushed"]}, "begins with 'sw.'"),
        ({"admin_keys": [ADMIN], "agent_keys": {"bot": {"key": ADMIN}}}, "hold a key twice"),
    ],
)
def test_a_wrong_key_option_is_refused_without_showing_it(options: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named) as refused:
        GatewayConfig(**options)
    for hidden in ("hushed", "1234567890", ADMIN, AGENT):
        assert hidden not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2"])
def test_with_a_key_any_address_may_be_listened_on(host: str) -> None:
    assert GatewayConfig(host=host, agent_keys=KEYS["agent_keys"]).host == host


def test_no_key_is_in_a_repr_or_a_saved_configuration() -> None:
    config = GatewayConfig(**KEYS)
    assert GatewayConfig(admin_keys=ADMIN).admin_keys == (SecretStr(ADMIN),)
    for shown in (repr(config), str(config), str(config.model_dump()), config.model_dump_json()):
        assert ADMIN not in shown
        assert AGENT not in shown
    keys = KeyRing(config)
    assert ADMIN not in f"{keys!r} {vars(keys)}"
    again: GatewayConfig = pickle.loads(pickle.dumps(config))  # as on its way to a replica
    assert again.admin_keys[0].get_secret_value() == ADMIN
    # A printed configuration cannot be mistaken for one.
    with pytest.raises(ValidationError, match="10 characters"):
        GatewayConfig(**config.model_dump(mode="json"))


async def test_no_key_is_in_a_log_or_an_error(
    worlds: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Services) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Services, "statistics", fail)
    caplog.set_level(logging.DEBUG)
    world = await worlds()
    save_tokenizer(tmp_path)
    config = GatewayConfig(
        port=0,
        tokenizer_path=str(tmp_path),
        engine_retries=0,
        **KEYS,
    )
    server = HttpServer(
        config, Wiring((world.engine.url,), tuning=Tuning(log_level="debug")), world.pool
    )
    url = await asyncio.to_thread(server.start)
    forged = ring("another-admin's-key").issue("t", "p")
    world.say("x", status=400)
    world.say("x", status=400)
    answers = []
    try:
        # uvicorn closes a connection after a bug without saying so.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True)
        ) as session:
            for wanted, method, path, sent in [
                (400, "POST", "/t/p/v1/chat/completions", AGENT),
                (500, "GET", "/statistics", ADMIN),
                (403, "POST", "/init_trajectory", AGENT),
                (404, "GET", "/no/such/path", ADMIN),
                (401, "POST", "/v1/responses", "wrong-key-that-somebody-mistyped"),
                (401, "POST", "/v1/messages", forged),
            ]:
                for header in (bearer(sent), x_api_key(sent)):
                    body = CHAT if method == "POST" else None
                    async with session.request(
                        method, url + path, headers=header, json=body
                    ) as response:
                        answers.append(f"{await response.text()} {response.headers}")
                        assert response.status == wanted, (path, answers[-1])
    finally:
        await asyncio.to_thread(server.stop)
    printed = capfd.readouterr()
    shown = f"{printed.out} {printed.err} {caplog.text} {answers}"
    assert "a bug" in shown  # the traceback of the failure was logged
    for hidden in (ADMIN, AGENT, "wrong-key", forged):
        assert hidden not in shown

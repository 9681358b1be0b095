"""Web pages and names that reach a gateway: content types, Host, Origin, and the addresses that it
hands out."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from pydantic import ValidationError

from stepwell.gateway.access import Hosts
from stepwell.gateway.config import GatewayConfig

BODIES: dict[str, Any] = {
    "/init_trajectory": {"prompt_uid": "p"},
    "/t/p/v1/register_trajectory": {},
    "/t/p/v1/complete_trajectory": {"reward": 1.0},
    "/t/p/v1/abort_trajectory": {"reason": "x"},
    "/t/p/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/generate": {"messages": [{"role": "user", "content": "hi"}]},
    "/submit_steps": {
        "steps": [
            {
                "prompt_ids": [1],
                "response_ids": [2],
                "trajectory_uid": "w",
                "prompt_uid": "p",
                "step_index": 0,
            }
        ]
    },
    "/compute_reward": {"x": 1},
    "/start_rollout": {"num_repeat_per_sample": 1},
    "/buffer/write": {"instance_id": "i", "reward": 1.0},
    "/get_rollout_data": {"hold": True},
    "/ack_rollout_data": {"lease_id": "l"},
}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, **headers: str
) -> tuple[int, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    data = b"" if body is None else orjson.dumps(body)
    skip = () if "content-type" in sent else ("content-type",)
    async with session.post(url, data=data, headers=sent, skip_auto_headers=skip) as response:
        return response.status, orjson.loads(await response.read())


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_is_taken_as_json_only_if_it_is_said_to_be(
    world: Any, session: aiohttp.ClientSession, path: str
) -> None:
    url, body = world.url + path, BODIES[path]
    kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"]
    for kind in kinds:
        status, got = await post(session, url, body, content_type=kind)
        assert (status, "content-type: application/json" in str(got)) == (415, True)
    assert (await post(session, url, body))[0] == 415
    assert not world.stored()
    assert not world.engine.requests
    assert not (await world.pool.list_trajectories("train")).items
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        assert (await post(session, url, body, content_type=kind))[0] != 415


@pytest.mark.parametrize("path", ["/init_trajectory", "/t/p/v1/chat/completions"])
async def test_a_compressed_body_is_refused_by_its_header(
    world: Any, session: aiohttp.ClientSession, path: str
) -> None:
    url, data = world.url + path, gzip.compress(orjson.dumps(BODIES[path]))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with session.post(url, data=data, headers=headers) as response:
        assert response.status == 415
        assert "content-encoding: 'gzip'; send it without" in await response.text()
    for coding in ("identity", "Identity ", "utf-8"):
        plain = {"content_type": "application/json", "content_encoding": coding}
        assert (await post(session, url, BODIES[path], **plain))[0] == 200


@pytest.mark.parametrize("path", BODIES)
async def test_an_empty_body_needs_no_content_type(
    world: Any, session: aiohttp.ClientSession, path: str
) -> None:
    assert (await post(session, world.url + path, None))[0] != 415


@pytest.mark.parametrize("path", ["/health", "/t/p/v1/chat/completions", "/get_rollout_data"])
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("localhost:9999", True),
        ("LOCALHOST", True),
        ("10.0.0.7:80", True),
        ("[::1]:8100", True),
        ("host.docker.internal:8100", True),
        ("gateway.example", True),
        ("lab.example:8100", True),
        ("lab.example.", True),
        ("evil.example", False),
        ("evil.example:8100", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil@localhost", False),
        ("localhost:port", False),
        ("localhost/", False),
        ("", False),
    ],
)
async def test_on_loopback_a_request_for_another_host_is_refused(
    worlds: Any, session: aiohttp.ClientSession, path: str, host: str, allowed: bool
) -> None:
    world = await worlds(public_url="https://gateway.example/x", allowed_hosts=["Lab.example"])
    async with session.request(
        "GET" if path == "/health" else "POST",
        world.url + path,
        headers={"host": host},
        json=BODIES.get(path),
    ) as response:
        assert (response.status != 403) is allowed
        if not allowed:
            assert "gateway.allowed_hosts" in await response.text()
    assert bool(world.engine.requests) is (allowed and "chat" in path)


@pytest.mark.parametrize("name", ["host", "origin"])
@pytest.mark.parametrize("order", [1, -1])
async def test_a_request_that_names_two_hosts_or_pages_is_refused(
    world: Any, name: str, order: int
) -> None:
    # RFC 9112, 3.2: whoever takes the first one and whoever takes the last would disagree.
    url = urlsplit(world.url)
    own = {"host": url.netloc, "origin": world.url}
    twice = [own[name], own[name].replace(url.netloc, "evil.example")][::order]
    head = [
        "GET /health/ HTTP/1.1",
        *(f"{name}: {value}" for value in twice),
        *([f"host: {url.netloc}"] if name != "host" else []),
        "connection: close",
    ]
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write("\r\n".join([*head, "", ""]).encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"several {name} headers".encode() in answer.lower()


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("{url}", True),
        ("https://gateway.example", True),
        ("https://lab.example:444", True),
        ("null", False),
        ("https://evil.example", False),
        ("http://lab.example:444", False),
        ("http://localhost:1", False),
    ],
)
async def test_a_page_of_another_origin_is_refused(
    worlds: Any, session: aiohttp.ClientSession, origin: str, allowed: bool
) -> None:
    world = await worlds(
        public_url="https://gateway.example", allowed_origins=["https://lab.example:444"]
    )
    page = origin.replace("{url}", world.url)
    for body in (None, {}):
        status, got = await post(
            session, f"{world.url}/get_rollout_data", body, origin=page, content_type=JSON
        )
        assert status == (200 if allowed else 403)
        assert allowed or "gateway.allowed_origins" in got["error"]["message"]


JSON = "application/json"


async def test_a_browser_on_an_allowed_page_may_ask_and_read(
    worlds: Any, session: aiohttp.ClientSession
) -> None:
    page = "https://lab.example"
    world = await worlds(allowed_origins=[page], admin_keys=["an-admin-key-of-32-characters-00"])
    asked = {
        "origin": page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with session.options(f"{world.url}/t/p/v1/chat/completions", headers=asked) as response:
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == page
    async with session.options(
        f"{world.url}/t/p/v1/chat/completions", headers={**asked, "origin": "https://evil.example"}
    ) as response:
        assert "access-control-allow-origin" not in response.headers
    async with session.get(f"{world.url}/health", headers={"origin": page}) as response:
        assert response.headers["access-control-allow-origin"] == page


async def test_an_address_that_is_handed_out_follows_only_a_host_of_ours(
    worlds: Any, session: aiohttp.ClientSession
) -> None:
    # As on every address, where keys protect and no Host is refused.
    world = await worlds(allowed_hosts=["gpu-7"])
    world.gateway.hosts._is_loopback = False
    for host, origin in [
        ("evil.example", world.url),
        ("gpu-7:8100", "http://gpu-7:8100"),
        ("localhost:9999", "http://localhost:9999"),
        ("10.0.0.7:80", "http://10.0.0.7:80"),
    ]:
        status, got = await post(
            session, f"{world.url}/init_trajectory", {}, host=host, content_type=JSON
        )
        assert status == 200
        assert got["base_url"].startswith(origin + "/")


async def test_a_redirect_follows_only_a_host_of_ours(
    worlds: Any, session: aiohttp.ClientSession
) -> None:
    world = await worlds(allowed_hosts=["gpu-7"])
    world.gateway.hosts._is_loopback = False
    for host, origin in [("evil.example", world.url), ("gpu-7:8100", "http://gpu-7:8100")]:
        async with session.get(
            f"{world.url}/health/", headers={"host": host}, allow_redirects=False
        ) as response:
            assert response.status == 307
            assert response.headers["location"] == f"{origin}/health"


def test_the_hosts_of_replicas_are_ours() -> None:
    config = GatewayConfig(
        replicas=2,
        public_url="https://g{replica}.example",
    )
    hosts = Hosts(config, ("http://node-1:1", "http://node-2:1"))
    for host in (b"g0.example", b"g1.example:443", b"node-2:1"):
        hosts.check("http", host, None)
    hosts.check("http", b"g0.example", b"https://g1.example")


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_hosts": ["lab.example:80"]},
        {"allowed_hosts": ["https://lab.example"]},
        {"allowed_origins": ["lab.example"]},
        {"allowed_origins": ["https://lab.example/"]},
    ],
)
def test_what_is_no_name_or_origin_is_refused(options: Any) -> None:
    with pytest.raises(ValidationError, match="write "):
        GatewayConfig(**options)


async def test_a_browser_is_led_from_the_address_to_the_dashboard(world: Any) -> None:
    html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{world.url}/", headers=html) as answer:
            assert answer.url.path == "/ui"
            assert "<title>" in await answer.text()
        async with session.get(f"{world.url}/") as answer:
            assert (await answer.json())["status"] == "ok"

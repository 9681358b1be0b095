"""`/openapi.json` describes every route that is meant for agents, the plain ones too."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from stepwell.gateway import openapi
from stepwell.gateway.access import GEMINI_BASES
from stepwell.gateway.dialects.registry import PATHS
from stepwell.gateway.endpoints import ENDPOINTS, SDK_BODIES


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi.described(ENDPOINTS, SDK_BODIES)


@pytest.mark.slow
async def test_the_gateway_serves_it_and_builds_none_of_it_itself(
    world: Any, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def holds_the_event_loop(**_: object) -> None:
        raise AssertionError("the schemas of the SDKs take seconds")

    monkeypatch.setattr(openapi, "get_openapi", holds_the_event_loop)
    async with httpx.AsyncClient(base_url=world.url, timeout=120) as http:
        asked = [http.get("/openapi.json") for _ in range(3)]
        answers = await asyncio.gather(*asked)
    first, *others = (answer.json() for answer in answers)
    assert others == [first, first]
    assert first["paths"].keys() == document["paths"].keys()
    assert first["components"]["schemas"].keys() == document["components"]["schemas"].keys()
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}


@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens"])
def test_a_dialect_is_described_with_and_without_a_trajectorys_url(
    document: dict[str, Any], path: str
) -> None:
    for before in ("/v1", "/{trajectory_uid}/{prompt_uid}/v1"):
        operation = document["paths"][f"{before}/{path}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "prompt", "input", "contents"} & schema["properties"].keys()
        named = [p["name"] for p in operation.get("parameters", ())]
        assert named == ([] if before == "/v1" else ["trajectory_uid", "prompt_uid"])


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent", "countTokens"])
def test_geminis_methods_are_described_at_each_of_their_bases(
    document: dict[str, Any], method: str
) -> None:
    for base in GEMINI_BASES:
        operation = document["paths"][f"{base}/models/{{model}}:{method}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"contents", "generationConfig"} < schema["properties"].keys()
        assert "model" in [p["name"] for p in operation["parameters"]]


def test_all_that_takes_a_body_says_which(document: dict[str, Any]) -> None:
    posts = {path: ops["post"] for path, ops in document["paths"].items() if "post" in ops}
    assert len(posts) > 30
    assert not [path for path, operation in posts.items() if "requestBody" not in operation]

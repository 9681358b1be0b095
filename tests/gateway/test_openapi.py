"""`/openapi.json` describes every route that is meant for agents, the plain ones too."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from stepwell.gateway.access import GEMINI_BASES
from stepwell.gateway.dialects.registry import PATHS


@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens"])
async def test_a_dialect_is_described_with_and_without_a_trajectorys_url(
    world: Any, path: str
) -> None:
    async with httpx.AsyncClient(base_url=world.url) as http:
        document = (await http.get("/openapi.json")).json()
    for before in ("/v1", "/{trajectory_uid}/{prompt_uid}/v1"):
        operation = document["paths"][f"{before}/{path}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "prompt", "input", "contents"} & schema["properties"].keys()
        named = [p["name"] for p in operation.get("parameters", ())]
        assert named == ([] if before == "/v1" else ["trajectory_uid", "prompt_uid"])


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent", "countTokens"])
async def test_geminis_methods_are_described_at_each_of_their_bases(
    world: Any, method: str
) -> None:
    async with httpx.AsyncClient(base_url=world.url) as http:
        document = (await http.get("/openapi.json")).json()
    for base in GEMINI_BASES:
        operation = document["paths"][f"{base}/models/{{model}}:{method}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"contents", "generationConfig"} < schema["properties"].keys()
        assert "model" in [p["name"] for p in operation["parameters"]]


async def test_all_that_takes_a_body_says_which(world: Any) -> None:
    async with httpx.AsyncClient(base_url=world.url) as http:
        document = (await http.get("/openapi.json")).json()
    posts = {path: ops["post"] for path, ops in document["paths"].items() if "post" in ops}
    assert len(posts) > 30
    assert not [path for path, operation in posts.items() if "requestBody" not in operation]

"""Every transport brings the same bytes to a running engine, and other bytes are caught."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from stepwell.backends.config import WeightTransport
from stepwell.backends.engines.client import EMBEDDED, EngineClient
from stepwell.backends.errors import EngineRequestError, WeightUpdateError
from stepwell.backends.weights import WeightStore, publish
from stepwell.datapool.sealed import seal

PROMPT = [40, 41, 42, 43]
TRANSPORTS: tuple[WeightTransport, ...] = ("disk", "distributed")


async def log_probs(client: EngineClient) -> tuple[list[int], torch.Tensor]:
    """A greedy answer and its log-probs."""
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    answer = await client.generate(PROMPT, params, return_logprob=True)
    scored = answer["meta_info"]["output_token_logprobs"]
    return answer["output_ids"], torch.tensor([entry[0] for entry in scored])


async def agrees(client: EngineClient, reference: Callable[..., Any], path: Path) -> bool:
    ids, found = await log_probs(client)
    wanted = reference(path).log_probs(PROMPT, ids)
    return bool(torch.allclose(found, wanted, atol=1e-4))


def with_other_norm(path: Path, folder: Path) -> str:
    """A copy of a model that differs in one tensor; its name."""
    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] * torch.linspace(0.2, 3.0, len(tensors[name]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    seal(folder)
    return name


async def verified_by(client: EngineClient) -> str:
    """Return the way in which a replica alone is verified."""
    embedded = (await client.server_info()).get("version") == EMBEDDED
    return "checksum" if embedded else "agreement"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_version_arrives_whole_and_its_checksum_is_held_against_the_checkpoint(
    transport: WeightTransport,
    client: EngineClient,
    model_dirs: Any,
    reference: Callable[..., Any],
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path / "weights")
    path = store.write(3, lambda folder: shutil.copytree(model_dirs.new, folder))
    done = await publish([client], str(path), 3, "retract", store=store, transport=transport)
    assert done.verified == {client.url: await verified_by(client)}
    assert done.fenced == {}
    assert await client.weight_version() == 3
    assert await agrees(client, reference, model_dirs.new)
    current = store.current()
    assert current is not None
    assert current.version == 3
    # And again: no session, group or lock of the first is in the way of the second.
    other = store.path(4)
    with_other_norm(model_dirs.new, other)
    done = await publish([client], str(other), 4, "retract", store=store, transport=transport)
    assert done.verified == {client.url: await verified_by(client)}
    assert await agrees(client, reference, other)


@asynccontextmanager
async def liar(url: str, instead: Path) -> AsyncIterator[EngineClient]:
    """The engine at `url`, but it loads `instead` of what it is told, as the version it is told."""
    session = aiohttp.ClientSession()

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == "/update_weights_from_disk":
            told = json.loads(body)
            if told["weight_version"] != "0":
                body = json.dumps({**told, "model_path": str(instead)}).encode()
        headers = {"content-type": "application/json"}
        target = f"{url}{request.path}"
        async with session.request(request.method, target, data=body, headers=headers) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type="application/json"
            )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await runner.cleanup()
        await session.close()


async def test_a_replica_that_loaded_wrong_bytes_under_the_right_version_is_caught(
    client: EngineClient, model_dirs: Any, reference: Callable[..., Any], tmp_path: Path
) -> None:
    """The embedded engine's wrong bytes are caught; one SGLang alone agrees with itself."""
    with_other_norm(model_dirs.new, tmp_path / "wrong")
    async with liar(client.url, tmp_path / "wrong") as lying:
        if await verified_by(client) == "agreement":
            done = await publish([lying], str(model_dirs.new), 6, "retract")
            assert done.verified == {lying.url: "agreement"}
            return
        with pytest.raises(WeightUpdateError, match=r"1 of \d+ tensors differ.*norm") as e:
            await publish([lying], str(model_dirs.new), 6, "retract")
        assert e.value.replica == lying.url
        assert e.value.serving == {lying.url: 0}
    assert await agrees(client, reference, model_dirs.base)


async def test_tensors_are_taken_within_a_session_only(client: EngineClient) -> None:
    with pytest.raises(EngineRequestError, match="begin_weight_update"):
        await client.update_weights_from_distributed([], [], [], 5, group_name="none")
    await client.begin_weight_update()
    with pytest.raises(EngineRequestError, match="already open"):
        await client.begin_weight_update()
    await client.end_weight_update()
    with pytest.raises(EngineRequestError, match="no weight-update session"):
        await client.end_weight_update()
    assert await client.weight_version() == 0

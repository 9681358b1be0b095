"""Pictures from an agent's SDK to the journal: what the engine saw is what the pool has, to the
pixel, and its log-probs are those of a plain forward over ids and pictures as they are stored."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.server import ServerInfo
from stepwell.backends.engines.embedded.server import create_app as create_engine
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.server import http_protocol
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.gateway.conftest import local_pool, port_of, serving
from tests.vision_model import make_vision_model, png
from tests.vision_reference import VisionReference

pytestmark = pytest.mark.e2e

CLOSE = 5e-6
SIZES = ((56, 56), (84, 112), (200, 60), (280, 168))


@dataclass
class Made:
    """An engine with a vision model, a gateway before it and a pool with a journal."""

    url: str
    folder: Path
    journal: Path
    pool: DataPoolClient
    engine: Scheduler
    gateway: Any

    def client(self, uid: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/{uid}/p/v1", api_key="none", max_retries=0)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    folder, journal = make_vision_model(tmp_path / "model"), tmp_path / "pool"
    runner = ModelRunner(str(folder), dtype="float32", max_running=4, n_retained=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = StopStrings(tokenizer)
    scheduler = Scheduler(runner, stop_strings=stops, model_path=str(folder))
    engine = create_engine(GenerationLoop(scheduler), tokenizer, ServerInfo(str(folder), ""))
    config = GatewayConfig(port=0, tokenizer_path=str(folder), agent_keys={})
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(serving(engine))
        pool = await stack.enter_async_context(local_pool(folder=journal))
        app = create_app(config, Wiring((engine_url,)), pool, ChatTokenizer.load(str(folder)))
        url = await stack.enter_async_context(serving(app, http=http_protocol(config)))
        yield Made(url, folder, journal, pool, scheduler, app.state.services)


def shown(text: str, *pictures: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{b64encode(p).decode()}" for p in pictures]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": text}, *images]


async def talk(client: AsyncOpenAI, messages: list[Any], seed: int, turns: int) -> list[Any]:
    """So many turns with a picture each; the whole conversation."""
    rng = random.Random(seed)
    for i in range(turns):
        picture = png(*rng.choice(SIZES), seed=1000 * seed + i)
        messages.append({"role": "user", "content": shown(f"screen {i}", picture)})
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
        messages.append(answer.choices[0].message.to_dict())
    return messages


async def largest_error(made: Made, pool: DataPoolClient, steps: list[Step]) -> float:
    """Largest error of log-probs, against a plain forward over what the pool has."""
    reference, errors = VisionReference(made.folder), []
    for step in steps:
        digests = [picture.digest for picture in step.pictures]
        pngs = await pool.read_pictures(step.trajectory_uid, digests)
        with torch.inference_mode():
            expected = reference.log_probs(
                step.prompt_ids.tolist(), step.response_ids.tolist(), [pngs[d] for d in digests]
            )
        assert step.rollout_log_probs is not None
        errors.append(np.abs(expected.numpy() - step.rollout_log_probs).max())
    return float(max(errors))


async def test_linear_branched_and_retried_conversations_are_exact_to_the_pixel(
    made: Made,
) -> None:
    client = made.client("t")
    async with client:
        linear = await talk(client, [], 1, 8)
        branch = await talk(client, linear[:6], 2, 4)  # goes on from the third turn
        messages = branch[:-1]
        again = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=6,
            extra_headers={"x-stainless-retry-count": "1"},
        )
    assert again.choices[0].message.content == branch[-1]["content"]
    steps = port_of(made.pool).stored("t")
    assert len(steps) == 12
    assert [step.step_index for step in steps if step.parent_index is None] == [0]
    assert steps[8].parent_index == 2
    assert await largest_error(made, made.pool, steps) < CLOSE
    assert made.gateway.pictures.n_decoded == 12


async def test_two_users_with_pictures_of_one_size_share_no_cache(made: Made) -> None:
    for uid, seed in (("one", 1), ("two", 2), ("one again", 1)):
        async with made.client(uid) as client:
            messages: Any = [{"role": "user", "content": shown("What?", png(84, 84, seed=seed))}]
            await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
    steps = port_of(made.pool).stored()
    one, two, _ = steps
    assert np.array_equal(one.prompt_ids, two.prompt_ids)
    assert await largest_error(made, made.pool, steps) < CLOSE
    assert made.gateway.pictures.n_decoded == 2


async def test_pictures_are_there_after_the_journal_was_replayed(
    made: Made, tmp_path: Path
) -> None:
    async with made.client("t") as client:
        await talk(client, [], 3, 3)
    steps = port_of(made.pool).stored("t")
    copytree(made.journal, tmp_path / "copy", ignore=ignore_patterns("*.lock"))
    async with DataPoolClient.local(None, tmp_path / "copy") as pool:
        assert await largest_error(made, pool, steps) < CLOSE

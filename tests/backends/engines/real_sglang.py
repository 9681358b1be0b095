"""Behaviour of a real SGLang that the contract does not ask for, but Stepwell has to live with. Not
collected by itself: `make test-sglang` names it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import GenerateRequest, Output, PromptPictures, Sampling
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineError
from stepwell.backends.pictures import CanonicalPicture
from stepwell.backends.weights import WeightStore
from stepwell.datapool.pictures import Picture
from stepwell.trainer.rewards.reward_model import RewardModel
from tests.backends.models import SMALL
from tests.builders import until
from tests.vision_model import make_vision_model, png
from tests.vision_reference import VisionReference

CLOSE = 3e-5
"""Tolerance of log-probs in float32; another picture of the same size moves them by over 1e-2."""
PICTURE_SIZES = [(112, 84), (112, 84), (56, 56), (280, 168), (60, 200), (84, 420), (336, 112)]
Config = Callable[..., EngineConfig]


async def test_weights_that_do_not_fit_end_the_server_and_it_comes_back_with_the_committed_ones(
    make_engine_config: Config, model_dirs: Any, tmp_path: Path
) -> None:
    """SGLang 0.5.23 rolls back to the path that it was just given, and its scheduler dies of it. So
    weights have to be checked before a server is given them. Then the scheduler alone is killed."""
    store = WeightStore(tmp_path / "weights")
    config = make_engine_config("sglang", model_dirs.base)
    supervisor = Supervisor(config, tmp_path / "logs", store.folder)
    try:
        async with EngineClient(supervisor.start()) as client:
            store.commit(5, model_dirs.new)
            try:
                await client.update_weights_from_disk(str(model_dirs.wide), 9, timeout_s=20)
            except EngineError:
                pass
            else:
                raise AssertionError("SGLang now survives weights that do not fit: say so")

            async def back() -> bool:
                return supervisor.restarts == 1 and supervisor.state == "up"

            await until(back, 240.0)
            info = await client.model_info()
            assert (info["weight_version"], info["model_path"]) == ("5", str(model_dirs.new))

            assert supervisor.pid is not None
            children = psutil.Process(supervisor.pid).children(recursive=True)
            [scheduler] = [c for c in children if "scheduler" in " ".join(c.cmdline())]
            os.kill(scheduler.pid, signal.SIGKILL)

            async def back_again() -> bool:
                return supervisor.restarts == 2 and supervisor.state == "up"

            await until(back_again, 240.0)
            assert await client.weight_version() == 5
    finally:
        supervisor.stop()


async def test_a_reward_model_scores_as_transformers_does(
    make_engine_config: Config, model_dirs: Any, tmp_path: Path
) -> None:
    """SGLang 0.5.23 with `--is-embedding`, through the reward's own door."""
    folder = tmp_path / "reward_model"
    tokenizer = AutoTokenizer.from_pretrained(model_dirs.base)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    form = {**SMALL, "hidden_size": 64, "vocab_size": len(tokenizer), "initializer_range": 0.2}
    config = LlamaConfig(**form, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    head: Any = AutoModelForSequenceClassification.from_config(config).eval()
    head.save_pretrained(folder)
    engine = make_engine_config("sglang", folder).model_copy(
        update={"extra_args": ("--is-embedding",), "context_length": 256}
    )
    supervisor = Supervisor(engine, tmp_path / "logs")
    prompt = "{question}\n{solution_str}"
    reward = RewardModel(url=supervisor.start(), prompt=prompt)
    try:
        for answer in ("4", "It is five."):
            said = await reward("sums", answer, None, {"question": "2 + 2?"})
            with torch.no_grad():
                ids = tokenizer(f"2 + 2?\n{answer}", return_tensors="pt")
                assert said == pytest.approx(float(head(**ids).logits[0, 0]), abs=1e-4)
    finally:
        await reward.aclose()
        supervisor.stop()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
async def test_pictures_are_those_of_the_plain_forward(
    make_engine_config: Config, tmp_path: Path, kind: Any
) -> None:
    """One placeholder and one PNG a picture: SGLang makes our prompt of them, its own processor
    changes nothing of a canonical picture, and what it keeps for one picture or owner serves no
    other."""
    folder = make_vision_model(tmp_path / "model", kind=kind)
    reference = VisionReference(folder)
    processor = reference.processor
    made = [processor.canonical(png(*size, seed=i)) for i, size in enumerate(PICTURE_SIZES)]
    pngs = {picture.digest: picture.png for picture in made}

    def prompt(*parts: int | CanonicalPicture) -> tuple[list[int], list[Picture]]:
        ids: list[int] = []
        pictures = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            ids.append(processor.start_id)
            shown = Picture(part.digest, part.width, part.height, len(ids), part.n_tokens)
            pictures.append(shown)
            ids += [*[processor.placeholder_id] * part.n_tokens, processor.end_id]
        return ids, pictures

    async def read(digests: Sequence[str]) -> dict[str, bytes]:
        return {digest: pngs[digest] for digest in digests}

    config = make_engine_config("sglang", folder)
    supervisor = Supervisor(config, tmp_path / "logs")

    async def error(
        client: EngineClient, *parts: int | CanonicalPicture, owner: str = "ann", stream: bool
    ) -> tuple[float, list[int], int]:
        ids, pictures = prompt(*parts)
        outputs: list[Output] = []
        request = GenerateRequest(
            secrets.token_hex(8),
            np.array(ids, np.int32),
            Sampling(12, 1.0),
            12,
            stream=stream,
            pictures=PromptPictures(pictures, read, processor.placeholder_id, owner),
            masked_ids=processor.forbidden_ids,
        )
        await client.sample(request, outputs.append)
        said = [i for output in outputs for i in output.ids]
        log_probs = torch.tensor([p for output in outputs for p in output.log_probs])
        with torch.inference_mode():
            expected = reference.log_probs(ids, said, [pngs[p.digest] for p in pictures])
        gap = float((log_probs - expected).abs().max())
        return gap, said, outputs[-1].cached_tokens

    try:
        async with EngineClient(supervisor.start()) as client:
            first, second, *_, large = made
            turn: list[int | CanonicalPicture] = [40, first, 41]
            for shown in made:  # a conversation of many turns, each with a picture
                gap, said, cached = await error(client, *turn, stream=len(turn) % 2 == 0)
                assert gap < CLOSE
                assert not {*said} & {*processor.forbidden_ids}
                turn += [*said, 42, shown, 43]
            assert cached > 12
            # Of the same ids: another picture, another owner.
            gap, _, cached = await error(client, 40, second, 41, stream=False)
            assert gap < CLOSE
            assert cached <= 2
            gap, _, cached = await error(client, 40, first, 41, owner="bob", stream=False)
            assert gap < CLOSE
            assert cached == 0
            assert first.n_tokens == second.n_tokens
            pngs[large.digest] = first.png
            with pytest.raises(EngineError, match="do engine and gateway serve the same model"):
                await error(client, 40, large, 41, owner="eve", stream=True)
    finally:
        supervisor.stop()

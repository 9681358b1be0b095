"""Behaviour of a real SGLang that the contract does not ask for, but Stepwell has to live with. Not
collected by itself: `make test-sglang` names it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineError
from stepwell.backends.weights import WeightStore
from stepwell.trainer.rewards.reward_model import RewardModel
from tests.backends.models import SMALL
from tests.builders import until

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

"""Trained reward models: the built-in's score is that of transformers on the same conversation, in
a thread of this process and over SGLang's `/classify` (SGLang 0.5, a server with `--is-embedding`:
{"text" | "input_ids"} -> {"embedding": […], "meta_info": …})."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from stepwell.trainer.config import RewardConfig
from stepwell.trainer.errors import RewardCrashError, RewardLoadError, RewardTimeoutError
from stepwell.trainer.rewards import reward_model
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rewards.reward_model import RewardModel
from tests.backends.models import SMALL
from tests.helpers import serving_posts

TOKENIZER = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
ASKED = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classification head over a random decoder, with a tokenizer that has a template."""
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    form = {"vocab_size": len(tokenizer), "head_dim": 8, "initializer_range": 0.2}
    config = Qwen3Config(**(SMALL | form), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def by_transformers(model: Path) -> Any:
    """The score of a text, computed without code of ours."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    head = AutoModelForSequenceClassification.from_pretrained(model).eval()

    def score(given: list[dict[str, str]] | str) -> float:
        text = given
        if isinstance(given, list):
            text = tokenizer.apply_chat_template(given, tokenize=False)
        with torch.no_grad():
            return float(head(**tokenizer(text, return_tensors="pt")).logits[0, 0])

    return score


@asynccontextmanager
async def classifying(model: Path) -> AsyncIterator[str]:
    """The address of a server that answers as SGLang's `/classify` does."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    head = AutoModelForSequenceClassification.from_pretrained(model).eval()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert request.path == "/classify"
        assert ("text" in body) != ("input_ids" in body)
        ids = body.get("input_ids") or tokenizer(body["text"])["input_ids"]
        with torch.no_grad():
            logits = head(torch.tensor([ids])).logits[0].tolist()
        return web.json_response({"embedding": logits, "meta_info": {"prompt_tokens": len(ids)}})

    async with serving_posts("/{path:.*}", answer) as address:
        yield address


async def scores(*answers: str, task: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
    manager = RewardManager(
        RewardConfig(function="reward_model", kwargs=kwargs, timeout_s=20, max_attempts=1)
    )
    task = {"messages": ASKED} if task is None else task
    try:
        samples = [RewardSample("sums", answer, "4", task) for answer in answers]
        results = await manager.score(samples)
    finally:
        await manager.aclose()
    return [r.score if isinstance(r, RewardResult) else r for r in results]


ANSWERS = ("4", "It is five, I am quite sure of that.", "")


@pytest.mark.parametrize("served", [True, False])
async def test_the_score_is_that_of_transformers(
    model: Path, by_transformers: Any, served: bool
) -> None:
    wanted = [by_transformers([*ASKED, {"role": "assistant", "content": a}]) for a in ANSWERS]
    assert len({round(w, 4) for w in wanted}) == 3
    question = {"question": "2 + 2?"}  # a task without messages is a user's question
    async with classifying(model) as url:
        where = {"url": url, "tokenizer": str(model)} if served else {"path": str(model)}
        for task in (None, question):
            assert await scores(*ANSWERS, task=task, **where) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("served", [True, False])
async def test_a_prompt_of_ones_own_takes_the_place_of_the_chat_template(
    model: Path, by_transformers: Any, served: bool
) -> None:
    prompt = "Q: {question}\nA: {solution_str} ({ground_truth})"
    wanted = [by_transformers(f"Q: 2 + 2?\nA: {a} (4)") for a in ANSWERS]
    task = {"question": "2 + 2?"}
    async with classifying(model) as url:
        where = {"url": url} if served else {"path": str(model)}
        found = await scores(*ANSWERS, task=task, prompt=prompt, **where)
    assert found == pytest.approx(wanted, abs=1e-5)


async def test_loading_the_model_is_not_the_calls_time(model: Path, by_transformers: Any) -> None:
    class Slow(RewardModel):
        async def wait_loaded(self) -> None:
            await asyncio.sleep(0.4)
            await super().wait_loaded()

    kwargs = {"path": str(model)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_model, "RewardModel", Slow)
        config = RewardConfig(
            function=f"{reward_model.__name__}:RewardModel",
            kwargs=kwargs,
            timeout_s=0.3,
            max_attempts=1,
        )
        manager = RewardManager(config)
    sample = RewardSample("sums", "4", "4", {"messages": ASKED})
    (result,) = await manager.score([sample])
    await manager.aclose()
    assert isinstance(result, RewardResult), result
    wanted = by_transformers([*ASKED, {"role": "assistant", "content": "4"}])
    assert result.score == pytest.approx(wanted, abs=1e-5)


async def test_an_answer_waits_for_those_before_it_as_long_as_it_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = reward_model._Head._compute

    def slow(head: Any, conversation: Any) -> float:
        time.sleep(0.5)
        return compute(head, conversation)

    monkeypatch.setattr(reward_model._Head, "_compute", slow)
    config = {"function": "reward_model", "kwargs": {"path": str(model)}}
    manager = RewardManager(
        RewardConfig.model_validate({**config, "timeout_s": 2, "max_attempts": 1})
    )
    sample = RewardSample("sums", "4", "4", {"messages": ASKED})
    found = await manager.score([sample] * 6)
    await manager.aclose()
    assert all(isinstance(result, RewardResult) for result in found), found


async def test_a_conversation_that_the_model_has_no_room_for_is_missing(model: Path) -> None:
    (missing,) = await scores("4 " * 40_000, path=str(model))
    assert isinstance(missing, RewardCrashError)
    assert "tokens for the reward model" in str(missing)


async def test_a_server_that_fails_is_asked_again_until_the_rewards_limit(model: Path) -> None:
    failing = 3

    async def answer(request: web.Request) -> web.Response:
        nonlocal failing
        assert request.path == "/classify"
        assert (await request.json())["input_ids"]
        failing -= 1
        if failing >= 0:
            return web.json_response({}, status=503)
        return web.json_response({"embedding": [-1.5], "meta_info": {}})

    async with serving_posts("/{path:.*}", answer) as address:
        kwargs = {"url": address, "tokenizer": str(model), "backoff_s": 0.001}
        assert await scores("4", **kwargs) == [-1.5]
        failing = 10**9
        manager = RewardManager(
            RewardConfig(function="reward_model", kwargs=kwargs, timeout_s=0.5, max_attempts=1)
        )
        (missing,) = await manager.score([RewardSample("sums", "4", "4", {"messages": ASKED})])
        await manager.aclose()
    assert isinstance(missing, RewardTimeoutError)  # missing, not 0
    assert "answered 503" in str(missing)


async def test_an_answer_without_a_score_is_missing() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"embedding": []})

    async with serving_posts("/{path:.*}", answer) as address:
        (missing,) = await scores("4", url=address, prompt="{solution_str}")
    assert isinstance(missing, RewardCrashError)
    assert "as a server with a classification head answers" in str(missing)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "give one of them"),
        ({"url": "http://rm", "path": "rm"}, "give one of them"),
        ({"url": "rm:80", "prompt": "{question}"}, "begins with http"),
        ({"url": "http://rm"}, "tokenizer and prompt are missing"),
        ({"url": "http://rm", "prompt": "{answer}"}, "answer"),
        ({"path": "no/such"}, "has no config.json"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardLoadError, match=message):
        load_reward("reward_model", kwargs)


async def test_its_folder_may_begin_at_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    (score,) = await scores("4", path=f"~/{model.name}")
    assert isinstance(score, float), score

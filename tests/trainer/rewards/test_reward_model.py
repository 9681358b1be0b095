"""Trained reward models: the built-in's score is that of transformers on the same conversation,
over the embedded engine's `/classify` and SGLang's form of it (SGLang 0.5, `/classify` of a server
with `--is-embedding`: {"text" | "input_ids"} -> {"embedding": […], "meta_info": …})."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import uvicorn
from aiohttp import web
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from stepwell.backends.engines.embedded import classifier
from stepwell.backends.engines.embedded.server import ServerInfo
from stepwell.trainer.rewards import (
    RewardConfig,
    RewardCrashError,
    RewardLoadError,
    RewardManager,
    RewardResult,
    RewardSample,
    RewardTimeoutError,
    load_reward,
)
from tests.backends.models import SMALL
from tests.helpers import gone, serving_posts

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


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The embedded engine's routes, in a thread of this process."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    served = classifier.Classifier(str(model), tokenizer, "auto", "cpu")
    app = classifier.create_app(served, ServerInfo(str(model), str(model)), "0")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


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


async def test_the_score_is_that_of_transformers(
    model: Path, url: str, by_transformers: Any
) -> None:
    wanted = [by_transformers([*ASKED, {"role": "assistant", "content": a}]) for a in ANSWERS]
    assert len({round(w, 4) for w in wanted}) == 3
    assert await scores(*ANSWERS, url=url, tokenizer=str(model)) == pytest.approx(wanted, abs=1e-5)
    question = {"question": "2 + 2?"}  # a task without messages is a user's question
    assert await scores(*ANSWERS, task=question, url=url, tokenizer=str(model)) == pytest.approx(
        wanted, abs=1e-5
    )


async def test_a_prompt_of_ones_own_takes_the_place_of_the_chat_template(
    url: str, by_transformers: Any
) -> None:
    prompt = "Q: {question}\nA: {solution_str} ({ground_truth})"
    wanted = [by_transformers(f"Q: 2 + 2?\nA: {a} (4)") for a in ANSWERS]
    task = {"question": "2 + 2?"}
    found = await scores(*ANSWERS, task=task, url=url, prompt=prompt)
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.long
async def test_a_model_is_served_for_its_path_and_its_engine_ends_with_the_manager(
    model: Path, by_transformers: Any
) -> None:
    """In a process of its own, which has its own time to start."""
    config = RewardConfig(
        function="reward_model", kwargs={"path": str(model)}, timeout_s=0.9, max_attempts=3
    )
    manager = RewardManager(config)
    sample = RewardSample("sums", "4", "4", {"messages": ASKED})
    (result,) = await manager.score([sample])
    wanted = by_transformers([*ASKED, {"role": "assistant", "content": "4"}])
    assert isinstance(result, RewardResult), result
    assert result.score == pytest.approx(wanted, abs=1e-5)
    engines = [
        p.pid
        for p in psutil.Process().children(recursive=True)
        if "stepwell.backends.engines.embedded" in " ".join(p.cmdline())
    ]
    assert engines
    await manager.aclose()
    assert all([await gone(pid) for pid in engines])


def test_many_are_classified_in_one_request(url: str, by_transformers: Any) -> None:
    """As SGLang's documentation asks for the scores of several conversations."""
    texts = ["one", "another one"]
    answers = httpx.post(f"{url}/classify", json={"model": "m", "text": texts}).json()
    found = [answer["embedding"][0] for answer in answers]
    assert found == pytest.approx([by_transformers(t) for t in texts], abs=1e-5)
    assert answers[0]["meta_info"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("classify", {}, "either text or input_ids"),
        ("classify", {"input_ids": []}, "0 tokens"),
        ("classify", {"input_ids": [10**6]}, "should be within"),
        ("classify", {"input_ids": [1] * 40_000}, "40000 tokens"),
        ("generate", {"text": "a"}, "reward model, which generates nothing"),
    ],
)
def test_a_request_that_cannot_be_scored_is_refused(
    url: str, path: str, body: dict[str, Any], message: str
) -> None:
    answer = httpx.post(f"{url}/{path}", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_supervisor_finds_what_it_asks_an_engine_for(url: str) -> None:
    for path in ("health", "health_generate", "model_info"):
        assert httpx.get(f"{url}/{path}").status_code == 200
    said = httpx.get(f"{url}/model_info").json()
    assert (said["weight_version"], said["is_generation"]) == ("0", False)


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
        ({"path": str(TOKENIZER), "engine": {"sort": 1}}, "sort"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardLoadError, match=message):
        load_reward("reward_model", kwargs)

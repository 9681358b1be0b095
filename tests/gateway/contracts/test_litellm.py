"""The gateway behind unmodified LiteLLM, over HTTP: as an OpenAI server and as an Anthropic one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.gateway.contracts.dialogue import EXPRESSION, REPLIES, TOOL_NAMES, check_one_branch

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": EXPRESSION,
        },
    }
    for name, about in TOOL_NAMES
]


@pytest.fixture
async def litellm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The module, imported late (it takes seconds) and offline (it would ask for prices)."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    yield litellm
    # It keeps its connections for good, but a test's event loop ends.
    kept = litellm.in_memory_llm_clients_cache
    for client in kept.cache_dict.values():
        if isinstance(client, openai.AsyncOpenAI):
            await client.close()
    await litellm.close_litellm_async_clients()
    kept.flush_cache()


def target(world: Any, provider: str) -> dict[str, Any]:
    path = "/v1" if provider == "openai" else ""
    return {
        "model": f"{provider}/m",
        "api_base": f"{world.base_url()}{path}",
        "api_key": "none",
        "num_retries": 0,
        "max_retries": 0,
    }


async def ask(
    litellm: Any, where: dict[str, Any], messages: list[Any], stream: bool, **options: Any
) -> Any:
    if not stream:
        return await litellm.acompletion(**where, messages=messages, **options)
    answer = await litellm.acompletion(**where, messages=messages, stream=True, **options)
    chunks = [chunk async for chunk in answer]
    return litellm.stream_chunk_builder(chunks, messages=messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_a_loop_of_tools_is_one_branch(
    worlds: Any, litellm: Any, provider: str, stream: bool
) -> None:
    world = await worlds("qwen3")
    for text in REPLIES:
        world.say(text)
    messages: list[Any] = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "(1 + 2) * three?"},
    ]
    texts = []
    for question in (None, "Thanks!"):
        if question is not None:
            messages.append({"role": "user", "content": question})
        while True:
            reply = await ask(litellm, target(world, provider), messages, stream, tools=TOOLS)
            message = reply.choices[0].message
            texts.append((message.content or "").strip())
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for made in message.tool_calls:
                expression = json.loads(made.function.arguments)["expression"]
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": made.id,
                        "content": f"{made.function.name}: {expression}",
                    }
                )
    assert texts == ["I need both.", "", "It is 9.", "You are welcome 🙂"]
    check_one_branch(world, 4)
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    for result in ("calculator: 1 + 2", "lookup: three", "calculator: 3 * 3"):
        assert last.count(result) == 1


async def test_the_blocking_api_reports_usage_and_log_probs(world: Any, litellm: Any) -> None:
    said = world.say("fine")
    reply: Any = await asyncio.to_thread(
        litellm.completion,
        **target(world, "openai"),
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=0,
        stop=["\nObservation:"],
        seed=7,
        user="u",
    )
    assert reply.choices[0].message.content == "fine"
    assert reply.usage.completion_tokens == len(said.ids)
    assert len(reply.choices[0].logprobs.content) == len(said.ids)
    params = world.engine.requests[0]["sampling_params"]
    assert (params["stop"], params["sampling_seed"]) == (["\nObservation:"], 7)
    world.check_exact()


async def test_text_completions_extend_one_another(world: Any, litellm: Any) -> None:
    prompt = "Question: 6 * 7?\nThought:"
    where = {**target(world, "openai"), "model": "text-completion-openai/m"}
    for _ in range(3):
        world.say(" call it\nObservation:", close=False, matched="\nObservation:")
        reply: Any = await litellm.atext_completion(
            **where, prompt=prompt, stop=["\nObservation:"], max_tokens=50
        )
        assert reply.choices[0].text == " call it"
        prompt += f"{reply.choices[0].text}\nObservation: 42\nThought:"
    check_one_branch(world, 3)


async def test_a_refusal_is_litellms_own_error(world: Any, litellm: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="logit_bias"):
        await litellm.acompletion(
            **target(world, "openai"),
            messages=[{"role": "user", "content": "hi"}],
            logit_bias={"1": 2},
        )

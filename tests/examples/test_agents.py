"""The example agents, against a real HTTP server that answers from a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from examples.smollm2.agent import agent as one_turn_agent
from stepwell.quickstart.agent import (
    MAX_TOKENS,
    MAX_TURNS,
    TOOLS,
    agent,
    calculator,
    http_client,
)
from tests.examples.scripted import Policy, serving

TASK = {"question": "12 + 34 =", "answer": "46", "data_source": "chain_sum", "metadata": {}}


@pytest.fixture(autouse=True)
async def _close_the_shared_connections() -> AsyncIterator[None]:
    yield
    await http_client(asyncio.get_running_loop()).aclose()
    http_client.cache_clear()


def calls(*arguments: str) -> dict[str, Any]:
    """An assistant message that calls the calculator once with each of `arguments`."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": "calculator", "arguments": a},
            }
            for i, a in enumerate(arguments)
        ],
    }


async def play(*replies: str | dict[str, Any] | int) -> tuple[float | None, Policy]:
    async with serving(Policy(*replies)) as policy:
        return await agent(TASK, policy.base_url, "key"), policy


async def test_a_right_answer_in_the_head_scores_one_in_a_single_turn() -> None:
    score, policy = await play("46")
    assert score == 1.0
    assert policy.paths == ["/trajectory/prompt/v1/chat/completions"]
    (request,) = policy.requests
    assert request["messages"] == [{"role": "user", "content": TASK["question"]}]
    assert request["tools"] == TOOLS
    assert (request["temperature"], request["max_tokens"]) == (1.0, MAX_TOKENS)


@pytest.mark.parametrize("answer", ["47", "", "the answer is 46", '<tool_call>\n{"name": "calcu'])
async def test_a_wrong_an_empty_or_a_broken_answer_scores_zero(answer: str) -> None:
    score, policy = await play(answer)
    assert score == 0.0
    assert len(policy.requests) == 1


async def test_the_tools_result_is_sent_back_and_the_next_answer_is_scored() -> None:
    score, policy = await play(calls('{"expression": "12 + 34"}'), "46")
    assert score == 1.0
    question, call, result = policy.requests[1]["messages"]
    assert question == policy.requests[0]["messages"][0]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"expression": "12 + 34"}'
    assert result == {"role": "tool", "tool_call_id": "call_0", "content": "46"}


async def test_every_call_of_a_turn_gets_its_own_result() -> None:
    _, policy = await play(calls('{"expression": "1 + 1"}', '{"expression": "2 +"}'), "46")
    assert [(m["tool_call_id"], m["content"]) for m in policy.requests[1]["messages"][2:]] == [
        ("call_0", "2"),
        ("call_1", "error: not an arithmetic expression"),
    ]


async def test_an_agent_that_never_answers_scores_zero_after_its_last_turn() -> None:
    score, policy = await play(calls('{"expression": "12 + 34"}'))
    assert score == 0.0
    assert len(policy.requests) == MAX_TURNS


async def test_a_refused_call_is_an_error_of_the_rollout_never_a_score() -> None:
    with pytest.raises(openai.BadRequestError, match="refused"):
        await play(400)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("46", 1.0), ("12 plus 34 is 46.", 1.0), ("46, or perhaps 47", 0.0), ("forty-six", 0.0)],
)
async def test_the_one_turn_agent_scores_the_last_number_of_the_reply(
    reply: str, expected: float
) -> None:
    async with serving(Policy(reply)) as policy:
        assert await one_turn_agent(TASK, policy.base_url, "key") == expected
    assert "tools" not in policy.requests[0]


# ── the calculator ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 34", "46"),
        ("12 - 34 - 5", "-27"),
        (" -(2 + 3) * 4 ", "-20"),
        ("7 / 2", "3.5"),
        ("7 // 2", "3"),
        ("7 % 2", "1"),
        ("1 / 0", "error: division by zero"),
        ("1 +", "error: not an arithmetic expression"),
        ("", "error: not an arithmetic expression"),
        ("x + 1", "error: not an arithmetic expression"),
        ("2 ** 99999999", "error: not an arithmetic expression"),
        ("True + 1", "error: not an arithmetic expression"),
        ("'a' * 3", "error: not an arithmetic expression"),
        ("__import__('os').getpid()", "error: not an arithmetic expression"),
        ("1e308 * 10 // 1", "nan"),
    ],
)
def test_the_calculator_computes_or_says_why_not(expression: str, result: str) -> None:
    assert calculator(json.dumps({"expression": expression})) == result


@pytest.mark.parametrize("arguments", ["", "{", "[]", "3", "null", '{"expr": "1"}'])
def test_the_calculator_answers_malformed_arguments_with_an_error(arguments: str) -> None:
    assert calculator(arguments) == "error: not an arithmetic expression"


def test_the_calculator_survives_endless_nesting() -> None:
    for expression in ("(" * 10_000, "-" * 100_000 + "1", "1" + "+1" * 100_000, "9" * 10_000):
        assert calculator(json.dumps({"expression": expression})).startswith("error: ")

"""An agent that answers arithmetic questions and may use a calculator.

The file to copy for your own agent: plain `openai` SDK, no Stepwell in the conversation. All that
makes it trainable is the `base_url` it is given. It owns its prompt, its tool and its turn limit;
it does not sample, keep tokens or know which weights answer. The score comes from the data set's
own verifier.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient

from stepwell.trainer.rewards.reasoning_gym import score

MAX_TURNS = 4
MAX_TOKENS = 48
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One episode: 1.0 if the final answer is right, else 0.0."""
    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_client=http_client(asyncio.get_running_loop()),
    )
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=1.0, max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(task["data_source"], message.content or "", task["answer"], task)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculator(call.function.arguments) if call.type == "function" else NO_TOOL
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0  # it kept calling its tool and never answered: that is the policy's doing


@lru_cache(maxsize=1)
def http_client(loop: asyncio.AbstractEventLoop) -> DefaultAioHttpClient:
    """One connection pool per event loop: it costs 20 ms, an `AsyncOpenAI` on top of it 0.04."""
    return DefaultAioHttpClient()


# ── the tool ─────────────────────────────────────────────────────────────────────────────────────

NO_TOOL = "error: no such tool"
OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(arguments: str) -> str:
    """The tool: JSON arguments in, a number or `error: …` out, for the model to read."""
    try:
        expression = json.loads(arguments)["expression"].strip()
        return str(evaluate(ast.parse(expression, mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return "error: not an arithmetic expression"
    except (RecursionError, MemoryError):
        return "error: expression too long"


def evaluate(node: ast.expr) -> int | float:
    """Numbers, + - * / // % and brackets; anything else is a ValueError, never executed."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
    raise ValueError(f"{type(node).__name__} is no arithmetic")

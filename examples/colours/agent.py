"""An agent that is shown one side of a card, may turn it, and names the colours of both sides.

Plain `openai` SDK: a picture is an `image_url` part with a data URL, in the question and in the
result of the tool. The policy has to look twice: the score is the share of the two colours that it
names.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from stepwell.quickstart.agent import http_client

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 70, 210),
    "yellow": (225, 205, 50),
    "pink": (235, 130, 190),
    "black": (30, 30, 30),
}
MAX_TURNS = 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "description": "Turn the card; its other side is shown.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


def card(colour: str, seed: int) -> bytes:
    """A PNG of one side: its colour, uneven, with a spot of another shade."""
    rng = random.Random(f"{colour} {seed}")
    width, height = rng.choice([(56, 56), (84, 56), (56, 84)])
    pixels = np.array(COLOURS[colour]) + np.random.default_rng(seed).normal(
        0, 9, (height, width, 3)
    )
    x, y = rng.randrange(width - 20), rng.randrange(height - 20)
    pixels[y : y + 20, x : x + 20] += rng.choice([-25, 25])
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def picture(side: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(side).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def score(answer: str, colours: list[str]) -> float:
    """Share of the two colours that are named, in their order."""
    named = answer.split()
    if len(named) != len(colours):
        return 0.0
    return sum(a == b for a, b in zip(named, colours, strict=True)) / len(colours)


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """One card: the share of its colours that the policy names."""
    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_client=http_client(asyncio.get_running_loop()),
    )
    facts = task["metadata"]
    sides = [picture(card(colour, facts["seed"] + i)) for i, colour in enumerate(facts["shown"])]
    question = {"type": "text", "text": task["question"]}
    messages: list[Any] = [{"role": "user", "content": [question, sides[0]]}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=1.0, max_tokens=24
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(message.content or "", facts["colours"])
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": [sides[1]]}
            for call in message.tool_calls
        ]
    return 0.0

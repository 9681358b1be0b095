"""This module is the agent of the runs under fire: it writes down, in a file of its own, what it
was answered, which pictures it had shown, and what reward it gave, so that nothing of Stepwell has
to be believed.

One file per process, one line per event, one `write` per line with O_APPEND: a line is there before
the agent goes on, and `kill -9` of any process takes none away.

    {"event":"answered","trajectory":…,"prompt":…,"call":…,"began":…,"at":…,"log_probs":[…],"asked":…,
     "pictures":[…]}                their digests, all that its messages hold
    {"event":"returned","reward":…}     the rollout ended well: its reward is this and no other
    {"event":"raised"}                  it failed on purpose: it has no reward
    {"event":"failed","error":…}        a call failed for good, or the rollout was cancelled

Does not own the comparison (`verify.py`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import time
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from PIL import Image

from stepwell.quickstart.agent import http_client

FOLDER = "STEPWELL_CHAOS_LOG"
"""Environment variable: the folder of the logs."""
MAX_TURNS = 4
MAX_TOKENS = 24
RAISES = 0.04
"""Share of the rollouts that fail on purpose."""
SHOWN = 0.5
"""Share of the messages with a picture; the first is the same in all rollouts of a prompt."""
SIZES = ((56, 56), (84, 56), (112, 84))
"""Pixels, all on the model's grid, so that a picture is stored as it was sent."""
THINKS_S = 0.4
RETRIES = 14
"""By the client, 8 s apart at most: longer than any fault lasts."""


class OnPurposeError(Exception):
    """The agent's own failure."""


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
    """A conversation of some turns; the reward is the trajectory's own random number."""
    trajectory, prompt = base_url.rsplit("/", 2)[1:]
    dice = random.Random(trajectory)

    def note(event: str, **fields: Any) -> None:
        line = {"event": event, "trajectory": trajectory, "prompt": prompt, "at": time.time()}
        os.write(_log(os.getpid()), json.dumps(line | fields).encode() + b"\n")

    client = AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        max_retries=RETRIES,
        http_client=http_client(asyncio.get_running_loop()),
    )
    asked = task["question"]
    messages: list[Any] = []
    shown: list[str] = []
    try:
        for turn in range(dice.randint(1, MAX_TURNS)):
            content: list[Any] = [{"type": "text", "text": asked}]
            draws = dice if turn else random.Random(prompt)
            if draws.random() < SHOWN:
                image = picture(draws)
                content.append({"type": "image_url", "image_url": {"url": data_url(image)}})
                shown.append(digest_of(image))
            messages.append({"role": "user", "content": content})
            began = time.time()
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=MAX_TOKENS, logprobs=True
            )
            (choice,) = reply.choices
            tokens = choice.logprobs.content if choice.logprobs else None
            note(
                "answered",
                call=reply.id.removeprefix("chatcmpl-"),
                began=began,
                asked=asked,
                log_probs=[t.logprob for t in tokens or ()],
                pictures=shown,
            )
            messages.append(choice.message.model_dump(exclude_none=True))
            asked = f"Turn {turn + 2}: {dice.randint(0, 999)} - {dice.randint(0, 999)} = "
            await asyncio.sleep(dice.uniform(0, THINKS_S))
    except BaseException as e:
        note("failed", error=f"{type(e).__name__}: {e}"[:300])
        raise
    if dice.random() < RAISES:
        note("raised")
        raise OnPurposeError(trajectory)
    reward = dice.random()
    note("returned", reward=reward)
    return reward


def picture(dice: random.Random) -> Image.Image:
    """Coarse random colours, of one of `SIZES`."""
    colours = Image.frombytes("RGB", (8, 8), dice.randbytes(8 * 8 * 3))
    return colours.resize(dice.choice(SIZES), Image.Resampling.NEAREST)


def data_url(image: Image.Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def digest_of(image: Image.Image) -> str:
    """The name of an RGB picture, by its definition in `stepwell/datapool/pictures.py`."""
    return sha256(b"RGB %d %d\n" % image.size + image.tobytes()).hexdigest()


@lru_cache(maxsize=1)
def _log(pid: int) -> int:
    """The descriptor of this process's log."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{pid}-{time.time_ns()}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

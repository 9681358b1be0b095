"""A service that answers sums, with 20 agents at once; each question goes to four, for a vote.

OPENAI_BASE_URL=http://127.0.0.1:8100/v1 OPENAI_API_KEY=any python -m examples.live.service 0
"""

import asyncio
import json
import sys
import time
from typing import Any

import reasoning_gym
from openai import AsyncOpenAI

from examples.recipes.openai_tool import CALCULATOR, calculator

QUESTIONS_AT_ONCE, VOTES, MAX_TURNS = 5, 4, 4
LLM = AsyncOpenAI(max_retries=0)  # so that no failure is hidden


async def conversation(question: str, answer: str, metadata: Any) -> None:
    """One agent: it asks the model until it has an answer, then tells how good that was."""
    messages: list[Any] = [{"role": "user", "content": question}]
    began = time.monotonic()
    for _ in range(MAX_TURNS):
        reply = await LLM.chat.completions.with_raw_response.create(
            model="policy", messages=messages, tools=[CALCULATOR], temperature=1.0, max_tokens=48
        )
        message = reply.parse().choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = {"role": "tool", "content": calculator(call.function.arguments)}
            messages.append({**result, "tool_call_id": call.id})
    uid, version = (reply.headers[f"x-stepwell-{name}"] for name in ("trajectory", "version"))
    score = {"trajectory_uid": uid, "reward": float((message.content or "").strip() == answer)}
    await LLM.post("/complete_trajectory", cast_to=object, body=score)
    seconds = time.monotonic() - began
    talk = {"uid": uid, "question": question, "reply": message.content or ""}
    report(score=score["reward"], version=int(version), seconds=seconds, **talk)


async def desk(questions: Any, turn: int) -> None:
    for i in range(turn, len(questions), QUESTIONS_AT_ONCE):
        agents = (conversation(**questions[i]) for _ in range(VOTES))
        ended = await asyncio.gather(*agents, return_exceptions=True)
        failures = [failure for failure in ended if failure is not None]
        for failure in failures:
            report(failed=repr(failure))
        await asyncio.sleep(len(failures) / VOTES)  # what is down is not asked in a circle


def report(**what: Any) -> None:
    print(json.dumps({"at": time.time(), **what}), flush=True)


async def main(seed: int) -> None:
    sizes = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}
    questions = reasoning_gym.create_dataset("chain_sum", size=10**6, seed=seed, **sizes)
    await asyncio.gather(*(desk(questions, turn) for turn in range(QUESTIONS_AT_ONCE)))


asyncio.run(main(int(sys.argv[1])))

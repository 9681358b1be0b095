"""The agent: any code that calls a model. All that makes it trainable is its `base_url`."""

from openai import AsyncOpenAI

openai = AsyncOpenAI(base_url="http://given.later", api_key="given later")  # keeps connections


async def agent(task, base_url, api_key):
    """One rollout. Returns its reward, or None: then reward.py scores it."""
    client = openai.with_options(base_url=f"{base_url}/v1", api_key=api_key)
    question = [{"role": "user", "content": task["question"]}]
    await client.chat.completions.create(model="policy", messages=question, max_tokens=16)

"""The agent: any code that calls a model. All that makes it trainable is its `base_url`."""

from openai import AsyncOpenAI

# Made once: it takes 20 ms, and each task's client shares its connections.
openai = AsyncOpenAI(base_url="http://given-with-each-task", api_key="given with each task")


async def agent(task, base_url, api_key):
    """One rollout of one task. Return its reward, or None: then `reward.py` gives it."""
    client = openai.with_options(base_url=f"{base_url}/v1", api_key=api_key)
    await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task["question"]}],
        max_tokens=16,
    )

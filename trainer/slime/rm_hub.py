"""slime's rewards by its names, for functions that call them where slime is not installed.

    async_rm(args, sample)            one sample's reward: by custom_rm_path, or by rm_type
    batched_async_rm(args, samples)   several samples' rewards, in order
    remote_rm(args, sample)           the answer of `--rm-url`

Signatures and choices are those of THUDM/slime 0.3.1, `slime/rollout/rm_hub/__init__.py`; what is
computed is Stepwell's (`trainer/rewards/`). Does not own how a run of ours is scored.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import aiohttp

from stepwell.datapool.dotted import resolve
from stepwell.trainer.rewards.base import RewardFn
from stepwell.trainer.rewards.loading import BOXED, load_reward

NAMES = ("deepscaler", "dapo", "math", "f1", "gpqa", "random")
"""Values of `--rm-type` that are computed here, beside `remote_rm`."""
REQUEST_S = 120.0
"""Seconds for one try of a server."""


async def async_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Return the reward of a sample that has been rolled out.

    The function of the sample's `custom_rm_path` counts first, then that of `args`, then the
    `rm_type` of the sample's metadata, then that of `args`; `boxed_` before it scores what stands
    in the last \\boxed{}.

    Returns:
        A number; of `dapo` a dict with `score`, `acc` and `pred`; else what the function or the
        server returns.

    Raises:
        NotImplementedError: there is no such `rm_type`, or none is given.
        ImportError: there is no such function.
        aiohttp.ClientError, TimeoutError: the server of `remote_rm` does not answer.
    """
    path = getattr(sample, "custom_rm_path", None) or getattr(args, "custom_rm_path", None)
    if path is not None:
        return await _awaited(resolve(path)(args, sample, **kwargs))
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()
    if rm_type == "remote_rm":
        return await remote_rm(args, sample)
    if rm_type.removeprefix(BOXED) not in NAMES:
        raise NotImplementedError(
            f"rm_type is {rm_type!r}; use one of {', '.join(NAMES)}, with {BOXED} before it for "
            "the answer in the last box, or remote_rm, or name a function in custom_rm_path"
        )
    # In a thread: symbolic mathematics takes its time.
    score = await asyncio.to_thread(_built_in(rm_type), "", sample.response, sample.label, metadata)
    if isinstance(score, Mapping) and rm_type.removeprefix(BOXED) != "dapo":
        return score["score"]
    return score


async def batched_async_rm(args: Any, samples: list[Any], **kwargs: Any) -> list[Any]:
    """Return the rewards of `samples`, in order: of the function of `args.custom_rm_path`, which is
    given all of them at once, or else of `async_rm`. Raises as `async_rm`."""
    path = getattr(args, "custom_rm_path", None)
    if path is not None:
        rewards: list[Any] = await _awaited(resolve(path)(args, samples, **kwargs))
        return rewards
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))


async def remote_rm(args: Any, sample: Any, max_retries: int = 10) -> Any:
    """Return the JSON answer of `args.rm_url` to {prompt, response, label}.

    Raises:
        aiohttp.ClientError, TimeoutError: of the last of `max_retries` tries.
    """
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    limit = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=limit, raise_for_status=True) as http:
        for attempt in range(1, max_retries + 1):
            try:
                async with http.post(args.rm_url, json=body) as answer:
                    return await answer.json()
            except (aiohttp.ClientError, TimeoutError):
                if attempt == max_retries:
                    raise
            await asyncio.sleep(min(2 ** (attempt - 1), 30) + random.random())
    raise ValueError(f"max_retries is {max_retries}; the server is asked at least once")


@cache
def _built_in(rm_type: str) -> RewardFn:
    # slime's takes an answer from a box alone, where ours also reads one that stands last.
    return load_reward(f"{BOXED}math" if rm_type == "math" else rm_type)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result

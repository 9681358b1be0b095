"""This module is the built-in rollout generator: a loop of an OpenAI client over a file of prompts.
A generator of your own is this loop with another rollout or reward::

    from stepwell.gateway.slime_buffer.chat import run

    TASK_TYPE = "my_task"
    async def rollout(client, item, sampling_params): …    messages with the replies, finish_reason
    async def reward(item, messages): …                    a number, or None: not scored
    def run_rollout(data): run(data, rollout, reward)

    for each epoch, shuffled: for each line of input_file: a group of num_repeat_per_sample
        rollouts, num_process at a time ──call, score──► POST /buffer/write

Calls go to `remote_engine_url` and messages are written, as slime does it; without one, or if it is
an engine of this gateway, they go through the gateway, which records them token for token. A line
is `{"prompt": text or messages, "label": …, "instance_id": …}`; the instance is by default the
line's number. Every entry of `skip_instance_ids` skips one group. A call that fails is tried
`TRIES` times; then its rollout is given up, the others go on, and at the end `run` raises.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from openai import APIStatusError, AsyncOpenAI, OpenAIError
from pydantic import ConfigDict, Field

from stepwell.datapool.dotted import resolve
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.scoring import Scoring
from stepwell.gateway.slime_buffer.generators import KEY

TASK_TYPE = "chat"

Item: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[dict[str, Any]]
Rollout: TypeAlias = Callable[[AsyncOpenAI, Item, dict[str, Any]], Awaitable[tuple[Messages, str]]]
Reward: TypeAlias = Callable[[Item, Messages], Awaitable[float | None]]

TRIES = 6
"""Tries of a call, as many as in slime; then its rollout is given up."""
WRITE_TRIES = 32
"""A pool that is full, or away, says to wait for a second or more."""

Number: TypeAlias = Annotated[int, Field(ge=1, strict=False)]
"""slime sends its numbers as text."""


class Task(Params):
    """Fields of `/start_rollout` that this generator reads."""

    model_config = ConfigDict(extra="ignore")
    gateway_url: str
    input_file: str
    task_type: str = TASK_TYPE
    num_repeat_per_sample: Number
    num_process: Number = 100
    num_epoch: Number = 1
    max_tokens: Number | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    remote_engine_url: str | None = None
    skip_instance_ids: tuple[int | str, ...] = Field(default=(), strict=False)
    reward_fn: str | None = None
    """`gateway.reward_fn`; nothing that a request says."""

    @property
    def sampling(self) -> dict[str, Any]:
        longest = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**longest, **self.sampling_params}


class RolloutError(RuntimeError):
    """Rollouts that could not be made."""


def check_rollout(data: dict[str, Any]) -> None:
    """Raises ValueError: `run_rollout(data)` would fail before its first call."""
    task = Task.read(data)
    next(_lines(Path(task.input_file)), None)
    if task.reward_fn is None:
        raise ValueError(
            f"gateway.reward_fn is null; set it to the function that scores {task.task_type!r}, "
            "e.g. stepwell.trainer.rewards.maths:deepscaler, or name a generator with its own "
            "reward in gateway.rollout_generators"
        )


def run_rollout(data: dict[str, Any]) -> None:
    """One turn per rollout, scored by `gateway.reward_fn`."""
    check_rollout(data)
    task = Task.read(data)
    path = str(task.reward_fn)
    scoring = Scoring(path, resolve(path))

    async def reward(item: Item, messages: Messages) -> float | None:
        known = {"data_source": item.get("data_source", task.task_type), "extra_info": item}
        truth = item.get("label", (item.get("reward_model") or {}).get("ground_truth"))
        found = await scoring.score(
            {**known, "solution_str": _said(messages[-1]), "ground_truth": truth}
        )
        scored: float | None = found["reward"]
        return scored

    with closing(scoring):
        run(data, single_turn, reward)


def _said(reply: dict[str, Any]) -> str:
    """A reply's text as rewards know it: the thought, which the gateway hands out apart, before the
    answer."""
    thought, content = reply.get("reasoning_content"), reply["content"] or ""
    return f"<think>\n{thought}\n</think>\n\n{content}" if thought else content


async def single_turn(
    client: AsyncOpenAI, item: Item, sampling_params: dict[str, Any]
) -> tuple[Messages, str]:
    """The reply to the item's prompt."""
    prompt = item["prompt"]
    messages: Messages = [{"role": "user", "content": prompt}] if type(prompt) is str else prompt
    more = {"tools": item["tools"]} if item.get("tools") else {}
    done = await client.chat.completions.create(
        model="custom",
        messages=messages,  # type: ignore[arg-type]  # as the data has them
        **more,
        **sampling_params,
    )
    choice = done.choices[0]
    reply = choice.message.model_dump(exclude_none=True)
    return [*messages, {"content": "", **reply}], str(choice.finish_reason)


def run(data: dict[str, Any], rollout: Rollout, reward: Reward) -> None:
    """Make the rollouts that `data` asks for.

    Raises:
        RequestError: a field of `data` is wrong.
        RolloutError: some could not be made; all others are written.
    """
    asyncio.run(_Loop(Task.read(data), rollout, reward).run())


class _Loop:
    def __init__(self, task: Task, rollout: Rollout, reward: Reward) -> None:
        self._task = task
        self._rollout, self._reward = rollout, reward
        self._key = os.environ.get(KEY) or "none"
        self._turns = asyncio.Semaphore(task.num_process)
        self._failed = 0
        self._why = ""

    async def run(self) -> None:
        this = asyncio.current_task()
        if this is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        client = AsyncOpenAI(
            base_url=self._task.gateway_url, api_key=self._key, max_retries=TRIES - 1
        )
        async with client as self._client:
            under_way: set[asyncio.Task[None]] = set()
            n = 0
            try:
                for item in self._groups():
                    # Whoever is ahead by more than the calls in flight only fills the memory.
                    while len(under_way) * self._task.num_repeat_per_sample >= (
                        self._task.num_process + self._task.num_repeat_per_sample
                    ):
                        _, under_way = await asyncio.wait(
                            under_way, return_when=asyncio.FIRST_COMPLETED
                        )
                    under_way.add(asyncio.create_task(self._group(item)))
                    n += self._task.num_repeat_per_sample
                if under_way:
                    await asyncio.wait(under_way)
            finally:
                for group in under_way:
                    group.cancel()
                await asyncio.gather(*under_way, return_exceptions=True)
        if self._failed:
            raise RolloutError(f"{self._failed} of {n} rollouts failed; the last: {self._why}")

    def _groups(self) -> Iterator[Item]:
        items = list(_lines(Path(self._task.input_file)))
        random.shuffle(items)
        skip = Counter(map(str, self._task.skip_instance_ids))
        for _ in range(self._task.num_epoch):
            for item in items:
                name = str(item["instance_id"])
                if skip[name] > 0:
                    skip[name] -= 1
                else:
                    yield item

    async def _group(self, item: Item) -> None:
        n = self._task.num_repeat_per_sample
        if self._task.remote_engine_url is not None:
            url = self._task.remote_engine_url.rstrip("/").removesuffix("/v1")
            places = [{"base_url": url, "api_key": "none"}] * n
        else:
            # Named, so that one that is asked for again is not another.
            body = {
                "prompt_uid": uuid.uuid4().hex,
                "n": n,
                "metadata": {"instance_id": item["instance_id"]},
            }
            try:
                places = (await self._post("/v1/groups", body))["trajectories"]
            except Exception as e:  # noqa: BLE001 - told at the end, as that of a rollout
                self._give_up(n, e)
                return
        await asyncio.gather(*(self._one(item, place) for place in places))

    async def _one(self, item: Item, place: dict[str, str]) -> None:
        """One rollout, from its calls to its item in the buffer."""
        uid = place.get("trajectory_uid")
        try:
            async with self._turns:
                made = await self._made(dict(item), place)
            written = {**made, "trajectory_uid": uid} if uid else made
            await self._post("/buffer/write", written)
        except BaseException as e:  # cancelled ones too: an open trajectory would hold its group up
            if uid is not None:
                with suppress(RolloutError):  # gone already, or it ends
                    path = f"{place['base_url']}/v1/abort_trajectory"
                    await self._post(path, {"reason": f"{type(e).__name__}: {e}"}, tries=1)
            if not isinstance(e, Exception):
                raise
            self._give_up(1, e)

    def _give_up(self, n: int, why: Exception) -> None:
        """`n` rollouts; the others go on."""
        self._failed, self._why = self._failed + n, f"{type(why).__name__}: {why}"

    async def _made(self, item: Item, place: dict[str, str]) -> Item:
        task = self._task
        # One pool of connections for all.
        client = self._client.with_options(
            base_url=f"{place['base_url']}/v1", api_key=place["api_key"]
        )
        for _ in range(TRIES):
            messages, finish_reason = await self._rollout(client, item, dict(task.sampling))
            if finish_reason != "abort":  # an engine's, at an update of its weights
                break
        else:
            raise RolloutError(f"the engine aborted {TRIES} times in a row")
        reward = await self._reward(item, messages)
        told = {
            "timestamp": str(time.time()),
            "round_number": sum(m["role"] == "assistant" for m in messages),
            "finish_reason": finish_reason,
        }
        return {
            "uid": uuid.uuid4().hex,
            "instance_id": item.pop("instance_id"),
            "messages": messages,
            "reward": reward,
            "extra_info": {**item, **task.sampling, **told},
        }

    async def _post(self, path: str, body: Any, tries: int = WRITE_TRIES) -> Any:
        """Return the gateway's answer; it is asked again while it, or its pool, is away or full."""
        client = self._client.with_options(max_retries=tries - 1)
        try:
            return await client.post(path, cast_to=object, body=body)
        except APIStatusError as e:
            why = f"answered {e.status_code}: {e.response.text:.500}"
            raise RolloutError(f"POST {path} {why}") from e
        except OpenAIError as e:
            raise RolloutError(
                f"POST {path} failed {tries} times; the last: {e.__cause__ or e}"
            ) from e


def _lines(path: Path) -> Iterator[Item]:
    """The items of a JSONL file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for i, line in enumerate(file):
                if not line.strip():
                    continue
                item = json.loads(line)
                if not isinstance(item, dict) or not isinstance(item.get("prompt"), str | list):
                    raise ValueError(f"line {i + 1} is {line!r:.80}; it is an object with a prompt")
                yield {"instance_id": i, **item}
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"input_file is {str(path)!r}, which cannot be read: {e}") from e

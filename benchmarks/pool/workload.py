"""Data of the pool's benches: LLM calls as a gateway has them, plain lists and small dicts.

Workload A: prompts x 8 rollouts x 4 turns, in the order in which rollouts that run side by side
produce them::

    turn 0          P0 ──► R0              512 prompt tokens, the same for the 8 rollouts
    turn 1          P0 R0 U1 ──► R1        each prompt is the one before + its response + 172 new
    turn 3          P0 R0 U1 R1 U2 R2 U3   1,412 prompt tokens; 128 response tokens each

Nothing here knows of any store: what a `Call` is turned into is inside each system's measured part.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepwell.datapool import Step

T = TypeVar("T")

ROLLOUTS = 8
TURNS = 4
STEPS_PER_GROUP = ROLLOUTS * TURNS
GROUPS_PER_FETCH = 4
STEPS_PER_FETCH = GROUPS_PER_FETCH * STEPS_PER_GROUP
"""128: a batch as a trainer takes it."""

VOCABULARY = 32_000
PAYLOAD_BYTES = 1_604
"""New tokens and log-probs of a step of workload A, 4 bytes each, a group's common prompt once."""


class Call(NamedTuple):
    """One LLM call. Log-probs are float32 values, so that a store can give them back exactly."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    trajectory_uid: str
    prompt_uid: str
    step_index: int
    parent_index: int | None
    is_last: bool
    metadata: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        return (self.trajectory_uid, self.step_index)

    def step(self) -> Step:
        """Return the call as the DataPool takes it; all of its validation happens here."""
        return Step(
            prompt_ids=self.prompt_ids,  # type: ignore[arg-type]  # lists are normalised
            response_ids=self.response_ids,  # type: ignore[arg-type]
            rollout_log_probs=self.log_probs,  # type: ignore[arg-type]
            trajectory_uid=self.trajectory_uid,
            prompt_uid=self.prompt_uid,
            step_index=self.step_index,
            parent_index=self.parent_index,
            is_last=self.is_last,
            finish_reason="stop",
            metadata=self.metadata,
        )

    @classmethod
    def of(cls, step: Step) -> Call:
        """Return the call of a Step that a store served."""
        if step.rollout_log_probs is None:
            raise RuntimeError(f"step {step.trajectory_uid!r} came back without its log-probs")
        return cls(
            step.prompt_ids.tolist(),
            step.response_ids.tolist(),
            step.rollout_log_probs.tolist(),
            step.trajectory_uid,
            step.prompt_uid,
            step.step_index,
            step.parent_index,
            step.is_last,
            dict(step.metadata),
        )


def workload_a(groups: int, name: str, seed: int = 0) -> Iterator[Call]:
    """Calls of `groups` groups; uids start with `name`."""
    return _calls(groups, name, seed, TURNS, first_prompt=512, new_tokens=172, response=128)


def small_calls(groups: int, name: str, turns: int = TURNS) -> Iterator[Call]:
    """The same shape in small: prompts of 8 + 8·k tokens, responses of 8."""
    return _calls(groups, name, 0, turns, first_prompt=8, new_tokens=0, response=8)


def _calls(
    groups: int,
    name: str,
    seed: int,
    turns: int,
    *,
    first_prompt: int,
    new_tokens: int,
    response: int,
) -> Iterator[Call]:
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=n)

    for group in range(groups):
        prompt_uid = f"{name}-{group}"
        prompts = [tokens(first_prompt)] * ROLLOUTS
        for turn in range(turns):
            for rollout in range(ROLLOUTS):
                response_ids = tokens(response)
                call = Call(
                    prompts[rollout],
                    response_ids,
                    _log_probs(rng, response),
                    f"{prompt_uid}-{rollout}",
                    prompt_uid,
                    turn,
                    turn - 1 if turn else None,
                    turn == turns - 1,
                    {
                        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
                        "request_id": f"{prompt_uid}-{rollout}-{turn}",
                    },
                )
                yield call
                prompts[rollout] = call.prompt_ids + response_ids + tokens(new_tokens)


def _log_probs(rng: random.Random, n: int) -> list[float]:
    values: list[float] = np.array([-rng.random() for _ in range(n)], np.float32).tolist()
    return values


def chunks(items: Iterator[T] | Sequence[T], size: int) -> Iterator[list[T]]:
    """`items` in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


async def submit_all(
    submit: Callable[[list[Call]], Awaitable[object]],
    calls: Iterator[Call] | Sequence[Call],
    per_submit: int,
    in_flight: int,
) -> None:
    """`calls` to `submit`, `per_submit` a call of it, with `in_flight` calls under way."""
    waiting = chunks(calls, per_submit)

    async def produce() -> None:
        for chunk in waiting:
            await submit(chunk)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(produce())


def check_exact(sent: Sequence[Call], received: Sequence[Call]) -> None:
    """Every call came back once, with exactly its content.

    Raises:
        RuntimeError: it did not; names the first call that differs.
    """
    expected = {call.key: call for call in sent}
    for call in received:
        if expected.pop(call.key, None) != call:
            raise RuntimeError(f"step {call.key} came back changed, twice or from nowhere")
    if expected:
        raise RuntimeError(f"{len(expected)} steps never came back, e.g. {next(iter(expected))}")

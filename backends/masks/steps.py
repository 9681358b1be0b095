"""Conversations as Steps, for the DataPool: each assistant message is one LLM call."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.backends.masks.base import LossMaskGenerator, Message, Tool
from stepwell.datapool.types import Step


def to_steps(
    generator: LossMaskGenerator,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    trajectory_uid: str,
    prompt_uid: str,
    reward: float | None = None,
) -> list[Step]:
    """A Step for each assistant message that has loss; none if all have `step_loss_mask` 0.

    Within a row, prompts extend one another (`parent_index`), so that trainers merge them again;
    every token of a Step's response has loss. They have no `rollout_log_probs`: no engine sampled
    them, so they are for losses that need none (SFT).

        steps = to_steps(generator, messages, trajectory_uid="t", prompt_uid="p", reward=1.0)
        await pool.submit_steps(steps, channel="sft")

    Args:
        reward: of the conversation, put on the last Step; None: not scored.

    Raises:
        MaskError: see `LossMaskGenerator.rows`.
    """
    found = []
    for row in generator.rows(messages, tools):
        parent: int | None = None
        for turn in row.turns:
            if not turn.has_loss:
                continue
            found.append((row, turn, parent))
            parent = len(found) - 1
    return [
        Step(
            prompt_ids=row.token_ids[: turn.start],
            response_ids=row.token_ids[turn.start : turn.end],
            reward=reward if index == len(found) - 1 else None,
            trajectory_uid=trajectory_uid,
            prompt_uid=prompt_uid,
            step_index=index,
            is_last=index == len(found) - 1,
            metadata=({} if turn.message_index is None else {"message_index": turn.message_index}),
            parent_index=parent,
            finish_reason="stop",
        )
        for index, (row, turn, parent) in enumerate(found)
    ]

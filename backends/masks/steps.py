"""Conversations as Steps, for the DataPool: each assistant message is one LLM call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.backends.errors import MaskError
from stepwell.backends.masks.base import LossMaskGenerator, MaskedRow, Message, Tool, Turn
from stepwell.backends.pictures import CanonicalPicture, PictureProcessor
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import Step


def to_steps(
    generator: LossMaskGenerator,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    trajectory_uid: str,
    prompt_uid: str,
    reward: float | None = None,
    vision: PictureProcessor | None = None,
    pictures: Sequence[Sequence[CanonicalPicture]] = (),
) -> list[Step]:
    """A Step for each assistant message that has loss; none if all have `step_loss_mask` 0.

    Within a row, prompts extend one another (`parent_index`), so that trainers merge them again;
    every token of a Step's response has loss. They have no `rollout_log_probs`: no engine sampled
    them, so they are for losses that need none (SFT).

        steps = to_steps(generator, messages, trajectory_uid="t", prompt_uid="p", reward=1.0)
        await pool.submit_steps(steps, channel="sft")

    Args:
        reward: of the conversation, put on the last Step; None: not scored.
        vision: of a model that reads pictures.
        pictures: those of each message.

    Raises:
        MaskError: see `LossMaskGenerator.rows`; or the template shows another number of pictures,
            or the assistant writes ids of vision tokens.
    """
    found = []
    for one_placeholder_each in generator.rows(messages, tools):
        row, shown = one_placeholder_each, list[Picture]()
        if vision is not None:
            row, shown = _expanded(one_placeholder_each, messages, vision, pictures)
        parent: int | None = None
        for turn in row.turns:
            if not turn.has_loss:
                continue
            found.append((row, turn, parent, [p for p in shown if p.end <= turn.start]))
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
            pictures=tuple(before),
        )
        for index, (row, turn, parent, before) in enumerate(found)
    ]


def _expanded(
    row: MaskedRow,
    messages: Sequence[Message],
    vision: PictureProcessor,
    pictures: Sequence[Sequence[CanonicalPicture]],
) -> tuple[MaskedRow, list[Picture]]:
    """The row with as many placeholders as each of its pictures has tokens, and the pictures."""
    last = row.turns[-1].message_index
    if last is None:  # of a generator of somebody's own, whose row ends with the last turn
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    shown = [picture for own in pictures[:last] for picture in own]
    places = np.flatnonzero(row.token_ids == vision.placeholder_id)
    if len(places) != len(shown):
        raise MaskError(
            f"messages[:{last}] hold {len(shown)} pictures and the chat template shows "
            f"{len(places)}; leave the text of its placeholder out, and put pictures where it "
            "shows them"
        )
    for turn in row.turns:
        written = row.token_ids[turn.start : turn.end]
        if np.isin(written, vision.forbidden_ids).any():
            raise MaskError(
                f"messages[{turn.message_index}] of the assistant has a vision token, which the "
                "model never samples; take it out"
            )
    lengths = np.ones(len(row.token_ids), np.int64)
    lengths[places] = [picture.n_tokens for picture in shown]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    turns = tuple(
        Turn(t.message_index, int(begins[t.start]), int(begins[t.end]), t.has_loss)
        for t in row.turns
    )
    ids, mask = np.repeat(row.token_ids, lengths), np.repeat(row.loss_mask, lengths)
    return MaskedRow(ids, mask, turns), [
        Picture(p.digest, p.width, p.height, int(begins[place]), p.n_tokens)
        for p, place in zip(shown, places, strict=True)
    ]

"""This module shows a trajectory as an item of slime's Rollout Buffer, so that slime's trainer gets
the ids that were sampled.

    Row     prompt of the root │ sampled │ tool result │ sampled
    tokens  ───────────────────┼─────────┼─────────────┼────────
    mask                       │ 1 1 1 1 │ 0 0 0 0 0 0 │ 1 1 1      response_length values

One branch is one row; an item is the row that ends in the trajectory's last call, the others are
its `branches`; replies that nobody saw are in none. Its `messages` are those that the Steps keep,
with sampled text as it was sampled. They are a view: whoever trains takes the ids. Pure. Does not
own: items that are written (`writes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import branches
from stepwell.datapool.types import Group, Step, TokenIds, Trajectory, mapping_in, superseded
from stepwell.gateway.tokens.messages import MESSAGES, Message
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

InstanceId: TypeAlias = int | str

INSTANCE = "instance_id"
"""Field of an item, and key of the metadata of groups and trajectories."""
WRITTEN = "rollout_item"
"""Key of a trajectory's metadata that keeps what `/buffer/write` was sent."""


@dataclass(frozen=True, slots=True)
class Row:
    """One branch of a trajectory as one sample. Arrays have one value per response token, which are
    those behind the root's prompt."""

    steps: Sequence[Step]
    """From the root to the leaf; each prompt extends the one before with its response."""
    tokens: TokenIds
    loss_mask: npt.NDArray[np.int8]
    """1: sampled, and in no earlier row."""
    log_probs: npt.NDArray[np.float32] | None
    """0 where nothing was sampled, as in slime; None if a sampled token's is not known."""

    def as_dict(self) -> dict[str, Any]:
        versions = [[v.version for v in s.version_spans] or [s.policy_version] for s in self.steps]
        return {
            "tokens": self.tokens,
            "response_length": len(self.loss_mask),
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.log_probs,
            "weight_versions": [str(v) for of_step in versions for v in of_step],
        }


def rows(steps: Sequence[Step]) -> list[Row]:
    """The branches of a trajectory, that of its last call first, without replies that nobody saw.
    Each sampled token counts in one of them."""
    unseen = superseded(steps)
    seen = [step for step in steps if step.step_index not in unseen]
    in_order = sorted(seen or steps, key=lambda step: step.step_index)
    counted: set[int] = set()
    made = []
    for path in reversed(branches(in_order)):
        chain = [in_order[i] for i in path]
        made.append(_row(chain, counted))
        counted.update(step.step_index for step in chain)
    return made


def _row(chain: Sequence[Step], counted: set[int]) -> Row:
    tokens = chain[-1].token_ids
    start = len(chain[0].prompt_ids)
    mask = np.zeros(len(tokens) - start, np.int8)
    log_probs: npt.NDArray[np.float32] | None = np.zeros(len(mask), np.float32)
    for step in chain:
        if step.step_index in counted:
            continue
        begin = len(step.prompt_ids) - start
        where = slice(begin, begin + len(step.response_ids))
        mask[where] = 1
        if step.rollout_log_probs is None:
            log_probs = None
        elif log_probs is not None:
            log_probs[where] = step.rollout_log_probs
    return Row(chain, tokens, mask, log_probs)


def messages_of(chain: Sequence[Step], tokenizer: ChatTokenizer) -> list[Message]:
    """Messages along a branch. Assistant messages that were not sampled carry `step_loss_mask: 0`,
    which slime's mask generators read. A Step that keeps no messages shows the text of its new
    ids as one user message."""
    control = set(tokenizer.special.values())
    said: list[Message] = []
    known = 0
    for step in chain:
        new = _kept(step)
        if new is None:
            text = tokenizer.decode(step.prompt_ids[known:].tolist())
            new = [{"role": "user", "content": text}]
        said += [{**m, "step_loss_mask": 0} if m["role"] == "assistant" else m for m in new]
        ids = step.response_ids.tolist()
        sampled = tokenizer.decode(ids[:-1] if ids[-1] in control else ids)
        said.append({"role": "assistant", "content": sampled})
        known = step.n_tokens
    return said


def _kept(step: Step) -> list[Message] | None:
    """The messages that the Step's prompt added. Checked, as its producer may be anyone."""
    kept = step.metadata.get(MESSAGES)
    if not isinstance(kept, list) or not kept:
        return None
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in kept):
        return None
    return kept[:-1] if kept[-1]["role"] == "assistant" else kept


def make_item(
    trajectory: Trajectory, group: Group, instance_id: InstanceId, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """One trajectory in slime's shape, with every field that it was written with."""
    main, *others = rows(trajectory.steps)
    metadata = dict(trajectory.metadata)
    metadata.pop(INSTANCE, None)
    written = mapping_in(metadata, WRITTEN)
    metadata.pop(WRITTEN, None)
    uid = written.get("uid")
    extra = {
        "finish_reason": main.steps[-1].finish_reason,
        "round_number": len(main.steps),
        "trajectory_uid": trajectory.trajectory_uid,
        "prompt_uid": trajectory.prompt_uid,
        INSTANCE: instance_of(group),
        "delivery": group.delivery,
        **metadata,
        **mapping_in(written, "extra_info"),
    }
    return {
        "raw_reward": trajectory.reward,  # before whatever normalises it
        **written,
        "uid": uid if uid and isinstance(uid, str) else trajectory.trajectory_uid,
        INSTANCE: instance_id,
        "messages": written.get("messages") or messages_of(main.steps, tokenizer),
        "reward": trajectory.reward,
        "extra_info": extra,
        **main.as_dict(),
        "branches": [row.as_dict() for row in others],
    }


def instance_of(group: Group) -> InstanceId:
    """Instance id that the producer gave when it opened the group or one of its trajectories; the
    group's uid if it gave none."""
    for metadata in (group.metadata, *(t.metadata for t in group.trajectories)):
        value = metadata.get(INSTANCE)
        if isinstance(value, int | str) and not isinstance(value, bool) and value != "":
            return value
    return group.prompt_uid

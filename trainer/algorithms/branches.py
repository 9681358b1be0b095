"""This module tells the calls of a trajectory by what they are for, so that titles and probes that
a harness makes beside its work are not trained as if they were the work.

A trajectory is a forest: calls that go on from each other are one tree (`datapool/branches.py`)::

    ●──●──────────●──●      main: the first that is no side call
       └──●──●              sub_agent: begins and ends while main goes on (a tree of its own)
    ●                       side: offered no tools, where others are (titles, summaries);
                            or one call for one token (probes of quota and connection)
                ●──●──●     main: begins when main has ended (a compacted conversation)

Trained tokens of every tree share the trajectory's advantage; others count nowhere, as with
`algorithm.loss.mask_superseded`. Does not own what is masked for other reasons (`losses.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from stepwell.datapool.branches import parents
from stepwell.datapool.types import Step, last_seen, superseded
from stepwell.trainer.config.rollout import BranchKind

Kinds: TypeAlias = Collection[BranchKind]
ALL: frozenset[BranchKind] = frozenset(get_args(BranchKind))


def kinds(steps: Sequence[Step]) -> list[BranchKind]:
    """The kind of each step of one trajectory, which are in order of `step_index`."""
    trees: dict[int, list[int]] = {}
    root_of: list[int] = []
    for i, parent in enumerate(parents(steps)):  # a parent comes before its children
        root_of.append(i if parent is None else root_of[parent])
        trees.setdefault(root_of[i], []).append(i)
    has_tools = {root: any(_offered(steps[i]) for i in of) for root, of in trees.items()}
    found: list[BranchKind] = ["main"] * len(steps)
    ended: int | None = None
    """Last step of the main tree so far."""
    side = {
        root
        for root, of in trees.items()
        if (any(has_tools.values()) and not has_tools[root])
        or (len(of) == 1 and len(steps[root].response_ids) == 1 and _is_cut(steps[root]))
    }
    if len(side) == len(trees):  # all that it did
        return found
    for root, of in sorted(trees.items()):
        kind: BranchKind = "side" if root in side else "main"
        if kind == "main" and ended is not None and root < ended:
            kind = "sub_agent"
        elif kind == "main":
            ended = of[-1]
        for i in of:
            found[i] = kind
    return found


def of_kinds(steps: Sequence[Step], lengths: Tensor, wanted: Kinds) -> Tensor | None:
    """The mask of `rollout.train_branches`, [T]: 0 on calls of other kinds. None: there are none.

    Args:
        lengths: response tokens of each step, [S].
    """
    trajectories: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        trajectories.setdefault(step.trajectory_uid, []).append(i)
    kept = [1.0] * len(steps)
    for of in trajectories.values():
        if len(of) == 1:
            continue
        ordered = sorted(of, key=lambda i: steps[i].step_index)
        for i, kind in zip(ordered, kinds([steps[i] for i in ordered]), strict=True):
            kept[i] = float(kind in wanted)
    return torch.tensor(kept).repeat_interleave(lengths) if 0.0 in kept else None


def answer(steps: Sequence[Step], wanted: Kinds | None) -> int:
    """Place of the call of one trajectory, whose steps are in order, that holds its answer: the
    last reply that was seen; of `main`, where not all kinds are `wanted` (None: they are)."""
    last = last_seen(steps)
    if wanted is None or set(wanted) == ALL:
        return last
    unseen, of = superseded(steps), kinds(steps)
    main = (i for i, kind in enumerate(of) if kind == "main" and steps[i].step_index not in unseen)
    return max(main, default=last)


def _offered(step: Step) -> bool:
    """The model was offered tools, as the gateway says: how many it called, or 0."""
    return step.metadata.get("tool_calls") is not None


def _is_cut(step: Step) -> bool:
    return step.finish_reason == "length"
